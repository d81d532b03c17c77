"""Arithmetic of experts: which expert computes on which token, in which slot, and how tokens travel there and back.

Pure functions for ONE row, as in `routing.py`: no weights, no modules, no batch axis; callers `jax.vmap` them.
Vocabulary: T positions of a row, E experts, N choices of a token (the E experts, then the no-ops), A experts per token,
C slots per expert. A *no-op* is the residual path as an expert: its token leaves the channel bit for bit as it came. A
*claim* is one of the T * A pairs (token, its a-th expert), numbered t * A + a. A claim without a slot is *dropped*.

A row is described by `slot_TA`: where each claim sits among the E * C slots, expert by expert; E * C where it has none.
Token choice with overflow in order of position is causal: whether a claim is dropped depends on earlier tokens only.
Expert choice is not: it looks at the whole row. It is a rule to train with, as top-k over depth is.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from mod_jax import routing


def slots_per_expert(seq_len: int, capacity: float, num_experts: int, num_chosen: int) -> int:
    """C = capacity * T * A / E, rounded to the nearest integer, halves up, at least 1 and at most T.

    At capacity 1 the slots of all experts together are as many as the claims; an expert that is claimed more often than
    the others then drops some.
    """
    share = capacity * num_chosen / num_experts
    return seq_len if share >= 1 else routing.tokens_kept(seq_len, share)


class Claims(NamedTuple):
    """The choices of each token, likeliest first: int32 ids in [0, N), and the weight on what the choice returns."""

    choice_TA: jax.Array
    gate_TA: jax.Array


def choose_experts(logits_TN: jax.Array, num_chosen: int) -> Claims:
    """Token choice: the `num_chosen` likeliest choices of each token; of equal ones the lower id. Causal.

    The gate is the probability of the choice among all N (Switch Transformer, Fedus et al. 2021, eq. 2). It is not
    divided by the sum over the chosen ones, which some models do for A > 1: at A = 1 that would make every gate 1 and
    leave the router without a gradient from the loss.
    """
    probs_TN = jax.nn.softmax(logits_TN, axis=-1)
    # The largest, A times: a top-k or a sort over sharded rows costs collectives, an argmax does not.
    left_TN, choices = jax.lax.stop_gradient(logits_TN), []
    for _ in range(num_chosen):
        choices.append(jnp.argmax(left_TN, axis=-1).astype(jnp.int32))
        left_TN = jnp.where(jax.nn.one_hot(choices[-1], logits_TN.shape[-1], dtype=bool), -jnp.inf, left_TN)
    choice_TA = jnp.stack(choices, axis=-1)
    return Claims(choice_TA, jnp.take_along_axis(probs_TN, choice_TA, axis=-1))


def assign_slots(
    choice_TA: jax.Array, valid_T: jax.Array, num_experts: int, num_slots: int, pace: float | None = None
) -> jax.Array:
    """Gives the claims of each expert its slots, first come, first served. Causal.

    No-ops and tokens that are not valid (padding, empty slots of a routed block) claim nothing.

    Args:
      choice_TA: from `choose_experts`; ids >= `num_experts` are no-ops.
      valid_T: bool.
      num_slots: C.
      pace: None fills an expert's slots from the start of the row, so that at a low capacity the end of a row finds
        none. A number is the *paced quota*: the share of an expert's slots that position t may have used up grows with
        t. At most `pace` * (t + 1) + 4 claims of an expert have a slot up to position t. See `paced_slots`.

    Returns:
      int32 slot_TA.
    """
    T, A = choice_TA.shape
    claim_ME = jax.nn.one_hot(
        jnp.where(valid_T[:, None], choice_TA, num_experts).reshape(-1), num_experts, dtype=jnp.int32
    )
    arrivals_ME = jnp.cumsum(claim_ME, axis=0)
    if pace is not None:
        # Served = arrivals, less the most by which they ever ran ahead of the quota: no loop over positions.
        quota_M = jnp.floor(pace * (jnp.arange(T * A) // A + 1) + 1e-4).astype(jnp.int32) + BURST
        ahead_ME = jnp.minimum(0, jax.lax.cummin(quota_M[:, None] - arrivals_ME, axis=0))
        served_ME = arrivals_ME + ahead_ME
        before_ME = jnp.concatenate([jnp.zeros((1, num_experts), jnp.int32), served_ME[:-1]])
        claim_ME = claim_ME * (served_ME > before_ME)
        arrivals_ME = served_ME
    slot_ME = jnp.arange(num_experts, dtype=jnp.int32)[None] * num_slots + arrivals_ME - 1
    has_slot_ME = (claim_ME > 0) & (arrivals_ME <= num_slots)
    slot_M = jnp.min(jnp.where(has_slot_ME, slot_ME, num_experts * num_slots), axis=1)
    return slot_M.reshape(T, A).astype(jnp.int32)


BURST = 4  # claims by which an expert may run ahead of its paced quota


def paced_slots(num_slots: int, seq_len: int) -> int:
    """C of a paced quota: the burst on top, or the last positions would starve again."""
    return min(num_slots + BURST, seq_len)


def assign_by_experts(scores_TE: jax.Array, valid_T: jax.Array, num_slots: int) -> jax.Array:
    """Expert choice: each expert takes its `num_slots` best tokens of the row. USES THE FUTURE: for training only.

    (Zhou et al. 2022.) Every token has one claim per expert, A = E. Ties go to the earlier position, as in
    `routing.select_topk`.

    Returns:
      int32 slot_TA with A = E.
    """
    T, E = scores_TE.shape
    idx_EC = jax.vmap(routing.select_topk, (1, None, None))(scores_TE, num_slots, valid_T)
    slots_EC = jnp.arange(E * num_slots, dtype=jnp.int32).reshape(E, num_slots)
    nowhere_T = jnp.full(T, E * num_slots, jnp.int32)
    slot_ET = jax.vmap(lambda idx_C, slots_C: nowhere_T.at[idx_C].set(slots_C, unique_indices=True))(idx_EC, slots_EC)
    return jnp.where(valid_T[:, None], slot_ET.T, E * num_slots)


def claims_of_slots(slot_TA: jax.Array, total_slots: int) -> jax.Array:
    """The claim in each slot, int32 [E * C]; T * A in an empty one. The inverse of `slot_TA`."""
    claims_M = jnp.arange(slot_TA.size, dtype=jnp.int32)
    empty_S = jnp.full(total_slots, slot_TA.size, jnp.int32)
    return empty_S.at[slot_TA.reshape(-1)].set(claims_M, mode="drop", unique_indices=True)


def to_slots(x_TD: jax.Array, slot_TA: jax.Array, claim_S: jax.Array) -> jax.Array:
    """Copies each token into the slots of its claims: [E * C, D], zeros in empty slots."""
    num_claims = slot_TA.shape[1]
    T = x_TD.shape[0]
    token_S = jnp.where(claim_S < slot_TA.size, claim_S // num_claims, T)
    return _move(x_TD, token_S, slot_TA)


def from_slots(y_SD: jax.Array, gate_TA: jax.Array, slot_TA: jax.Array, claim_S: jax.Array) -> jax.Array:
    """Brings the results home: sum over a of gate * result, [T, D] float32; 0 for a token without any slot."""
    T, A = slot_TA.shape
    y_MD = _move(y_SD, slot_TA.reshape(-1), claim_S[:, None])
    has_slot_TA = slot_TA < y_SD.shape[0]
    weight_TA1 = jnp.where(has_slot_TA, gate_TA, 0.0)[..., None]
    return jnp.sum(weight_TA1 * y_MD.reshape(T, A, -1).astype(jnp.float32), axis=1)


@jax.custom_vjp
def _move(x_MD: jax.Array, source_K: jax.Array, destinations_MA: jax.Array) -> jax.Array:
    """Rows of x by index, [K, D]; zeros where `source_K` is M. `destinations_MA` says where each row went (K: nowhere).

    Knowing the way back, the gradient gathers too: scattering rows would be a fifth slower.
    """
    del destinations_MA
    return _rows(x_MD, source_K)


def _move_forward(x_MD, source_K, destinations_MA):
    return _rows(x_MD, source_K), destinations_MA


def _move_backward(destinations_MA, d_KD):
    d_x_MD = _rows(d_KD, destinations_MA[:, 0])
    for a in range(1, destinations_MA.shape[1]):
        d_x_MD = d_x_MD + _rows(d_KD, destinations_MA[:, a])
    return d_x_MD, None, None


_move.defvjp(_move_forward, _move_backward)


def _rows(x_MD: jax.Array, index_K: jax.Array) -> jax.Array:
    return x_MD.at[index_K].get(mode="fill", fill_value=0)


class BalanceSums(NamedTuple):
    """What a row adds to the two losses of an expert router, and to its report. Sums over valid tokens."""

    balance: jax.Array  # N * sum_n f_n * P_n, times the row's valid tokens; 1 per token where the load is even
    z: jax.Array  # squared log-normaliser of the router
    load_N: jax.Array  # claims by choice
    dropped: jax.Array  # claims of an expert that found no slot
    computed: jax.Array  # tokens that at least one expert computed on
    tokens: jax.Array


def balance_sums(
    logits_TN: jax.Array, choice_TA: jax.Array, has_slot_TA: jax.Array, valid_T: jax.Array, num_experts: int
) -> BalanceSums:
    """The load-balancing loss and router z-loss of one row (Fedus et al. 2021, eq. 4; Zoph et al. 2022, eq. 5).

    `choice_TA` is -1 where nothing was chosen. f_n is the share of claims that chose n, P_n the mean probability of n;
    only P_n has a gradient. Both are taken per row, not per batch: so the loss is a sum over rows, the same under
    accumulation and on any number of devices.
    """
    logits_TN = logits_TN.astype(jnp.float32)
    num_choices = logits_TN.shape[1]
    weight_T = valid_T.astype(jnp.float32)
    tokens = jnp.sum(weight_T)
    chosen_TAN = jax.nn.one_hot(choice_TA, num_choices) * weight_T[:, None, None]
    load_N = jax.lax.stop_gradient(jnp.sum(chosen_TAN, axis=(0, 1)))
    share_N = load_N / jnp.maximum(tokens * choice_TA.shape[1], 1.0)
    # A finite logit at padding: a softmax of NaN would poison the gradient of its row.
    logits_TN = jnp.where(valid_T[:, None], logits_TN, 0.0)
    prob_sum_N = jnp.sum(jax.nn.softmax(logits_TN, axis=-1) * weight_T[:, None], axis=0)
    z = jnp.sum(jnp.square(jax.nn.logsumexp(logits_TN, axis=-1)) * weight_T)
    wants_TA = valid_T[:, None] & (choice_TA >= 0) & (choice_TA < num_experts)
    return BalanceSums(
        balance=num_choices * jnp.sum(share_N * prob_sum_N),
        z=z,
        load_N=load_N,
        dropped=jnp.sum(wants_TA & ~has_slot_TA).astype(jnp.float32),
        computed=jnp.sum(jnp.any(has_slot_TA, axis=1) & valid_T).astype(jnp.float32),
        tokens=tokens,
    )
