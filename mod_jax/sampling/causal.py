"""The decoder run causally over a cache: whole prompts (`prefill`), one token (`decode_step`), a few tokens (`extend`).

All three are the training blocks (the same `score`, `decide`, `project`, `attend`, `with_mlp`) with keys and values
kept in a cache, and a routed block computes on its selected tokens only. Shapes are static, how many tokens are
selected is not: a block takes as many passes of a fixed size as it needs, so that a size is a matter of speed and never
of the result.

Vocabulary: B rows, T new tokens of a row, C tokens of a row or R rows per pass, S slots, D width, L routed blocks.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from mod_jax import routing
from mod_jax.errors import ConfigError
from mod_jax.models.attention import attend
from mod_jax.models.blocks import FullBlock, RoutedBlock, Stream, decide, make_stream
from mod_jax.models.decoder import Decoder, unstack
from mod_jax.models.layers import Embedder, RMSNorm
from mod_jax.sampling.cache import Cache, FullCache, RoutedCache, append, append_many


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Layers:
    """A decoder with every block apart, so that decoding reads a weight where it lies.

    `inner`, None or stacked in order of depth, is what the routed blocks run their tokens through (see `inner_block`).
    """

    embedder: Embedder
    blocks: tuple[FullBlock | RoutedBlock, ...]
    final_norm: RMSNorm
    inner: FullBlock | None
    dtype: jnp.dtype = dataclasses.field(metadata=dict(static=True))
    head_dim: int = dataclasses.field(metadata=dict(static=True))
    rope_base: float = dataclasses.field(metadata=dict(static=True))

    def stream(self, positions_BT: jax.Array, live_BT: jax.Array) -> Stream:
        """One document per row; what is not live is padding."""
        return make_stream(positions_BT, live_BT.astype(jnp.int32), self.head_dim, self.rope_base)

    def inner_block(self, index: int) -> FullBlock:
        """What the routed block of this index, among routed ones, runs its tokens through.

        To be called inside the branch or loop that runs them: then a slice of the stack is taken, and read, there.
        """
        if self.inner is not None:
            return jax.tree.map(lambda stack: stack[index], self.inner)
        return [block.block for block in self.blocks if isinstance(block, RoutedBlock)][index]

    def logits(self, x_BTD: jax.Array) -> jax.Array:
        """float32 [B, T, V] from the residual stream behind the last block."""
        return self.embedder.logits(self.final_norm(x_BTD))


class Output(NamedTuple):
    """`x_BTD` is the residual stream behind the last block (see `Layers.logits`); `selected_LBT` what was routed."""

    x_BTD: jax.Array
    cache: Cache
    selected_LBT: jax.Array


def split_layers(decoder: Decoder, platform: str) -> Layers:
    """Takes the stacked units of a decoder apart, for a device of this platform. Jit it: every weight is copied once.

    A TPU's compiler fetches what a branch may need before it is known which one is taken, weights of bypassed blocks
    too, but only whole arrays that fit into on-chip memory. So there the routed blocks' weights stay in one stack (as
    compiled for 1 B parameters at batch 1, a step then reads 1.33 GiB in place of 1.75). Elsewhere a slice is a copy.
    """
    groups = [*unstack(decoder.units, decoder.num_units), decoder.tail]
    blocks = tuple(block for group in groups for block in group.blocks)
    for block in blocks:
        if isinstance(block, RoutedBlock) and block.router.kind == "stochastic":
            raise ConfigError("routing.score = 'stochastic' is a control for training: there is nothing to sample with")
    inner = None
    if decoder.num_routed and platform == "tpu":
        blocks = jax.tree.map(lambda weight: weight, blocks)  # copies: the decoder's own stay whole
        routed = [block for block in blocks if isinstance(block, RoutedBlock)]
        weights = zip(*(jax.tree.leaves(block.block) for block in routed), strict=True)
        inner = jax.tree.unflatten(jax.tree.structure(routed[0].block), map(jnp.stack, weights))
        for block in routed:
            block.block = None
    outer = decoder.embedder, blocks, decoder.final_norm
    return Layers(*outer, inner, decoder.dtype, decoder.head_dim, decoder.rope_base)


def prefill(
    layers: Layers,
    tokens_BT: jax.Array,
    valid_BT: jax.Array,
    cache: Cache,
    selection: str,
    cutoffs_L: jax.Array,
    kept_L: tuple[int, ...],
) -> Output:
    """Runs whole prompts of different lengths into an empty cache.

    Padding may stand anywhere: the valid tokens of each row, in order, are its positions 0, 1, ..., and the first
    columns of the output. What the output holds behind a row's last token means nothing.

    Args:
      cache: of `init_cache`. If a routed block selects more tokens of a row than it has slots, the output is wrong,
        and `overflowed(cache)` says so.
      selection: a causal one.
      cutoffs_L: read by selection "threshold".
      kept_L: C of each routed block, tokens per row and pass. The expected number, with some slack, is fast.
    """
    B, T = tokens_BT.shape
    idx_BT = jax.vmap(routing.pack_selected, (0, None))(valid_BT, T)
    tokens_BT = jax.vmap(_take)(tokens_BT, idx_BT)
    positions_BT = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32)[None], (B, T))
    stream = layers.stream(positions_BT, idx_BT < T)

    def full(block, x_BTD, block_cache):
        def write(k_BKTH, v_BKTH):
            new = FullCache(block_cache.k_BKSH.at[:, :, :T].set(k_BKTH), block_cache.v_BKSH.at[:, :, :T].set(v_BKTH))
            return k_BKTH, v_BKTH, positions_BT, new

        return _update(block, x_BTD, stream, write, same_tokens=True)

    routed = _routed_over_tokens(layers, stream, kept_L)
    return _run(layers, tokens_BT, stream, cache, selection, cutoffs_L, full, routed)


def extend(
    layers: Layers,
    tokens_BT: jax.Array,
    positions_BT: jax.Array,
    live_BT: jax.Array,
    cache: Cache,
    selection: str,
    cutoffs_L: jax.Array,
    kept_L: tuple[int, ...],
) -> Output:
    """Runs a few consecutive tokens of each row behind what its cache holds. Tokens that are not live touch nothing."""
    stream = layers.stream(positions_BT, live_BT)
    full, routed = _full_over_cache(stream), _routed_over_tokens(layers, stream, kept_L)
    return _run(layers, tokens_BT, stream, cache, selection, cutoffs_L, full, routed)


def decode_step(
    layers: Layers,
    tokens_B: jax.Array,
    positions_B: jax.Array,
    live_B: jax.Array,
    cache: Cache,
    selection: str,
    cutoffs_L: jax.Array,
    rows_L: tuple[int, ...],
) -> Output:
    """Runs one token of each row. Where no row selects it, a routed block's weights are not even read (on a TPU, if the
    weights of all routed blocks together do not fit into on-chip memory).

    Args:
      positions_B: the position of each token; it has nothing to do with how many slots a routed block has filled.
      live_B: False for rows that are finished.
      rows_L: R of each routed block, rows per pass (see `rows_per_pass`).
    """
    stream = layers.stream(positions_B[:, None], live_B[:, None])

    def routed(x_B1D, block_cache, chosen):
        if tokens_B.shape[0] == 1:
            return _run_one_row(layers, x_B1D, stream, block_cache, chosen)
        return _run_rows(layers, x_B1D, stream, block_cache, chosen, rows_L[chosen.index])

    return _run(layers, tokens_B[:, None], stream, cache, selection, cutoffs_L, _full_over_cache(stream), routed)


class _Chosen(NamedTuple):
    """What one routed block decided: its index among them, who is selected, and the weight on each update."""

    index: int
    selected_BT: jax.Array
    gate_BT: jax.Array


def _run(
    layers: Layers, tokens_BT, stream: Stream, cache: Cache, selection: str, cutoffs_L, full: Callable, routed: Callable
) -> Output:
    """Embeds, then runs each block by `full` (giving its update) or `routed` (giving the new residual stream)."""
    x_BTD = layers.embedder.embed(tokens_BT, layers.dtype)
    new_cache, selected = [], []
    for depth, (block, block_cache) in enumerate(zip(layers.blocks, cache, strict=True)):
        with jax.named_scope(f"block{depth:02}"):  # profiles and plans tell blocks apart by it
            if isinstance(block, FullBlock):
                update_BTD, block_cache = full(block, x_BTD, block_cache)
                x_BTD = x_BTD + update_BTD
            else:
                if block.gate_kind == "softmax":
                    raise ConfigError(
                        "routing.gate = 'softmax' weighs a token by later ones: no causal selection exists"
                    )
                scores_BT, predictor_logits_BT = block.score(x_BTD, stream)
                decided_BT = decide(selection, scores_BT, predictor_logits_BT, cutoffs_L[len(selected)])
                selected_BT = (stream.segments_BT > 0) & decided_BT
                chosen = _Chosen(len(selected), selected_BT, block.gate(scores_BT, stream))
                x_BTD, block_cache = routed(x_BTD, block_cache, chosen)
                selected.append(selected_BT)
        new_cache.append(block_cache)
    return Output(x_BTD, tuple(new_cache), jnp.stack(selected) if selected else jnp.zeros((0, *tokens_BT.shape), bool))


def _update(block: FullBlock, x_BTD, stream: Stream, write: Callable, same_tokens: bool = False):
    """(the block's update of x, new cache). `write(k, v)` stores both; gives keys, values, positions to attend to."""
    q, k, v = block.attention.project(block.attention_norm(x_BTD), stream.rotation)
    *seen, cache = write(k, v)
    return _attend_and_mlp(block, x_BTD, q, stream.positions_BT, *seen, same_tokens=same_tokens), cache


def _attend_and_mlp(block: FullBlock, x_BTD, q, positions_BT, k_BKSH, v_BKSH, kv_positions_BS, same_tokens=False):
    one_document = (jnp.ones_like(positions_BT), jnp.ones_like(kv_positions_BS))
    out = attend(q, k_BKSH, v_BKSH, positions_BT, kv_positions_BS, *one_document, same_tokens=same_tokens)
    return block.with_mlp(x_BTD, block.attention.combine(out))


def _full_over_cache(stream: Stream) -> Callable:
    """Runs a full block on new tokens over its cache, where slot = position."""

    def full(block, x_BTD, cache: FullCache):
        B, _, S, _ = cache.k_BKSH.shape

        def write(k_BKTH, v_BKTH):
            slots_BT = jnp.where(stream.segments_BT > 0, stream.positions_BT, S)  # out of bounds: dropped
            k_BKSH, v_BKSH = (
                jax.vmap(lambda old_KSH, new_KTH, slots_T: old_KSH.at[:, slots_T].set(new_KTH, mode="drop"))(
                    old, new, slots_BT
                )
                for old, new in ((cache.k_BKSH, k_BKTH), (cache.v_BKSH, v_BKTH))
            )
            kv_positions_BS = jnp.broadcast_to(jnp.arange(S, dtype=jnp.int32)[None], (B, S))
            return k_BKSH, v_BKSH, kv_positions_BS, FullCache(k_BKSH, v_BKSH)

        return _update(block, x_BTD, stream, write)

    return full


def _routed_over_tokens(layers: Layers, stream: Stream, kept_L: tuple[int, ...]) -> Callable:
    """Runs a routed block on each row's selected tokens, C per row and pass, earlier tokens first."""
    T = stream.positions_BT.shape[1]

    def routed(x_BTD, cache: RoutedCache, chosen: _Chosen):
        num_kept = min(kept_L[chosen.index], T)

        def one_pass(carry):
            x_BTD, cache, left_BT = carry
            idx_BC = jax.vmap(routing.pack_selected, (0, None))(left_BT, num_kept)
            x_BCD, stream_BC, gate_BC = jax.tree.map(
                lambda a: jax.vmap(_take)(a, idx_BC), (x_BTD, stream, chosen.gate_BT)
            )

            def write(k_BKCH, v_BKCH):
                new = append_many(cache, k_BKCH, v_BKCH, stream_BC.positions_BT, idx_BC < T)
                return new.k_BKSH, new.v_BKSH, new.positions_BS, new

            update_BCD, cache = _update(layers.inner_block(chosen.index), x_BCD, stream_BC, write)
            x_BTD = jax.vmap(_add)(x_BTD, idx_BC, _gated(gate_BC, update_BCD))
            return x_BTD, cache, jax.vmap(_clear)(left_BT, idx_BC)

        carry = (x_BTD, cache, chosen.selected_BT)
        x_BTD, cache, _ = jax.lax.while_loop(lambda carry: jnp.any(carry[2]), one_pass, carry)
        return x_BTD, cache

    return routed


def _run_rows(layers: Layers, x_B1D, stream: Stream, cache: RoutedCache, chosen: _Chosen, num_rows: int):
    """A routed block on the rows that selected their token, `num_rows` per pass."""

    def one_pass(carry):
        x_B1D, cache, left_B = carry
        rows_R = routing.pack_selected(left_B, num_rows)
        x_R1D, stream_R1, gate_R1 = jax.tree.map(lambda a: _take(a, rows_R), (x_B1D, stream, chosen.gate_BT))

        def write(k_RK1H, v_RK1H):
            new = append(cache, rows_R, k_RK1H[:, :, 0], v_RK1H[:, :, 0], stream_R1.positions_BT[:, 0])
            read = jax.tree.map(lambda a: a.at[rows_R].get(mode="clip"), new)
            return read.k_BKSH, read.v_BKSH, read.positions_BS, new

        update_R1D, cache = _update(layers.inner_block(chosen.index), x_R1D, stream_R1, write)
        return _add(x_B1D, rows_R, _gated(gate_R1, update_R1D)), cache, _clear(left_B, rows_R)

    carry = (x_B1D, cache, chosen.selected_BT[:, 0])
    x_B1D, cache, _ = jax.lax.while_loop(lambda carry: jnp.any(carry[2]), one_pass, carry)
    return x_B1D, cache


def _run_one_row(layers: Layers, x_11D, stream: Stream, cache: RoutedCache, chosen: _Chosen):
    """`_run_rows` at batch 1. No branch returns the cache: XLA would copy it, on the way past the block too."""
    selected = chosen.selected_BT[0, 0]

    def project(x_11D):
        block = layers.inner_block(chosen.index)
        return block.attention.project(block.attention_norm(x_11D), stream.rotation)

    def skip(x_11D):
        return jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), jax.eval_shape(project, x_11D))

    q_11NH, k_1K1H, v_1K1H = jax.lax.cond(selected, project, skip, x_11D)
    row_1 = jnp.where(selected, 0, 1)[None]
    cache = append(cache, row_1, k_1K1H[:, :, 0], v_1K1H[:, :, 0], stream.positions_BT[0])

    def finish(x_11D):
        seen = cache.k_BKSH, cache.v_BKSH, cache.positions_BS
        block = layers.inner_block(chosen.index)
        update_11D = _attend_and_mlp(block, x_11D, q_11NH, stream.positions_BT, *seen)
        return x_11D + _gated(chosen.gate_BT, update_11D)

    return jax.lax.cond(selected, finish, lambda x_11D: x_11D, x_11D), cache


def rows_per_pass(batch_size: int, capacity: float, platform: str) -> int:
    """R: the expected number of selected rows, and spare ones.

    None on CPU, where a pass costs by its rows (measured: 7 % faster at batch 8 than with one standard deviation);
    elsewhere two deviations, because there a pass costs the reading of the weights, and a second one is seldom needed.
    """
    deviations = 0.0 if platform == "cpu" else 2.0
    expected = batch_size * capacity
    return max(1, min(batch_size, round(expected + deviations * (expected * (1 - capacity)) ** 0.5)))


def _gated(gate_BT: jax.Array, update_BTD: jax.Array) -> jax.Array:
    return (gate_BT[..., None] * update_BTD.astype(jnp.float32)).astype(update_BTD.dtype)


# Slots of `routing.pack_selected`: an unused one reads zeros and writes nothing.


def _take(x: jax.Array, idx: jax.Array) -> jax.Array:
    return x.at[idx].get(mode="fill", fill_value=0, indices_are_sorted=True)


def _add(x: jax.Array, idx: jax.Array, update: jax.Array) -> jax.Array:
    return x.at[idx].add(update, mode="drop", indices_are_sorted=True)


def _clear(left: jax.Array, idx: jax.Array) -> jax.Array:
    return left.at[idx].set(False, mode="drop", indices_are_sorted=True)
