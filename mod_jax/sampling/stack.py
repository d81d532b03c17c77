"""The decoder as sampling runs it: the blocks of training, each apart, over a cache.

Whole prompts go by `prefill`, one token of each row by `decode`, a few tokens of each row by `extend`. They differ in
the dispatch of routed blocks (see `models.dispatch`), in nothing else: choices, and the update of each token, are those
of an uncached forward pass by the same causal rule.

Vocabulary: B rows, T new tokens of a row, C tokens of a row or R rows per pass, D width, L routed blocks.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from mod_jax import routing, tuning
from mod_jax.errors import ConfigError
from mod_jax.models.blocks import Block, Choice, Dispatch, Routed
from mod_jax.models.decoder import Decoder
from mod_jax.models.dispatch import by_branch, bypass, in_row_passes, in_token_passes
from mod_jax.models.layers import Embedder, RMSNorm
from mod_jax.models.memory import Tokens, make_tokens
from mod_jax.sampling.cache import Cache
from mod_jax.sharding import sending_less


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Stack:
    """A decoder with every block apart, so that decoding reads a weight where it lies.

    Where the platform wants it (see `tuning.stacks_weights`), what is inside routed blocks lies in `inside`: one stack
    for each kind of block, in order of depth. The routed blocks then hold router and predictor alone. Where it does
    not, each expert's weights are apart too.
    """

    embedder: Embedder
    blocks: tuple[Block | Routed, ...]
    final_norm: RMSNorm
    inside: dict[str, Block]
    kinds: tuple[str, ...] = dataclasses.field(metadata=dict(static=True))
    dtype: jnp.dtype = dataclasses.field(metadata=dict(static=True))
    rotary: tuple[int, float, tuple[float, ...]] = dataclasses.field(metadata=dict(static=True))

    def tokens(self, positions_BT: jax.Array, is_there_BT: jax.Array) -> Tokens:
        """One document per row."""
        return make_tokens(positions_BT, is_there_BT.astype(jnp.int32), *self.rotary)

    def block_inside(self, depth: int) -> Block:
        """What the routed block at this depth runs its tokens through.

        To be called inside the branch or loop that runs them: then a slice of the stack is taken, and read, there.
        """
        kind = self.kinds[depth]
        if kind not in self.inside:
            return self.blocks[depth].block
        index = self.kinds[:depth].count(kind)
        block = jax.tree.map(lambda stack: stack[index], self.inside[kind])
        if block.has_experts:
            block.experts.take_from(self.inside[kind].experts, index)
        return block

    @sending_less()
    def logits(self, x_BTD: jax.Array) -> jax.Array:
        """float32 [B, T, V] from the residual stream behind the last block."""
        return self.embedder.logits(self.final_norm(x_BTD))


class Output(NamedTuple):
    """`x_BTD` is the residual stream behind the last block (see `Stack.logits`); `selected_LBT` what was routed."""

    x_BTD: jax.Array
    cache: Cache
    selected_LBT: jax.Array


def split(decoder: Decoder, platform: str) -> Stack:
    """Takes the stacked units of a decoder apart, for a device of this platform. Jit it: weights are copied once."""
    blocks, kinds = decoder.blocks_apart(), decoder.kinds
    routed = {depth: block for depth, block in enumerate(blocks) if block.routed}
    if any(block.router.kind == "stochastic" for block in routed.values()):
        raise ConfigError("routing.score = 'stochastic' is a control for training: there is nothing to sample with")
    inside = {}
    blocks = jax.tree.map(lambda weight: weight, blocks)  # copies: the decoder's own stay whole
    if not tuning.stacks_weights(platform):
        for block in (block.block if block.routed else block for block in blocks):
            if block.has_experts and jax.sharding.get_abstract_mesh().empty:  # on a mesh they lie by experts, or may
                block.experts.take_apart()
    else:
        for kind in {kinds[depth] for depth in routed}:
            same = [blocks[depth] for depth in routed if kinds[depth] == kind]
            weights = zip(*(jax.tree.leaves(block.block) for block in same), strict=True)
            inside[kind] = jax.tree.unflatten(jax.tree.structure(same[0].block), map(jnp.stack, weights))
            for block in same:
                block.block = None
    outer = decoder.embedder, tuple(blocks), decoder.final_norm
    return Stack(*outer, inside, kinds, decoder.dtype, decoder.rotary)


def prefill(
    stack: Stack,
    tokens_BT: jax.Array,
    valid_BT: jax.Array,
    cache: Cache,
    choice: Choice,
    kept_L: Sequence[int],
) -> Output:
    """Runs whole prompts of different lengths into an empty cache.

    Padding may stand anywhere: the valid tokens of each row, in order, are its positions 0, 1, ..., and the first
    columns of the output. What the output holds behind a row's last token means nothing.

    Args:
      cache: of `init_cache`. If a routed block selects more tokens of a row than it has slots, the output is wrong,
        and `overflowed(cache)` says so.
      choice: by a causal rule.
      kept_L: C of each routed block, tokens per row and pass. The expected number, with some slack, is fast.
    """
    B, T = tokens_BT.shape
    idx_BT = jax.vmap(routing.pack_selected, (0, None))(valid_BT, T)
    tokens_BT = jax.vmap(lambda row_T, idx_T: row_T.at[idx_T].get(mode="fill", fill_value=0))(tokens_BT, idx_BT)
    positions_BT = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32)[None], (B, T))
    memories = [
        memory.for_prompts() if takes_everybody(block) else memory
        for block, memory in zip(stack.blocks, cache, strict=True)
    ]
    dispatches = [functools.partial(in_token_passes, num_kept=kept) for kept in kept_L]
    return _run(stack, tokens_BT, stack.tokens(positions_BT, idx_BT < T), memories, choice, dispatches)


def takes_everybody(block: Block | Routed) -> bool:
    """Whether every token leaves its item in the block's memory."""
    return not block.routed or block.keeps_items


def extend(
    stack: Stack,
    tokens_BT: jax.Array,
    positions_BT: jax.Array,
    live_BT: jax.Array,
    cache: Cache,
    choice: Choice,
    kept_L: Sequence[int],
) -> Output:
    """Runs a few consecutive tokens of each row behind what its cache holds.

    Tokens that are not live touch nothing. They are the last ones of their rows.
    """
    dispatches = [functools.partial(in_token_passes, num_kept=kept) for kept in kept_L]
    return _run(stack, tokens_BT, stack.tokens(positions_BT, live_BT), cache, choice, dispatches)


def decode(
    stack: Stack,
    tokens_B: jax.Array,
    positions_B: jax.Array,
    live_B: jax.Array,
    cache: Cache,
    choice: Choice,
    rows_L: Sequence[int] = (),
) -> Output:
    """Runs one token of each row. Where no row selects it, a routed block's weights are not even read (on a TPU, if the
    weights of all routed blocks together do not fit into on-chip memory).

    Args:
      positions_B: the position of each token; it has nothing to do with how many slots a routed block has filled.
      live_B: False for rows that are finished.
      choice: by a causal rule; with rule "nobody", the model without its routed blocks.
      rows_L: R of each routed block, rows per pass (see `tuning.rows_per_pass`); not read at batch 1, nor if nobody is
        chosen.
    """
    if choice.rule == "nobody" or len(tokens_B) == 1:  # on a mesh that splits rows there are more
        dispatches = [bypass if choice.rule == "nobody" else by_branch] * len(stack.blocks)
    else:
        dispatches = [functools.partial(in_row_passes, num_rows=rows) for rows in rows_L]
    tokens = stack.tokens(positions_B[:, None], live_B[:, None])
    return _run(stack, tokens_B[:, None], tokens, cache, choice, dispatches)


@sending_less()
def _run(
    stack: Stack, ids_BT: jax.Array, tokens: Tokens, memories, choice: Choice, dispatches_L: Sequence[Dispatch]
) -> Output:
    x_BTD = stack.embedder.embed(ids_BT, stack.dtype)
    cache, selected = [], []
    for depth, (block, memory) in enumerate(zip(stack.blocks, memories, strict=True)):
        own_choice, dispatch = choice.of_block(depth, stack.blocks), None
        if block.routed:
            dispatch = _with_weights_of(stack, depth, dispatches_L[len(selected)])
        with jax.named_scope(f"block{depth:02}"):  # profiles and plans tell blocks apart by it
            x_BTD, memory, record = block(x_BTD, tokens, memory, own_choice, dispatch)
        cache.append(memory)
        selected += [record.routing.selected_BT] if block.routed else []
    return Output(x_BTD, tuple(cache), jnp.stack(selected) if selected else jnp.zeros((0, *ids_BT.shape), bool))


def _with_weights_of(stack: Stack, depth: int, dispatch: Dispatch) -> Dispatch:
    """The dispatch, with the weights from where the stack keeps them."""
    return lambda _, *rest: dispatch(lambda: stack.block_inside(depth), *rest)
