"""Experts: a channel of E MLPs, of which each token uses A, and no-op experts.

A *channel* is the half of a block that looks at one token at a time. `Experts` stands where `MLP` stands in a full
block; whatever surrounds it, routed or not, does not know the difference. Two rules:

  train   Static shapes: each expert has C slots per row (`expert_routing`). Token choice drops what overflows; expert
          choice looks at the whole row.
  causal  Nobody is dropped, and each token decides alone: its own A experts whatever its batch mates do, or, under
          expert choice, every expert for which its probability exceeds that expert's averaged cut-off.

Vocabulary: B rows, T positions, D width, F hidden, E experts, N choices (experts, then no-ops), A claims per token,
C slots per expert and row, M = B * C slots per expert.
"""

import functools
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from mod_jax import expert_routing
from mod_jax.config import Config
from mod_jax.expert_routing import BalanceSums
from mod_jax.models.layers import normal
from mod_jax.models.memory import Tokens
from mod_jax.models.mlp import ACTIVATIONS
from mod_jax.sharding import RULES, constrain, param

if TYPE_CHECKING:
    from mod_jax.models.blocks import Choice

# Saved by every remat policy, like the indices of routed blocks: the backward pass must not choose other experts.
EXPERT_SLOTS = "expert_slots"

BLOCK = 128  # claims of one expert per product where nobody is dropped
SERVED = "experts"  # the name of that loop in a program; plans of decoding know it by it


class ExpertTokens(NamedTuple):
    """Where each token went: the ids of its choices, -1 for none; and whether an expert computed on it."""

    choice_BTA: jax.Array
    has_slot_BTA: jax.Array


class ExpertRecord(NamedTuple):
    """What one channel of experts did. `sums` is over rows.

    `cutoff_sum_A` adds up, over the `cutoff_rows_A` rows from which the expert took anything, the smallest probability
    that it took (expert choice, where A = E; zeros under token choice).
    """

    sums: BalanceSums
    cutoff_sum_A: jax.Array
    cutoff_rows_A: jax.Array
    of_tokens: ExpertTokens


class Experts(nnx.Module):
    """sum over a of p_a * MLP_a(x): p is a softmax over all N choices, in float32, and a runs over the chosen ones."""

    def __init__(self, config: Config, rngs: nnx.Rngs):
        e, D, F = config.experts, config.model.width, config.experts.hidden
        self.num_experts, self.num_chosen, self.num_choices = e.count, e.chosen, e.count + e.noop
        self.capacity, self.choice, self.overflow = e.capacity, e.choice, e.overflow
        self.first_expert = 0  # of the stack of weights (see `take_from`)
        self.activation = config.model.activation
        self.router_DN = param(rngs, (D, self.num_choices), ("embed", None), normal(0.1 * D**-0.5), group="router")
        self.up_EDF = param(rngs, (e.count, D, F), ("experts", "embed", "mlp"), normal(D**-0.5))
        down_std = (2 * config.model.depth * F) ** -0.5
        self.down_EFD = param(rngs, (e.count, F, D), ("experts", "mlp", "embed"), normal(down_std))

    def __call__(self, x_BTD: jax.Array, tokens: Tokens, choice: "Choice") -> tuple[jax.Array, ExpertRecord]:
        """(the channel's update [B, T, D], what it did).

        Args:
          x_BTD: the normalised input.
          tokens: those that are not there, padding and empty slots of a routed block, claim nothing and count nowhere.
          choice: rule "topk" is the training rule here too; all others are causal (see the module).
        """
        B, T, D = x_BTD.shape
        valid_BT, causal = tokens.segments_BT > 0, choice.rule != "topk"
        input_MD = x_BTD.astype(jnp.float32).reshape(B * T, D)
        logits_BTN = jnp.dot(input_MD, self.router_DN[...], precision=jax.lax.Precision.HIGHEST).reshape(B, T, -1)
        if self.choice == "expert":
            return self._experts_choose(x_BTD, logits_BTN, valid_BT, causal, choice.expert_cutoffs_LE)
        claims = jax.vmap(expert_routing.choose_experts, (0, None))(logits_BTN, self.num_chosen)
        choice_BTA = checkpoint_name(claims.choice_TA, EXPERT_SLOTS)
        if causal:
            wanted_BTA = jnp.where(valid_BT[..., None], choice_BTA, self.num_experts)
            has_slot_BTA = wanted_BTA < self.num_experts
            update_BTD = self.without_drops(x_BTD, wanted_BTA, claims.gate_TA)
        else:
            slot_BTA, num_slots = self._slots(choice_BTA, valid_BT)
            has_slot_BTA = slot_BTA < self.num_experts * num_slots
            update_BTD = self.through_slots(x_BTD, claims.gate_TA, slot_BTA, num_slots)
        return update_BTD, self._record(logits_BTN, claims.gate_TA, choice_BTA, has_slot_BTA, valid_BT)

    def _slots(self, choice_BTA: jax.Array, valid_BT: jax.Array) -> tuple[jax.Array, int]:
        """(slot of each claim, slots per expert) of token choice."""
        T = choice_BTA.shape[1]
        num_slots = expert_routing.slots_per_expert(T, self.capacity, self.num_experts, self.num_chosen)
        pace = None
        if self.overflow == "paced":
            num_slots = expert_routing.paced_slots(num_slots, T)
            pace = self.capacity * self.num_chosen / self.num_experts
        assign = jax.vmap(expert_routing.assign_slots, (0, 0, None, None, None))
        slot_BTA = assign(choice_BTA, valid_BT, self.num_experts, num_slots, pace)
        return checkpoint_name(slot_BTA, EXPERT_SLOTS), num_slots

    def _experts_choose(self, x_BTD, logits_BTN, valid_BT, causal, cutoffs_E):
        """Expert choice: A = E claims per token, each with its own probability as gate."""
        B, T, _ = x_BTD.shape
        E = self.num_experts
        gate_BTE = jax.nn.softmax(logits_BTN, axis=-1)
        every_BTE = jnp.broadcast_to(jnp.arange(E, dtype=jnp.int32)[None, None], (B, T, E))
        if causal:
            if cutoffs_E is None:
                raise ValueError("experts.choice = 'expert': a causal rule needs expert_cutoffs_LE, one per expert")
            taken_BTE = valid_BT[..., None] & (gate_BTE > cutoffs_E[None, None])
            update_BTD = self.without_drops(x_BTD, jnp.where(taken_BTE, every_BTE, E), gate_BTE)
        else:
            num_slots = expert_routing.slots_per_expert(T, self.capacity, E, 1)
            slot_BTE = jax.vmap(expert_routing.assign_by_experts, (0, 0, None))(gate_BTE, valid_BT, num_slots)
            slot_BTE = checkpoint_name(slot_BTE, EXPERT_SLOTS)
            taken_BTE = slot_BTE < E * num_slots
            update_BTD = self.through_slots(x_BTD, gate_BTE, slot_BTE, num_slots)
        choice_BTE = jnp.where(taken_BTE, every_BTE, -1)
        return update_BTD, self._record(logits_BTN, gate_BTE, choice_BTE, taken_BTE, valid_BT)

    def through_slots(self, x_BTD: jax.Array, gate_BTA: jax.Array, slot_BTA: jax.Array, num_slots: int) -> jax.Array:
        """Moves tokens into C slots per expert and row, runs every expert on its own, and brings the results home.

        E stands in front while the experts run: it is the fast layout on a CPU, and the one that a mesh axis `expert`
        splits. Tokens then move over that axis only, twice (and twice in the backward pass).
        """
        B, _, D = x_BTD.shape
        E, C = self.num_experts, num_slots
        claim_BS = jax.vmap(expert_routing.claims_of_slots, (0, None))(slot_BTA, E * C)
        x_BSD = jax.vmap(expert_routing.to_slots)(x_BTD, slot_BTA, claim_BS)
        x_BECD = constrain(x_BSD.reshape(B, E, C, D), ("batch", None, None, None))
        x_EBCD = constrain(x_BECD.swapaxes(0, 1), ("experts", "expert_rows", None, None))
        y_EMD = self.mlps(x_EBCD.reshape(E, B * C, D))
        y_EBCD = constrain(y_EMD.reshape(E, B, C, D), ("experts", "expert_rows", None, None))
        y_BECD = constrain(y_EBCD.swapaxes(0, 1), ("batch", None, None, None))
        update_BTD = jax.vmap(expert_routing.from_slots)(y_BECD.reshape(B, E * C, D), gate_BTA, slot_BTA, claim_BS)
        return update_BTD.astype(x_BTD.dtype)

    def mlps(self, x_EMD: jax.Array) -> jax.Array:
        """Each expert on its own M tokens. [E, M, D]."""

        def down(hidden_EMF, weight_EFD):
            return jnp.einsum("EMF,EFD->EMD", ACTIVATIONS[self.activation](hidden_EMF), weight_EFD)

        up_EDF, down_EFD = self.up_EDF[...].astype(x_EMD.dtype), self.down_EFD[...].astype(x_EMD.dtype)
        # As in MLP: the activation is recomputed, not stored.
        return jax.checkpoint(down, prevent_cse=False)(jnp.einsum("EMD,EDF->EMF", x_EMD, up_EDF), down_EFD)

    def without_drops(self, x_BTD: jax.Array, choice_BTA: jax.Array, gate_BTA: jax.Array) -> jax.Array:
        """Every claim served, whatever the load. For evaluation and sampling: it has no gradient.

        On a mesh every device serves its own rows, with the weights of all experts. `choice_BTA` is E where nothing is
        claimed.
        """
        up_EDF, down_EFD = (_weights(stack, x_BTD.dtype) for stack in (self.up_EDF, self.down_EFD))
        run = functools.partial(
            _serve_all, activation=self.activation, num_experts=self.num_experts, first_expert=self.first_expert
        )
        mesh = jax.sharding.get_abstract_mesh()
        if not mesh.empty:
            rows, hidden = PartitionSpec(RULES.batch), RULES.mlp
            weights = PartitionSpec(None, None, hidden), PartitionSpec(None, hidden, None)
            run = jax.shard_map(
                functools.partial(run, sum_over=hidden), in_specs=(rows,) * 3 + weights, out_specs=rows, check_vma=False
            )
        return run(x_BTD, choice_BTA, gate_BTA, up_EDF, down_EFD)

    def take_apart(self) -> None:
        """Makes the weights of each expert an array of their own. Only `without_drops` can be used from then on.

        Decoding reads one expert for one token. Where a slice of a stack is a copy, that would cost as much again.
        """
        for name in ("up_EDF", "down_EFD"):
            apart = [nnx.Param(weight) for weight in getattr(self, name)[...]]
            delattr(self, name)
            setattr(self, name, nnx.List(apart))

    def take_from(self, stacked: "Experts", index: int) -> None:
        """Reads its weights where those of several blocks lie stacked, [L, E, ...], and this block's at `index`. Only
        `without_drops` can be used from then on.

        All E of them, as a slice of that stack, would be copied before one of them is read.
        """
        for name in ("up_EDF", "down_EFD"):
            stack = getattr(stacked, name)[...]
            setattr(self, name, nnx.Param(stack.reshape(-1, *stack.shape[2:])))
        self.first_expert = index * self.num_experts

    @staticmethod
    def flops(config: Config, num_tokens: float, num_pairs: float) -> tuple[float, float]:
        """(router and the MLPs that so many tokens are expected to pass, 0), forward.

        See `expected_mlps`.
        """
        e = config.experts
        router = 2 * num_tokens * config.model.width * (e.count + e.noop)
        return router + expected_mlps(config) * mlp_flops(config, num_tokens), 0.0

    def _record(self, logits_BTN, gate_BTA, choice_BTA, has_slot_BTA, valid_BT) -> ExpertRecord:
        count = jax.vmap(expert_routing.balance_sums, (0, 0, 0, 0, None))
        sums = count(logits_BTN, choice_BTA, has_slot_BTA, valid_BT, self.num_experts)
        sums = jax.tree.map(lambda a: jnp.sum(a, axis=0), sums)
        smallest_BA = jnp.min(jnp.where(has_slot_BTA, gate_BTA, jnp.inf), axis=1)
        has_any_BA = jnp.isfinite(smallest_BA) & (self.choice == "expert")
        cutoff_sum_A = jnp.sum(jnp.where(has_any_BA, smallest_BA, 0.0), axis=0)
        cutoffs = jax.lax.stop_gradient((cutoff_sum_A, jnp.sum(has_any_BA, axis=0, dtype=jnp.float32)))
        choice_BTA = jnp.where(valid_BT[..., None], choice_BTA, -1)
        return ExpertRecord(sums, *cutoffs, ExpertTokens(choice_BTA, has_slot_BTA))


def expected_mlps(config: Config) -> float:
    """MLPs that a token is expected to pass in training: of its A choices the share E / N are experts, not no-ops; and
    experts serve no more than they have slots for. Experts that choose fill all slots."""
    e = config.experts
    return e.capacity if e.choice == "expert" else e.chosen * min(e.capacity, e.count / (e.count + e.noop))


def mlp_flops(config: Config, num_tokens: float) -> float:
    """FLOPs of one expert's MLP on so many tokens, forward."""
    return 4 * num_tokens * config.model.width * config.experts.hidden


def _weights(stack: nnx.Param | nnx.List, dtype: jnp.dtype) -> jax.Array | tuple[jax.Array, ...]:
    """Weights of all experts in this dtype: one array, or one of each expert."""
    if isinstance(stack, nnx.List):
        return tuple(weight[...].astype(dtype) for weight in stack)
    return stack[...].astype(dtype)


def _serve_all(
    x_BTD: jax.Array,
    choice_BTA: jax.Array,
    gate_BTA: jax.Array,
    up_EDF: jax.Array | tuple[jax.Array, ...],
    down_EFD: jax.Array | tuple[jax.Array, ...],
    *,
    activation: str,
    num_experts: int,
    first_expert: int = 0,
    sum_over: str | None = None,
) -> jax.Array:
    """Sum over the claims of each token of gate * MLP, [B, T, D].

    Claims are sorted by expert and run in blocks of one expert each. Only blocks in use are computed, and only the
    weights of their experts are read: about as much work as there are claims, where T slots per expert would be E times
    as much.

    Args:
      up_EDF, down_EFD: stacks, or tuples of E arrays (see `Experts.take_apart`).
      first_expert: in the stacks, where there are more experts than these.
      sum_over: mesh axis over which the hidden dimension F is split.
    """
    B, T, D = x_BTD.shape
    E, A = num_experts, choice_BTA.shape[2]
    num_claims = B * T * A

    def mlp(x_CD, up_DF, down_FD):
        return ACTIVATIONS[activation](x_CD @ up_DF) @ down_FD

    branches = []
    if isinstance(up_EDF, tuple):
        pairs = zip(up_EDF, down_EFD, strict=True)
        branches = [functools.partial(mlp, up_DF=up_DF, down_FD=down_FD) for up_DF, down_FD in pairs]
    if branches and num_claims == 1:  # nothing to sort
        y_1D = jax.lax.switch(choice_BTA[0, 0, 0], [*branches, jnp.zeros_like], x_BTD[0])
        return (gate_BTA * y_1D[None].astype(jnp.float32)).astype(x_BTD.dtype)

    block = min(BLOCK, num_claims)
    choice_K = choice_BTA.reshape(num_claims)
    order_K = jnp.argsort(choice_K, stable=True)
    claims_E = jnp.sum(jax.nn.one_hot(choice_K, E, dtype=jnp.int32), axis=0)
    first_claim_E = jnp.cumsum(claims_E) - claims_E
    blocks_E = -(-claims_E // block)
    blocks_until_E = jnp.cumsum(blocks_E)
    x_MD = x_BTD.reshape(B * T, D)

    def weights_of(expert):
        place = first_expert + expert
        return [jax.lax.dynamic_index_in_dim(stack, place, keepdims=False) for stack in (up_EDF, down_EFD)]

    def run_block(start, run, y_KD):
        claims = order_K.at[start + jnp.arange(block)].get(mode="clip")
        # Rows behind the expert's last claim are the next block's first, which that block writes after this one.
        return jax.lax.dynamic_update_slice_in_dim(y_KD, run(x_MD[claims // A]), start, axis=0)

    def one_block(index, y_KD):
        expert = jnp.sum(index >= blocks_until_E)
        start = first_claim_E[expert] + (index - blocks_until_E[expert] + blocks_E[expert]) * block
        if branches:
            return run_block(start, lambda x_CD: jax.lax.switch(expert, branches, x_CD), y_KD)
        return run_block(start, lambda x_CD: mlp(x_CD, *weights_of(expert)), y_KD)

    def one_expert(index, y_KD):
        expert = used_E[index]
        own = weights_of(expert)  # once: where a slice is a copy, one for each block takes an eighth more time

        def own_block(index, y_KD):
            return run_block(first_claim_E[expert] + index * block, lambda x_CD: mlp(x_CD, *own), y_KD)

        return jax.lax.fori_loop(0, blocks_E[expert], own_block, y_KD)

    y_KD = jnp.zeros((num_claims + block, D), x_BTD.dtype)
    with jax.named_scope(SERVED):
        if branches or num_claims <= BLOCK:
            y_KD = jax.lax.fori_loop(0, blocks_until_E[-1], one_block, y_KD)
        else:
            used_E = jnp.argsort(blocks_E == 0, stable=True)  # those that are claimed, in order, then the others
            y_KD = jax.lax.fori_loop(0, jnp.sum(blocks_E > 0), one_expert, y_KD)
    place_K = jnp.zeros(num_claims, jnp.int32).at[order_K].set(jnp.arange(num_claims), unique_indices=True)
    y_BTAD = y_KD[place_K].reshape(B, T, A, D).astype(jnp.float32)
    update_BTD = jnp.sum(jnp.where(choice_BTA < E, gate_BTA, 0.0)[..., None] * y_BTAD, axis=2).astype(x_BTD.dtype)
    return update_BTD if sum_over is None else jax.lax.psum(update_BTD, sum_over)
