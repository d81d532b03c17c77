"""Routing arithmetic: which tokens a routed block computes on, and how they leave and re-enter the residual stream.

Pure functions for ONE row: no weights, no modules, no batch axis; callers `jax.vmap` them (a batch-indexed
`x.at[b, idx]` costs all-gathers under batch sharding, the vmapped form costs none). Vocabulary: T positions of a row,
C tokens kept (slots), D model width. `idx_C` always holds C different positions in increasing order.

Top-k over a row looks at the future. It is the rule to train with; sampling uses `select_causal`.
"""

import math

import jax
import jax.numpy as jnp


def tokens_kept(seq_len: int, capacity: float) -> int:
    """C, the number of tokens that a routed block of this capacity keeps out of `seq_len`.

    The rule: `capacity * seq_len` rounded to the nearest integer, halves up, and at least 1. So capacity 1.0 keeps
    every token, 0.29 of 100 keeps 29 and 0.125 of 7 keeps 1.

    Raises:
      ValueError: if `seq_len` < 1 or `capacity` is not in (0, 1].
    """
    if seq_len < 1:
        raise ValueError(f"seq_len = {seq_len}: must be >= 1")
    if not 0.0 < capacity <= 1.0:  # NaN fails too
        raise ValueError(f"capacity = {capacity}: must be in (0, 1]")
    # The inner round undoes binary noise such as 0.145 * 100 == 14.499999999999998.
    return max(1, math.floor(round(seq_len * capacity, 6) + 0.5))


def select_topk(scores_T: jax.Array, num_kept: int, valid_T: jax.Array | None = None) -> jax.Array:
    """Positions of the `num_kept` largest scores of a row. USES THE FUTURE: for training, never for sampling.

    Ties go to the earlier position on every backend, NaN counts as -inf, and padding is chosen only when real tokens
    have run out (such slots must then not be updated: see `valid_T[idx_C]`). It is a stable sort rather than
    `lax.top_k`, because a sort stays local when the batch is sharded.

    Args:
      scores_T: float scores; ranked without gradient.
      num_kept: C, 1 <= C <= T.
      valid_T: bool, False at padding. Default: all valid.

    Returns:
      int32 idx_C: C different positions, increasing.
    """
    scores_T = jax.lax.stop_gradient(scores_T).astype(jnp.float32)
    if not 1 <= num_kept <= scores_T.shape[0]:
        raise ValueError(f"num_kept = {num_kept}: must be in [1, {scores_T.shape[0]}], the row's length")
    lowest = jnp.finfo(jnp.float32).min
    key_T = jnp.where(jnp.isnan(scores_T), lowest, jnp.maximum(scores_T, lowest))
    if valid_T is not None:
        key_T = jnp.where(valid_T, key_T, -jnp.inf)
    order_T = jnp.argsort(key_T, stable=True, descending=True)
    return jnp.sort(order_T[:num_kept]).astype(jnp.int32)


def select_causal(scores_T: jax.Array, cutoff: jax.Array | float) -> jax.Array:
    """Decides each token alone: selected where its score exceeds the cut-off (a NaN score never does). bool [T]."""
    return scores_T > cutoff


def pack_selected(selected_T: jax.Array, num_slots: int) -> jax.Array:
    """Positions of the first `num_slots` <= T selected tokens, int32 [num_slots], increasing; unused slots hold T.

    First come, first served: whether a token gets a slot depends on no later token. T is out of bounds, so reading a
    slot needs `mode="fill"` and writing one `mode="drop"`.
    """
    length = selected_T.shape[0]
    return jnp.sort(jnp.where(selected_T, jnp.arange(length, dtype=jnp.int32), length))[:num_slots]


def share_within_document(scores_T: jax.Array, segment_ids_T: jax.Array) -> jax.Array:
    """Ranks each token within its own document of a packed row: (rank + 0.5) / document length, 0 the highest score.

    `select_topk(-share_T, C)` then gives every document its share of the C slots, and which tokens of a document are
    chosen depends on no other document's content (only on the lengths). Documents must be contiguous.
    """
    length = scores_T.shape[0]
    scores_T = jax.lax.stop_gradient(scores_T).astype(jnp.float32)
    scores_T = jnp.where(jnp.isnan(scores_T), -jnp.inf, scores_T)
    slots_T = jnp.arange(length, dtype=jnp.int32)
    # Sorted by document, then by falling score, then by position; `order_T` is where each sorted entry came from.
    segments_T, _, order_T = jax.lax.sort((segment_ids_T, -scores_T, slots_T), num_keys=2, is_stable=True)
    is_first_T = jnp.concatenate([jnp.ones(1, bool), segments_T[1:] != segments_T[:-1]])
    document_T = jnp.cumsum(is_first_T) - 1
    first_slot_T = jax.lax.cummax(jnp.where(is_first_T, slots_T, 0))
    document_length_T = jnp.zeros(length, jnp.int32).at[document_T].add(1)[document_T]
    share_T = (slots_T - first_slot_T + 0.5) / document_length_T
    return jnp.zeros(length, jnp.float32).at[order_T].set(share_T, unique_indices=True)


def topk_targets(idx_C: jax.Array, seq_len: int) -> jax.Array:
    """Membership of each position in the top-k set: bool [T], True at the C positions of `idx_C`."""
    return jnp.zeros(seq_len, bool).at[idx_C].set(True, **_HINTS)


def gather_tokens(x_TD: jax.Array, idx_C: jax.Array) -> jax.Array:
    """The selected tokens, [C, ...] from [T, ...]; `idx_C` in bounds, increasing."""
    return x_TD.at[idx_C].get(**_HINTS)


def scatter_add(x_TD: jax.Array, idx_C: jax.Array, update_CD: jax.Array) -> jax.Array:
    """Adds each selected token's update at its own position; every other position passes unchanged."""
    return x_TD.at[idx_C].add(update_CD, **_HINTS)


_HINTS = dict(mode="promise_in_bounds", indices_are_sorted=True, unique_indices=True)
