"""One block, and the routed block around it: who goes through, and what the block adds.

A *block* is f in x + f(x). It has up to two parts, each with a norm before it and a residual around it:

- the *mixer* is the only part that looks at other tokens, through a memory (see `memory`): attention, for example;
- the *channel* works on each token alone: an MLP, for example.

`Routed` wraps a block of any kind: x_i <- x_i + gate_i * f_i(x_S) for the selected tokens S; the others are bypassed.
It decides who is selected, and a *dispatch* (see `dispatch`) runs them through the block. A dispatch is a matter of
speed: whichever is taken, and whatever the memory, the same tokens are selected and get the same update.

Both kinds are called alike,

    x_BTD, memory, record = block(x_BTD, tokens, memory, choice, dispatch)

and nobody outside `make_block` asks what is inside. To add a kind of block: write its mixer or channel in a file of its
own, and give it a letter in `layout.LETTERS` (see docs/extending.md, as for a gate or a score).

Vocabulary: B rows, T positions, C slots (tokens that a routed block computes on), D width, L routed blocks. A *score*
is the router's raw float32 number per token; the *gate* is the weight multiplied on the block's update; *selected*
tokens go through the block, *bypassed* ones leave it bit for bit as they came.
"""

import dataclasses
import math
import pkgutil
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from mod_jax import routing
from mod_jax.config import Config
from mod_jax.errors import ConfigError
from mod_jax.layout import BlockSpec
from mod_jax.models.layers import RMSNorm, dense, inverse_rms, normal
from mod_jax.models.memory import Filled, Memory, Seen, Tokens
from mod_jax.sharding import param

CAUSAL_SELECTIONS = ("router", "predictor", "threshold")
SELECTIONS = ("topk", *CAUSAL_SELECTIONS)
RULES = (*SELECTIONS, "all", "nobody")

# Saved by every remat policy, so that the backward pass cannot choose other tokens.
ROUTING_INDICES = "routing_indices"


class Mixer(Protocol):
    """What looks at other tokens. It is made as `Mixer(config, rngs)`; weights are its own."""

    def ask(self, x_BTD: jax.Array, tokens: Tokens) -> tuple[Any, Any]:
        """(a query per token, an item per token: arrays [B, ..., T, H], all that later tokens see of it)."""

    def answer(self, query: Any, seen: Seen, tokens: Tokens) -> jax.Array:
        """What each token takes from those that it sees, [B, T, D]."""

    @staticmethod
    def flops(config: Config, num_tokens: float, num_pairs: float) -> tuple[float, float]:
        """Forward FLOPs: (products with weights, what is done for each pair of tokens)."""

    @staticmethod
    def item_flops(config: Config, num_tokens: float) -> float:
        """Forward FLOPs of the items of so many tokens, a part of `flops`. For `routing.skipped_keys = "kept"` only."""


class Channel(Protocol):
    """What works on each token alone. It is made as `Channel(config, rngs)`; `flops` is as for a mixer.

    A record is a NamedTuple of sums over the tokens that are there, or None. What it says of single tokens stands in a
    field `of_tokens`: arrays [B, T, ...]. It comes out of the decoder with a leading axis of the blocks that have one,
    in order of depth.
    """

    def __call__(self, x_BTD: jax.Array, tokens: Tokens, choice: "Choice") -> tuple[jax.Array, Any]:
        """(what is added to each token, [B, T, D]; the record). `choice` tells the training rule from causal ones."""


def part(place: str) -> Any:
    """The class of a mixer or channel, from its place in `layout.LETTERS`."""
    return pkgutil.resolve_name(place)


def make_block(config: Config, spec: BlockSpec, rngs: nnx.Rngs) -> "Block | Routed":
    """The block that a letter of the layout stands for."""
    block = Block(config, spec, rngs)
    return Routed(config, block, spec.capacity, rngs) if spec.routed else block


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Choice:
    """Who chooses the tokens of routed blocks, and what they need for it.

    Attributes:
      rule: "topk" (training; looks at the future), or causally each token alone: "router" (score > 0), "predictor" (its
        logit > 0), "threshold" (score > a cut-off averaged over training), "all", "nobody".
      cutoffs_L: float32, one per routed block, read by "threshold" only; [L], or [L, B] for cut-offs of each row.
      keys_B: random keys, one per row, read by `routing.score = "stochastic"` only.
      expert_cutoffs_LE: float32, one per expert of each block with experts; read by experts that choose their tokens,
        under every rule but "topk".
    """

    rule: str = dataclasses.field(metadata=dict(static=True))
    cutoffs_L: jax.Array | None = None
    keys_B: jax.Array | None = None
    expert_cutoffs_LE: jax.Array | None = None

    def of_block(self, depth: int, blocks: "Sequence[Block | Routed]") -> "Choice":
        """That of one block of these: its own cut-offs, and keys of its own."""

        def own(cutoffs_L, counts: Callable):
            is_one = counts(blocks[depth])
            return cutoffs_L[sum(map(counts, blocks[:depth]))] if is_one and cutoffs_L is not None else None

        return Choice(
            self.rule,
            own(self.cutoffs_L, lambda block: block.routed),
            fold_in(self.keys_B, depth),
            own(self.expert_cutoffs_LE, lambda block: block.has_experts),
        )


TOPK = Choice("topk")


def fold_in(keys_B: jax.Array | None, data: jax.Array | int) -> jax.Array | None:
    """Keys of each row for one use of them."""
    return None if keys_B is None else jax.vmap(jax.random.fold_in, (0, None))(keys_B, data)


class Chosen(NamedTuple):
    """What a routed block decided. `idx_BC` are the positions that got a slot, None unless it chose by top-k."""

    selected_BT: jax.Array
    gate_BT: jax.Array
    idx_BC: jax.Array | None
    choice: Choice


class Work(NamedTuple):
    """Sums over selected tokens, of the gated update and of what it was added to, squared; and the channel's record."""

    update_square_sum: jax.Array
    residual_square_sum: jax.Array
    channel: Any


# How a routed block runs its selected tokens: (a function that gives the block, x_BTD, tokens, chosen, memory) ->
# (x_BTD, memory, work, None where no record is wanted). The function is called where the weights are to be read.
Dispatch = Callable[[Callable[[], "Block"], jax.Array, Tokens, Chosen, Memory], tuple[jax.Array, Memory, Work | None]]


class RoutingRecord(NamedTuple):
    """What one routed block did; under a stack of blocks every field gains a leading axis L of routed blocks.

    `cutoff_B` is the C-th largest score of each row, infinite where all of it is padding. The two sums of squares, over
    selected tokens, give the ratio of update to residual norm that shows a router feeding itself or a block that died;
    they are None over a cache.
    """

    router_logits_BT: jax.Array
    predictor_logits_BT: jax.Array | None
    selected_BT: jax.Array
    gate_BT: jax.Array
    cutoff_B: jax.Array
    update_square_sum: jax.Array | None
    residual_square_sum: jax.Array | None


class Record(NamedTuple):
    """What a block reports: of its routing, None if it is not routed; of its channel, None if that reports nothing."""

    routing: RoutingRecord | None
    channel: Any


class Block(nnx.Module):
    """Pre-norm mixer and channel. `update` is f in x + f(x): m = mixer(norm(x)), plus channel(norm(x + m)).

    Parts are stored under the names of their classes ("attention", "mlp"), so that a checkpoint says what it holds.
    """

    routed = False

    def __init__(self, config: Config, spec: BlockSpec, rngs: nnx.Rngs):
        places = spec.mixer, spec.channel
        self.names = tuple(place and place.split(".")[-1].lower() for place in places)
        self.has_experts = spec.has_experts
        for name, place in zip(self.names, places, strict=True):
            if place is not None:
                setattr(self, f"{name}_norm", RMSNorm(config.model.width, rngs, config.model.norm_eps))
                setattr(self, name, part(place)(config, rngs))

    def ask(self, x_BTD: jax.Array, tokens: Tokens) -> tuple[Any, Any]:
        """The first half of `update`, before the memory: the mixer's (query, item) of each token."""
        name, _ = self.names
        return ((), ()) if name is None else getattr(self, name).ask(getattr(self, f"{name}_norm")(x_BTD), tokens)

    def finish(self, x_BTD: jax.Array, query: Any, seen: Seen, tokens: Tokens, choice: Choice) -> tuple[jax.Array, Any]:
        """The second half, behind the memory: (the update, the channel's record)."""
        mixer, channel = self.names
        mixed_BTD = None if mixer is None else getattr(self, mixer).answer(query, seen, tokens)
        if channel is None:
            return mixed_BTD, None
        input_BTD = x_BTD if mixer is None else x_BTD + mixed_BTD
        update_BTD, record = getattr(self, channel)(getattr(self, f"{channel}_norm")(input_BTD), tokens, choice)
        return update_BTD if mixer is None else mixed_BTD + update_BTD, record

    def update(self, x_BTD: jax.Array, tokens: Tokens, memory: Memory, choice: Choice) -> tuple[jax.Array, Memory, Any]:
        """(the block's total residual update, without x itself, [B, T, D]; the memory; the channel's record)."""
        query, items = self.ask(x_BTD, tokens)
        seen, memory = memory.append(items, tokens)
        update_BTD, record = self.finish(x_BTD, query, seen, tokens, choice)
        return update_BTD, memory, record

    def __call__(
        self, x_BTD: jax.Array, tokens: Tokens, memory: Memory, choice: Choice, dispatch: Dispatch
    ) -> tuple[jax.Array, Memory, Record]:
        """Every token goes through, at once: there is nothing to choose or to dispatch."""
        update_BTD, memory, record = self.update(x_BTD, tokens, memory, choice)
        return x_BTD + update_BTD, memory, Record(None, record)


def router_width(config: Config) -> int:
    """How many numbers of each token the router's linear map reads; 0 where a score has no map."""
    return {"stochastic": 0}.get(config.routing.score, config.model.width)


class Router(nnx.Module):
    """Gives each token one raw float32 score: a linear map without bias (the paper's "Routing implementation").

    With `routing.score` "position" the map reads sinusoids of the position in place of the token; "frozen" stops its
    gradient; "stochastic" has no parameters and draws Gaussian noise, fresh per row, block and step.

    To add a kind of score: name it in `RoutingConfig.score`, say in `router_width` how much of a token it reads, and
    here what.
    """

    def __init__(self, config: Config, rngs: nnx.Rngs):
        self.kind = config.routing.score
        if D := router_width(config):
            init = normal(config.routing.router_init_scale * D**-0.5)
            self.weight_D = param(rngs, (D,), (None,), init, group="router")

    def __call__(
        self, input_BTD: jax.Array, scale_BT: jax.Array, positions_BT: jax.Array, keys_B: jax.Array | None
    ) -> jax.Array:
        """float32 scores [B, T] from the router's float32 input scale_BT * input_BTD; `keys_B` only for "stochastic".

        A linear map commutes with each token's scale, so normalised tokens are never written to memory: for a small C
        that would cost a fifth of the block.
        """
        if self.kind == "stochastic":
            if keys_B is None:
                raise ValueError("routing.score = 'stochastic' needs Choice.keys_B, one random key per row")
            return jax.vmap(lambda key: jax.random.normal(key, input_BTD.shape[1:2]))(keys_B)
        weight_D = self.weight_D[...]
        if self.kind == "frozen":
            weight_D = jax.lax.stop_gradient(weight_D)
        if self.kind == "position":
            input_BTD, scale_BT = _sinusoids(positions_BT, weight_D.shape[0]), jnp.ones_like(scale_BT)
        B, T, D = input_BTD.shape
        scores_M = jnp.dot(input_BTD.reshape(B * T, D), weight_D, precision=jax.lax.Precision.HIGHEST)
        return scores_M.reshape(B, T) * scale_BT


def predictor_hidden(width: int) -> int:
    """P, the hidden size of a predictor."""
    return max(32, width // 4)


class Predictor(nnx.Module):
    """A small float32 MLP that predicts top-k membership from a gradient-stopped input (the paper's "Sampling")."""

    def __init__(self, width: int, capacity: float, rngs: nnx.Rngs):
        hidden = predictor_hidden(width)
        weight, bias = dict(group="predictor"), dict(group="predictor_bias")
        self.up_DP = param(rngs, (width, hidden), ("embed", None), normal(width**-0.5), **weight)
        self.up_bias_P = param(rngs, (hidden,), (None,), jax.nn.initializers.zeros, **bias)
        self.down_P = param(rngs, (hidden,), (None,), normal(0.1 * hidden**-0.5), **weight)
        # Starts at the base rate, so that no step is spent on learning how many tokens are kept.
        kept = min(max(capacity, 0.01), 0.99)
        self.down_bias_1 = param(rngs, (1,), (None,), jax.nn.initializers.constant(math.log(kept / (1 - kept))), **bias)

    def __call__(self, input_BTD: jax.Array, scale_BT: jax.Array) -> jax.Array:
        """Logits [B, T]; > 0 predicts membership. Reads scale_BT * input_BTD."""
        B, T, D = input_BTD.shape
        input_MD, scale_M1 = jax.lax.stop_gradient((input_BTD.reshape(B * T, D), scale_BT.reshape(B * T, 1)))
        hidden_MP = jax.nn.relu(scale_M1 * dense(input_MD, self.up_DP[...]) + self.up_bias_P[...][None])
        return (hidden_MP @ self.down_P[...] + self.down_bias_1[...]).reshape(B, T)


# What a token's score makes of its weight, of each token alone. "constant" belongs to scores that are not trained.
GATES: dict[str, Callable[[jax.Array], jax.Array]] = {
    "constant": jnp.ones_like,
    "one": lambda scores_BT: 1.0 + (scores_BT - jax.lax.stop_gradient(scores_BT)),
    "raw": lambda scores_BT: scores_BT,
    "sigmoid": jax.nn.sigmoid,
    "tanh": lambda scores_BT: 1.0 + jnp.tanh(scores_BT),
}


class Routed(nnx.Module):
    """A block that only selected tokens go through, each with its gate as the weight on its update.

    They go through all of the block together. Who is not selected leaves no item in its memory (the paper's eq. 1),
    unless `routing.skipped_keys` is "kept": then every token leaves its item, made from the block's input, before the
    selected ones look.
    """

    routed = True

    def __init__(self, config: Config, block: Block, capacity: float, rngs: nnx.Rngs):
        self.block = block
        self.has_experts = block.has_experts
        self.router = Router(config, rngs)
        self.predictor = Predictor(config.model.width, capacity, rngs) if config.routing.predictor else None
        self.capacity, self.keeps_items = capacity, config.routing.skipped_keys == "kept"
        self.gate_kind = "constant" if config.routing.score in ("stochastic", "frozen") else config.routing.gate
        self.input_kind, self.norm_eps = config.routing.router_input, config.model.norm_eps
        self.topk_per = config.routing.topk_per

    def __call__(
        self, x_BTD: jax.Array, tokens: Tokens, memory: Memory, choice: Choice, dispatch: Dispatch
    ) -> tuple[jax.Array, Memory, Record]:
        """Routes, computes, and returns the new residual stream, the memory, and the record of what was done.

        Args:
          choice: that of this block (see `Choice.of_block`).
        """
        scores_BT, predictor_logits_BT = self.score(x_BTD, tokens, choice.keys_B)
        selected_BT, idx_BC = self.choose(choice, scores_BT, predictor_logits_BT, tokens)
        chosen = Chosen(selected_BT, self.gate(scores_BT, tokens), idx_BC, choice)
        if self.keeps_items:
            dispatch = leaving_all_items(dispatch)
        out_BTD, memory, work = dispatch(lambda: self.block, x_BTD, tokens, chosen, memory)
        measured = dict(
            gate_BT=chosen.gate_BT,
            cutoff_B=self.cutoff(scores_BT, selected_BT, tokens),
            update_square_sum=work and work.update_square_sum,
            residual_square_sum=work and work.residual_square_sum,
        )
        record = RoutingRecord(
            router_logits_BT=scores_BT,
            predictor_logits_BT=predictor_logits_BT,
            selected_BT=selected_BT,
            **jax.lax.stop_gradient(measured),
        )
        return out_BTD, memory, Record(record, work and work.channel)

    def score(
        self, x_BTD: jax.Array, tokens: Tokens, keys_B: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array | None]:
        """Router scores and predictor logits, float32 [B, T], from the block's input."""
        input_BTD = x_BTD.astype(jnp.float32)
        is_normed = self.input_kind == "normed"
        scale_BT = inverse_rms(input_BTD, self.norm_eps) if is_normed else jnp.ones(x_BTD.shape[:2], jnp.float32)
        scores_BT = self.router(input_BTD, scale_BT, tokens.positions_BT, keys_B)
        return scores_BT, None if self.predictor is None else self.predictor(input_BTD, scale_BT)

    def gate(self, scores_BT: jax.Array, tokens: Tokens) -> jax.Array:
        """Weight on each token's update, float32 [B, T]."""
        if self.gate_kind == "softmax":  # over the row: not causal, for ablation only
            # A finite lowest score: a row of nothing but padding would be NaN, and so would its gradient.
            scores_BT = jnp.where(tokens.segments_BT > 0, scores_BT, jnp.finfo(jnp.float32).min)
            return jax.nn.softmax(scores_BT, axis=-1) * scores_BT.shape[-1]
        return GATES[self.gate_kind](scores_BT)

    def cutoff(self, scores_BT: jax.Array, selected_BT: jax.Array, tokens: Tokens) -> jax.Array:
        """The cut-off that keeps as many tokens of each row: its C-th largest score. [B].

        Chosen over the row it is the smallest selected score. Chosen by document that one may lie far below: each
        document has its own smallest one.
        """
        if self.topk_per == "document":
            selected_BT, _ = self.select_topk(scores_BT, tokens)
        return jnp.min(jnp.where(selected_BT, scores_BT, jnp.inf), axis=1)

    def choose(
        self, choice: Choice, scores_BT: jax.Array, predictor_logits_BT: jax.Array | None, tokens: Tokens
    ) -> tuple[jax.Array, jax.Array | None]:
        """(who is selected, bool [B, T]; under top-k the positions that get a slot, idx_BC)."""
        if choice.rule != "topk":
            if self.gate_kind == "softmax":
                raise ConfigError("routing.gate = 'softmax' weighs a token by later ones: no causal selection exists")
            decided_BT = decide(choice.rule, scores_BT, predictor_logits_BT, choice.cutoffs_L)
            return (tokens.segments_BT > 0) & decided_BT, None
        if self.topk_per == "document":
            scores_BT = -jax.vmap(routing.share_within_document)(scores_BT, tokens.segments_BT)
        return self.select_topk(scores_BT, tokens)

    def select_topk(self, scores_BT: jax.Array, tokens: Tokens) -> tuple[jax.Array, jax.Array]:
        """(the C largest of each row, bool [B, T]; their positions, with padding where tokens have run out, idx_BC)."""
        T, is_there_BT = scores_BT.shape[1], tokens.segments_BT > 0
        select = jax.vmap(routing.select_topk, in_axes=(0, None, 0))
        idx_BC = checkpoint_name(select(scores_BT, routing.tokens_kept(T, self.capacity), is_there_BT), ROUTING_INDICES)
        return jax.vmap(routing.topk_targets, (0, None))(idx_BC, T) & is_there_BT, idx_BC


def leaving_all_items(dispatch: Dispatch) -> Dispatch:
    """The dispatch after every token has left its item, whoever is selected."""

    def run(get_block: Callable[[], Block], x_BTD: jax.Array, tokens: Tokens, chosen: Chosen, memory: Memory):
        _, items = get_block().ask(x_BTD, tokens)
        seen, memory = memory.append(items, tokens)
        out_BTD, _, work = dispatch(get_block, x_BTD, tokens, chosen, Filled(*seen))
        return out_BTD, memory, work

    return run


def decide(
    rule: str, scores: jax.Array, predictor_logits: jax.Array | None, cutoff: jax.Array | float | None
) -> jax.Array:
    """What a causal rule decides about each token alone: bool, in the shape of `scores`.

    `cutoff`, read by "threshold", is a scalar, one number for each row, or broadcasts against the scores.
    """
    if rule == "router":
        return routing.select_causal(scores, 0.0)
    if rule == "threshold":
        if cutoff is None:
            raise ValueError("selection = 'threshold' needs cutoffs_L, one cut-off per routed block")
        return routing.select_causal(scores, cutoff[:, None] if jnp.ndim(cutoff) == 1 else cutoff)
    if rule in ("all", "nobody"):
        return jnp.full(scores.shape, rule == "all")
    if rule != "predictor":
        raise ValueError(f"selection = {rule!r}: must be one of {', '.join(RULES)}")
    if predictor_logits is None:
        raise ValueError("selection = 'predictor': this model has no predictor (routing.predictor = False)")
    return routing.select_causal(predictor_logits, 0.0)


def _sinusoids(positions_BT: jax.Array, width: int) -> jax.Array:
    """Sinusoids of each position at `width` wavelengths, float32 [B, T, width]."""
    half = (width + 1) // 2
    frequencies = 10_000.0 ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = positions_BT[..., None].astype(jnp.float32) * frequencies[None, None]
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)[..., :width]
