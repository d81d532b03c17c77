"""The ways to run the selected tokens of a routed block through it: fast where that matters, never another result.

Each is a `blocks.Dispatch`, some after `functools.partial` has set a size. Training takes `through_slots`, an uncached
causal forward `by_mask`; over a cache, prompts and drafts go `in_token_passes`, single tokens `in_row_passes` or, at
batch 1, `by_branch`. Shapes are static, how many tokens are selected is not: over a cache a block therefore takes as
many passes of a fixed size as it needs.

Vocabulary: B rows, T positions, C tokens of a row or R rows per pass, D width.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from mod_jax import routing
from mod_jax.models.blocks import Block, Choice, Chosen, Work
from mod_jax.models.memory import Memory, Tokens
from mod_jax.sharding import in_groups

GetBlock = Callable[[], Block]


def uncached(rule: str):
    """The dispatch of a forward pass without a cache."""
    return through_slots if rule == "topk" else by_mask


def through_slots(get_block: GetBlock, x_BTD: jax.Array, tokens: Tokens, chosen: Chosen, memory: Memory):
    """Gathers the tokens that top-k gave a slot, and scatters their updates. No [B, T] work but the scatter."""
    gather, scatter_add = jax.vmap(routing.gather_tokens), jax.vmap(routing.scatter_add)
    x_BCD, gate_BC, tokens_BC = jax.tree.map(lambda a: gather(a, chosen.idx_BC), (x_BTD, chosen.gate_BT, tokens))
    gated_BCD, memory, work = _work(get_block(), x_BCD, tokens_BC, gate_BC, memory, chosen.choice)
    if work.channel is not None:
        of_tokens = jax.tree.map(lambda a: _spread(a, chosen.idx_BC, x_BTD.shape[1]), work.channel.of_tokens)
        work = work._replace(channel=work.channel._replace(of_tokens=of_tokens))
    return scatter_add(x_BTD, chosen.idx_BC, gated_BCD), memory, work


def by_mask(get_block: GetBlock, x_BTD: jax.Array, tokens: Tokens, chosen: Chosen, memory: Memory):
    """Runs every token, hides those that were not selected, and throws away their updates: as dear as a full block."""
    tokens = tokens._replace(segments_BT=jnp.where(chosen.selected_BT, tokens.segments_BT, 0))
    gated_BTD, memory, work = _work(get_block(), x_BTD, tokens, chosen.gate_BT, memory, chosen.choice)
    return x_BTD + gated_BTD, memory, work


def in_token_passes(
    get_block: GetBlock, x_BTD: jax.Array, tokens: Tokens, chosen: Chosen, memory: Memory, *, num_kept: int
):
    """`num_kept` selected tokens of each row per pass, earlier ones first."""
    num_kept = min(num_kept, x_BTD.shape[1])

    def one_pass(carry):
        x_BTD, memory, left_BT = carry
        idx_BC = jax.vmap(routing.pack_selected, (0, None))(left_BT, num_kept)
        x_BCD, tokens_BC, gate_BC = jax.tree.map(lambda a: jax.vmap(_take)(a, idx_BC), (x_BTD, tokens, chosen.gate_BT))
        update_BCD, memory, _ = get_block().update(x_BCD, tokens_BC, memory, chosen.choice)
        x_BTD = jax.vmap(_add)(x_BTD, idx_BC, _gated(gate_BC, update_BCD).astype(x_BTD.dtype))
        return x_BTD, memory, jax.vmap(_clear)(left_BT, idx_BC)

    x_BTD, memory, _ = jax.lax.while_loop(_any_left, one_pass, (x_BTD, memory, chosen.selected_BT))
    return x_BTD, memory, None


def in_row_passes(
    get_block: GetBlock, x_B1D: jax.Array, tokens: Tokens, chosen: Chosen, memory: Memory, *, num_rows: int
):
    """`num_rows` of the rows that selected their one token per pass. Where no row did, no weight is read.

    On a mesh that splits rows, `num_rows` of each device's own: no row leaves its device, nor does its cache.
    """
    take, add, clear = map(in_groups, (_take, _add, _clear))

    def one_pass(carry):
        x_B1D, memory, left_B = carry
        rows_R = in_groups(lambda left_B: routing.pack_selected(left_B, num_rows))(left_B)
        x_R1D, tokens_R1, gate_R1 = jax.tree.map(lambda a: take(a, rows_R), (x_B1D, tokens, chosen.gate_BT))
        update_R1D, memory, _ = get_block().update(x_R1D, tokens_R1, memory.rows(rows_R), chosen.choice)
        x_B1D = add(x_B1D, rows_R, _gated(gate_R1, update_R1D).astype(x_B1D.dtype))
        return x_B1D, memory, clear(left_B, rows_R)

    x_B1D, memory, _ = jax.lax.while_loop(_any_left, one_pass, (x_B1D, memory, chosen.selected_BT[:, 0]))
    return x_B1D, memory, None


def by_branch(get_block: GetBlock, x_11D: jax.Array, tokens: Tokens, chosen: Chosen, memory: Memory):
    """`in_row_passes` at batch 1, by two conditionals. Neither returns the memory: XLA would copy it, on the way past
    the block too."""
    selected = chosen.selected_BT[0, 0]
    tokens = tokens._replace(segments_BT=jnp.where(chosen.selected_BT, tokens.segments_BT, 0))

    def ask(x_11D):
        return get_block().ask(x_11D, tokens)

    def nothing(x_11D):
        return jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), jax.eval_shape(ask, x_11D))

    query, items = jax.lax.cond(selected, ask, nothing, x_11D)
    seen, memory = memory.append(items, tokens)

    def finish(x_11D):
        update_11D, _ = get_block().finish(x_11D, query, seen, tokens, chosen.choice)
        return x_11D + _gated(chosen.gate_BT, update_11D).astype(x_11D.dtype)

    return jax.lax.cond(selected, finish, lambda x_11D: x_11D, x_11D), memory, None


def bypass(get_block: GetBlock, x_BTD: jax.Array, tokens: Tokens, chosen: Chosen, memory: Memory):
    """Nobody goes through. For `Choice("nobody")`."""
    return x_BTD, memory, None


def _work(block: Block, x_BCD: jax.Array, tokens: Tokens, gate_BC: jax.Array, memory: Memory, choice: Choice):
    """(gated updates, -0.0 of what is not there; the memory; the work)."""
    update_BCD, memory, record = block.update(x_BCD, tokens, memory, choice)
    is_there_BC1 = tokens.segments_BT[..., None] > 0
    # x + -0.0 is x bit for bit; x + 0.0 would turn -0.0 into 0.0.
    gated_BCD = jnp.where(is_there_BC1, _gated(gate_BC, update_BCD), -0.0).astype(x_BCD.dtype)
    residual_BCD = jnp.where(is_there_BC1, x_BCD.astype(jnp.float32), 0.0)
    update_square_sum = jnp.sum(jnp.square(gated_BCD.astype(jnp.float32)))
    return gated_BCD, memory, Work(update_square_sum, jnp.sum(jnp.square(residual_BCD)), record)


def _spread(a_BC: jax.Array, idx_BC: jax.Array, length: int) -> jax.Array:
    """[B, T, ...] from what the tokens of slots report; -1, or False, at the other positions."""
    empty = jnp.full((length, *a_BC.shape[2:]), a_BC.dtype != bool and -1, a_BC.dtype)
    return jax.vmap(lambda a_C, idx_C: empty.at[idx_C].set(a_C, unique_indices=True))(a_BC, idx_BC)


def _gated(gate_BT: jax.Array, update_BTD: jax.Array) -> jax.Array:
    return gate_BT[..., None] * update_BTD.astype(jnp.float32)


def _any_left(carry) -> jax.Array:
    return jnp.any(carry[2])


# Slots of `routing.pack_selected`: an unused one reads zeros and writes nothing.


def _take(x: jax.Array, idx: jax.Array) -> jax.Array:
    return x.at[idx].get(mode="fill", fill_value=0, indices_are_sorted=True)


def _add(x: jax.Array, idx: jax.Array, update: jax.Array) -> jax.Array:
    return x.at[idx].add(update, mode="drop", indices_are_sorted=True)


def _clear(left: jax.Array, idx: jax.Array) -> jax.Array:
    return left.at[idx].set(False, mode="drop", indices_are_sorted=True)
