"""The decoder: embed, a stack of blocks by layout, norm, logits; with the record of every routing decision.

Vocabulary: B rows, T positions, D width, V vocabulary, L routed blocks in order of depth. A *unit* is the shortest
run of blocks that the stack repeats, such as (full, routed). Units are stored stacked, one leading axis per
parameter, and run by `lax.scan`; `model.scan = False` runs the same parameters as a plain loop. What is left over
when depth is not a multiple of the unit, the *tail*, is stored and run block by block. `by_depth` and `from_depth` turn
that into one entry per block, and back.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from mod_jax.config import Config
from mod_jax.layout import BlockSpec
from mod_jax.models.blocks import (
    ROUTING_INDICES,
    TOPK,
    Block,
    Choice,
    Record,
    Routed,
    RoutingRecord,
    fold_in,
    make_block,
)
from mod_jax.models.dispatch import uncached
from mod_jax.models.layers import Embedder, RMSNorm
from mod_jax.models.memory import Present, Tokens, make_tokens
from mod_jax.models.moe import EXPERT_SLOTS
from mod_jax.sharding import constrain


class ModelOutput(NamedTuple):
    """Logits, float32 [B, T, V]; what routed blocks did, each field with a leading L, or None where there is none; what
    channels report, with a leading axis of those that do, or None."""

    logits_BTV: jax.Array
    routing: RoutingRecord | None
    channel: Any = None


def repeating_unit(blocks: tuple[BlockSpec, ...]) -> int:
    """Length of the shortest prefix that, cycled, gives the whole stack: FRFRF -> 2."""
    return next(p for p in range(1, len(blocks) + 1) if all(b == blocks[i % p] for i, b in enumerate(blocks)))


def by_depth(params: dict[str, Any], config: Config) -> list[dict[str, Any]]:
    """The parameters of each block, first block first, whatever unit and tail they are stored in.

    `params` is a tree of arrays like a model's parameters: gradients and moments have the same shape.
    """
    unit = repeating_unit(config.blocks)
    units = unstack(params["units"]["blocks"], len(config.blocks) // unit)
    tail = params["tail"]["blocks"] if len(config.blocks) % unit else {}
    return [group[i] for group in (*units, tail) for i in sorted(group)]


def from_depth(blocks: list[dict[str, Any]], params: dict[str, Any], config: Config) -> dict[str, Any]:
    """Inverse of `by_depth`: `params` with the parameters of all blocks replaced by these."""
    unit = repeating_unit(config.blocks)
    in_units = len(blocks) // unit * unit
    stacked = {i: jax.tree.map(lambda *w: jnp.stack(w), *blocks[i:in_units:unit]) for i in range(unit)}
    tail = {"tail": {"blocks": dict(enumerate(blocks[in_units:]))}} if blocks[in_units:] else {}
    return {**params, "units": {"blocks": stacked}, **tail}


class BlockGroup(nnx.Module):
    """Consecutive blocks of fixed kinds: a unit, or the tail."""

    def __init__(self, config: Config, specs: tuple[BlockSpec, ...], rngs: nnx.Rngs):
        self.blocks = nnx.List([make_block(config, spec, rngs) for spec in specs])

    def __call__(self, x_BTD: jax.Array, tokens: Tokens, choice: Choice) -> tuple[jax.Array, Record]:
        """Runs the blocks in order. `choice` has cut-offs for these blocks; the record has lists, one entry each."""
        records = Record([], [])
        for depth, block in enumerate(self.blocks):
            own_choice = choice.of_block(depth, self.blocks)
            x_BTD, _, record = block(x_BTD, tokens, Present(), own_choice, uncached(choice.rule))
            for kept, new in zip(records, record, strict=True):
                kept += [] if new is None else [new]
        return constrain(x_BTD, ("batch", None, None)), records


class Decoder(nnx.Module):
    """A Mixture-of-Depths decoder; with layout "F" an ordinary one."""

    def __init__(self, config: Config, vocab_size: int, rngs: nnx.Rngs):
        model = config.model
        self.embedder = Embedder(vocab_size, model.width, model.tie_embedding, rngs, model.embed_scale)
        unit = repeating_unit(config.blocks)
        self.num_units = len(config.blocks) // unit

        @nnx.transform_metadata(in_axes=0, out_axes=0, partition="layers")
        def make_unit(key):
            return BlockGroup(config, config.blocks[:unit], nnx.Rngs(params=key))

        self.units = nnx.vmap(make_unit, in_axes=0, out_axes=0)(jax.random.split(rngs.params(), self.num_units))
        self.tail = BlockGroup(config, config.blocks[self.num_units * unit :], rngs)
        self.final_norm = RMSNorm(model.width, rngs, model.norm_eps)
        self.kinds = tuple(spec.kind for spec in config.blocks)
        self.dtype = jnp.dtype(model.dtype)
        self.rotary = model.head_dim, model.rope_base, model.rope_factors
        self.scan, self.remat = model.scan, model.remat

    def blocks_apart(self) -> list[Block | Routed]:
        """Every block, first block first, with weights of its own."""
        return [block for group in (*unstack(self.units, self.num_units), self.tail) for block in group.blocks]

    def __call__(
        self,
        tokens_BT: jax.Array,
        positions_BT: jax.Array | None = None,
        segments_BT: jax.Array | None = None,
        choice: Choice = TOPK,
    ) -> ModelOutput:
        """Logits for the next token at every position; arguments as for `features`."""
        x_BTD, record = self.features(tokens_BT, positions_BT, segments_BT, choice)
        return ModelOutput(self.embedder.logits(x_BTD), *record)

    def features(
        self,
        tokens_BT: jax.Array,
        positions_BT: jax.Array | None = None,
        segments_BT: jax.Array | None = None,
        choice: Choice = TOPK,
    ) -> tuple[jax.Array, Record]:
        """(the normalised last residual stream [B, T, D], of which `embedder` makes logits; the record of all blocks).

        Args:
          tokens_BT: int32 ids in [0, V).
          positions_BT: int32 position of each token in its document. Default: 0 .. T-1.
          segments_BT: int32 document of each token in the packed row, >= 1; 0 is padding. Default: all 1.
          choice: who chooses the tokens of routed blocks. Default: top-k.
        """
        B, T = tokens_BT.shape
        if positions_BT is None:
            positions_BT = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32)[None], (B, T))
        if segments_BT is None:
            segments_BT = jnp.ones((B, T), jnp.int32)
        tokens = make_tokens(positions_BT, segments_BT, *self.rotary)

        def run(x_BTD, group_inputs):
            group, cutoffs_L, expert_cutoffs_LE, index = group_inputs
            keys_B = fold_in(choice.keys_B, index)
            return group(x_BTD, tokens, Choice(choice.rule, cutoffs_L, keys_B, expert_cutoffs_LE))

        run = rematerialised(run, self.remat)
        x_BTD = self.embedder.embed(tokens_BT, self.dtype)
        cutoffs, expert_cutoffs = (
            self._by_group(array_L, [getattr(block, name) for block in self.units.blocks])
            for array_L, name in ((choice.cutoffs_L, "routed"), (choice.expert_cutoffs_LE, "has_experts"))
        )
        inputs = (self.units, cutoffs[0], expert_cutoffs[0], jnp.arange(self.num_units))
        if self.scan:
            x_BTD, of_units = jax.lax.scan(run, x_BTD, inputs)
        else:
            of_units = []
            for group_inputs in unstack(inputs, self.num_units):
                x_BTD, record = run(x_BTD, group_inputs)
                of_units.append(record)
            of_units = jax.tree.map(lambda *r: jnp.stack(r), *of_units)
        x_BTD, of_tail = run(x_BTD, (self.tail, cutoffs[1], expert_cutoffs[1], jnp.array(self.num_units)))
        return self.final_norm(x_BTD), Record(*map(in_order_of_depth, of_units, of_tail))

    def _by_group(self, array_L: jax.Array | None, counts: list[bool]) -> tuple[jax.Array | None, jax.Array | None]:
        """(of units: [units, entries per unit, ...]; of the tail). Entries are of the blocks for which `counts`."""
        if array_L is None:
            return None, None
        in_units = self.num_units * sum(counts)
        return array_L[:in_units].reshape(self.num_units, sum(counts), *array_L.shape[1:]), array_L[in_units:]


def in_order_of_depth(of_units: list, of_tail: list) -> Any:
    """One record with a leading axis of blocks. That of units has one entry per block of a unit, stacked over units."""
    in_turn = [jax.tree.map(lambda *r: jnp.stack(r, 1).reshape(-1, *r[0].shape[1:]), *of_units)] if of_units else []
    records = in_turn + [jax.tree.map(lambda r: r[None], record) for record in of_tail]
    return jax.tree.map(lambda *r: jnp.concatenate(r), *records) if records else None


def rematerialised(run, remat: str):
    """Wraps one group of blocks so that its backward pass recomputes; routing indices are saved under every policy."""
    if remat == "none":
        return run
    policy = jax.checkpoint_policies.save_only_these_names(ROUTING_INDICES, EXPERT_SLOTS)
    if remat == "dots":
        dots = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
        policy = jax.checkpoint_policies.save_from_both_policies(dots, policy)
    return jax.checkpoint(run, policy=policy)


def unstack(tree, length: int) -> list:
    """The `length` slices of every leaf along its first axis. `lax.split`: its gradient is one concatenation."""
    leaves, structure = jax.tree.flatten(tree)
    slices = [[part[0] for part in jax.lax.split(leaf, [1] * length)] for leaf in leaves]
    return [jax.tree.unflatten(structure, parts) for parts in zip(*slices, strict=True)]
