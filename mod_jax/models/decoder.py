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

from mod_jax.config import BlockSpec, Config
from mod_jax.models.blocks import ROUTING_INDICES, FullBlock, RoutedBlock, RoutingRecord, Stream, make_stream
from mod_jax.models.layers import Embedder, RMSNorm
from mod_jax.sharding import constrain


class ModelOutput(NamedTuple):
    """Logits, float32 [B, T, V]; the routing record, each field with a leading L, or None without routed blocks."""

    logits_BTV: jax.Array
    routing: RoutingRecord | None


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
        self.blocks = nnx.List(
            [FullBlock(config.model, rngs) if s.kind == "F" else RoutedBlock(config, s.capacity, rngs) for s in specs]
        )

    def __call__(
        self, x_BTD: jax.Array, stream: Stream, selection: str, cutoffs: jax.Array, keys_B: jax.Array | None
    ) -> tuple[jax.Array, list[RoutingRecord]]:
        """Runs the blocks in order; `cutoffs` has one number, and `keys_B` yields one set of keys, per routed block."""
        records = []
        for depth, block in enumerate(self.blocks):
            if isinstance(block, FullBlock):
                x_BTD = block(x_BTD, stream)
            else:
                keys = None if keys_B is None else jax.vmap(jax.random.fold_in, (0, None))(keys_B, depth)
                cutoff = cutoffs[len(records)]
                x_BTD, record = block(x_BTD, stream, selection=selection, cutoff=cutoff, keys_B=keys)
                records.append(record)
        return constrain(x_BTD, ("batch", None, None)), records


class Decoder(nnx.Module):
    """A Mixture-of-Depths decoder; with layout "F" an ordinary one."""

    def __init__(self, config: Config, vocab_size: int, rngs: nnx.Rngs):
        model = config.model
        self.embedder = Embedder(vocab_size, model.width, model.tie_embedding, rngs)
        unit = repeating_unit(config.blocks)
        self.num_units = len(config.blocks) // unit

        @nnx.transform_metadata(in_axes=0, out_axes=0, partition="layers")
        def make_unit(key):
            return BlockGroup(config, config.blocks[:unit], nnx.Rngs(params=key))

        self.units = nnx.vmap(make_unit, in_axes=0, out_axes=0)(jax.random.split(rngs.params(), self.num_units))
        self.tail = BlockGroup(config, config.blocks[self.num_units * unit :], rngs)
        self.final_norm = RMSNorm(model.width, rngs)
        self.routed_per_unit = sum(spec.kind == "R" for spec in config.blocks[:unit])
        self.num_routed = config.num_routed
        self.dtype = jnp.dtype(model.dtype)
        self.head_dim, self.rope_base = model.head_dim, model.rope_base
        self.scan, self.remat = model.scan, model.remat

    def __call__(self, *args, **kwargs) -> ModelOutput:
        """Logits for the next token at every position; arguments as for `features`."""
        x_BTD, routing = self.features(*args, **kwargs)
        return ModelOutput(self.embedder.logits(x_BTD), routing)

    def features(
        self,
        tokens_BT: jax.Array,
        positions_BT: jax.Array | None = None,
        segments_BT: jax.Array | None = None,
        *,
        selection: str = "topk",
        cutoffs_L: jax.Array | None = None,
        row_keys_B: jax.Array | None = None,
    ) -> tuple[jax.Array, RoutingRecord | None]:
        """(the normalised last residual stream [B, T, D], of which `embedder` makes logits; the routing record).

        Args:
          tokens_BT: int32 ids in [0, V).
          positions_BT: int32 position of each token in its document. Default: 0 .. T-1.
          segments_BT: int32 document of each token in the packed row, >= 1; 0 is padding. Default: all 1.
          selection: who chooses the tokens of routed blocks: "topk", "router", "predictor" or "threshold".
          cutoffs_L: float32 cut-off per routed block, for "threshold".
          row_keys_B: random keys, one per row, for `routing.score = "stochastic"`.
        """
        B, T = tokens_BT.shape
        if positions_BT is None:
            positions_BT = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32)[None], (B, T))
        if segments_BT is None:
            segments_BT = jnp.ones((B, T), jnp.int32)
        if selection == "threshold" and cutoffs_L is None and self.num_routed:
            raise ValueError("selection = 'threshold' needs cutoffs_L, one cut-off per routed block")
        cutoffs_L = jnp.zeros(self.num_routed, jnp.float32) if cutoffs_L is None else cutoffs_L
        stream = make_stream(positions_BT, segments_BT, self.head_dim, self.rope_base)

        def run(x_BTD, group_inputs):
            group, cutoffs, index = group_inputs
            keys = None if row_keys_B is None else jax.vmap(jax.random.fold_in, (0, None))(row_keys_B, index)
            return group(x_BTD, stream, selection, cutoffs, keys)

        run = rematerialised(run, self.remat)
        x_BTD = self.embedder.embed(tokens_BT, self.dtype)
        in_units = self.num_units * self.routed_per_unit
        per_unit = cutoffs_L[:in_units].reshape(self.num_units, self.routed_per_unit)
        inputs = (self.units, per_unit, jnp.arange(self.num_units))
        if self.scan:
            x_BTD, unit_records = jax.lax.scan(run, x_BTD, inputs)
            # One record per routed block of the unit, stacked over units: depth order takes them in turn.
            records = (
                [jax.tree.map(lambda *r: jnp.stack(r, 1).reshape(-1, *r[0].shape[1:]), *unit_records)]
                if unit_records
                else []
            )
        else:
            records = []
            for group_inputs in unstack(inputs, self.num_units):
                x_BTD, unit_records = run(x_BTD, group_inputs)
                records += [jax.tree.map(lambda r: r[None], record) for record in unit_records]
        x_BTD, tail_records = run(x_BTD, (self.tail, cutoffs_L[in_units:], jnp.array(self.num_units)))
        records += [jax.tree.map(lambda r: r[None], record) for record in tail_records]
        record = jax.tree.map(lambda *r: jnp.concatenate(r), *records) if self.num_routed else None
        return self.final_norm(x_BTD), record


def rematerialised(run, remat: str):
    """Wraps one group of blocks so that its backward pass recomputes; routing indices are saved under every policy."""
    if remat == "none":
        return run
    policy = jax.checkpoint_policies.save_only_these_names(ROUTING_INDICES)
    if remat == "dots":
        dots = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
        policy = jax.checkpoint_policies.save_from_both_policies(dots, policy)
    return jax.checkpoint(run, policy=policy)


def unstack(tree, length: int) -> list:
    """The `length` slices of every leaf along its first axis. `lax.split`: its gradient is one concatenation."""
    leaves, structure = jax.tree.flatten(tree)
    slices = [[part[0] for part in jax.lax.split(leaf, [1] * length)] for leaf in leaves]
    return [jax.tree.unflatten(structure, parts) for parts in zip(*slices, strict=True)]
