"""Self-speculative decoding: the model without its routed blocks drafts, the whole causal model verifies in one pass.

The draft needs no weights of its own, and reads the whole model's caches of the blocks that are not routed. Its tokens
are accepted so that the output follows exactly the whole model's distribution (Leviathan et al. 2023, Chen et al.
2023); at temperature 0 that is token for token what decoding one by one gives. Nothing promises that it is faster: it
pays where a pass over a few tokens costs little more than over one, and where drafts are mostly accepted.

Vocabulary: B rows, G drafted tokens, V vocabulary, L routed blocks.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from mod_jax.models.blocks import Choice
from mod_jax.sampling.cache import Cache, forget_after
from mod_jax.sampling.choice import Knobs, probabilities
from mod_jax.sampling.stack import Stack, decode, extend


class Verified(NamedTuple):
    """`tokens_BG1`: the accepted drafts, then the whole model's own token; `emitted_B` of them count.

    The cache holds the given token and the accepted ones, nothing of the others.
    """

    tokens_BG1: jax.Array
    emitted_B: jax.Array
    cache: Cache
    selected_B: jax.Array


def draft_and_verify(
    stack: Stack,
    tokens_B: jax.Array,
    positions_B: jax.Array,
    live_B: jax.Array,
    cache: Cache,
    choice: Choice,
    knobs: Knobs,
    keys_B: jax.Array,
    *,
    num_ids: int,
    num_positions: int,
    num_drafts: int,
    kept_L: tuple[int, ...],
) -> Verified:
    """One round: at least one token of each live row, at most `num_drafts` + 1.

    Args:
      tokens_B: the last token of each row, not yet in the cache, at `positions_B`.
      cache: every routed block must have room for `num_drafts` + 1 tokens.
      keys_B: fresh random keys, one per row.
      num_ids: ids of the vocabulary that stand for something.
      num_positions: positions of a row; what is drafted beyond is never accepted by the caller, and never stored.
    """
    draft_keys_B, accept_keys_B, own_keys_B = (_fold(keys_B, stream) for stream in range(3))
    nobody = dataclasses.replace(choice, rule="nobody")  # experts that choose keep their cut-offs
    drafted_BG, q_BGV, cache = _draft(
        stack, tokens_B, positions_B, live_B, cache, nobody, knobs, draft_keys_B, num_ids, num_drafts
    )
    cache = forget_after(cache, positions_B - 1)  # the whole model runs the drafted tokens again

    all_BG1 = jnp.concatenate([tokens_B[:, None], drafted_BG], axis=1)
    positions_BG1 = positions_B[:, None] + jnp.arange(num_drafts + 1, dtype=jnp.int32)[None]
    live_BG1 = live_B[:, None] & (positions_BG1 < num_positions)
    output = extend(stack, all_BG1, positions_BG1, live_BG1, cache, choice, kept_L)
    p_BG1V = probabilities(stack.logits(output.x_BTD)[..., :num_ids], knobs)

    own_B, accepted_B = accept(p_BG1V, q_BGV, drafted_BG, accept_keys_B, own_keys_B)
    is_own_BG1 = jnp.arange(num_drafts + 1)[None] == accepted_B[:, None]
    tokens_BG1 = jnp.where(is_own_BG1, own_B[:, None], jnp.pad(drafted_BG, ((0, 0), (0, 1))))
    cache = forget_after(output.cache, positions_B + accepted_B)
    selected_B = jnp.sum(output.selected_LBT, axis=(0, 2), dtype=jnp.int32)
    return Verified(tokens_BG1, accepted_B + 1, cache, selected_B)


def accept(p_BG1V, q_BGV, drafted_BG, accept_keys_B, own_keys_B) -> tuple[jax.Array, jax.Array]:
    """(the token after the last accepted one, how many were accepted), so that each token follows p.

    A token drawn from q is accepted with probability min(1, p / q); the first one that is not is drawn again from what
    p has more than q. Behind the last draft, q is nothing and the token is drawn from p.
    """
    num_drafts = drafted_BG.shape[1]
    drawn_BG = jax.vmap(lambda key: jax.random.uniform(key, (num_drafts,)))(accept_keys_B)
    p_BG, q_BG = (jnp.take_along_axis(x, drafted_BG[..., None], axis=-1)[..., 0] for x in (p_BG1V[:, :-1], q_BGV))
    accepted_B = jnp.sum(jnp.cumprod(drawn_BG * q_BG < p_BG, axis=1, dtype=jnp.int32), axis=1)
    rest_BG1V = jnp.maximum(p_BG1V - jnp.pad(q_BGV, ((0, 0), (0, 1), (0, 0))), 0.0)
    rest_BV, p_BV = (jnp.take_along_axis(x, accepted_B[:, None, None], axis=1)[:, 0] for x in (rest_BG1V, p_BG1V))
    # Rounding can leave nothing where p = q, and a draft be refused there all the same.
    rest_BV = jnp.where(jnp.sum(rest_BV, axis=-1, keepdims=True) > 0, rest_BV, p_BV)
    return _draw(rest_BV, own_keys_B), accepted_B


def _draft(
    stack: Stack,
    tokens_B,
    positions_B,
    live_B,
    cache: Cache,
    nobody: Choice,
    knobs,
    keys_B,
    num_ids: int,
    num_drafts: int,
):
    """(drafted tokens [B, G], their distributions [B, G, V], cache) with all routed blocks bypassed."""

    def step(carry, offset):
        tokens_B, cache = carry
        output = decode(stack, tokens_B, positions_B + offset, live_B, cache, nobody)
        q_BV = probabilities(stack.logits(output.x_BTD)[:, 0, :num_ids], knobs)
        tokens_B = _draw(q_BV, _fold(keys_B, offset))
        return (tokens_B, output.cache), (tokens_B, q_BV)

    offsets = jnp.arange(num_drafts, dtype=jnp.int32)
    (_, cache), (drafted_GB, q_GBV) = jax.lax.scan(step, (tokens_B, cache), offsets)
    return drafted_GB.T, q_GBV.swapaxes(0, 1), cache


def _draw(p_BV: jax.Array, keys_B: jax.Array) -> jax.Array:
    """One token per row from probabilities that need not sum to 1."""
    noise_BV = jax.vmap(lambda key: jax.random.gumbel(key, p_BV.shape[1:]))(keys_B)
    return jnp.argmax(jnp.log(p_BV) + noise_BV, axis=-1).astype(jnp.int32)


def _fold(keys_B: jax.Array, data) -> jax.Array:
    return jax.vmap(jax.random.fold_in, (0, None))(keys_B, data)
