"""Routing arithmetic for one row, against numbers worked by hand and a plain Python rule."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from mod_jax import routing, sharding

select = jax.jit(routing.select_topk, static_argnums=1)
share = jax.jit(routing.share_within_document)


def kept(scores, num_kept, valid=None):
    return select(jnp.array(scores, jnp.float32), num_kept, None if valid is None else jnp.array(valid)).tolist()


def topk_by_hand(scores, num_kept, valid=None):
    """Real tokens first, larger scores first, NaN as low as -inf, then earlier ones."""

    def rank(i):
        return (valid is not None and not valid[i], np.inf if np.isnan(scores[i]) else -scores[i], i)

    return sorted(sorted(range(len(scores)), key=rank)[:num_kept])


# How many


@pytest.mark.parametrize(
    ("seq_len", "capacity", "expected"),
    [
        (2048, 0.125, 256),  # the paper's
        (7, 0.125, 1),  # 0.875: int() would give 0
        (100, 0.29, 29),  # 28.999999999999996: int() would give 28
        (100, 0.145, 15),  # 14.5 is a half, though 0.145 * 100 == 14.499999999999998
        (6, 0.25, 2),  # 1.5: halves go up
        (10, 0.25, 3),  # 2.5: also where round() would go to the even 2
        (8, 1e-9, 1),  # never 0
        (1, 0.5, 1),
        (8, 0.99, 8),  # 7.92
    ],
)
def test_tokens_kept_is_rounded_by_one_rule_and_never_zero(seq_len, capacity, expected):
    assert routing.tokens_kept(seq_len, capacity) == expected


def test_tokens_kept_is_all_at_capacity_one_and_within_half_a_token_of_the_fraction():
    for seq_len in range(1, 130):
        assert routing.tokens_kept(seq_len, 1.0) == seq_len
        for capacity in (0.01, 0.125, 0.29, 0.5, 0.95):
            count = routing.tokens_kept(seq_len, capacity)
            assert 1 <= count <= seq_len
            assert count == 1 or abs(count - seq_len * capacity) <= 0.5 + 1e-9


@pytest.mark.parametrize(("seq_len", "capacity"), [(8, 0.0), (8, -0.5), (8, 1.01), (8, float("nan")), (0, 0.5)])
def test_tokens_kept_refuses_by_name_and_value(seq_len, capacity):
    name, value = ("seq_len", seq_len) if seq_len < 1 else ("capacity", capacity)
    with pytest.raises(ValueError, match=f"{name} = {value}: must be "):
        routing.tokens_kept(seq_len, capacity)


@pytest.mark.parametrize("num_kept", [0, 9, -1])
def test_an_impossible_number_of_slots_is_refused(num_kept):
    with pytest.raises(ValueError, match=f"num_kept = {num_kept}: must be in \\[1, 8\\]"):
        routing.select_topk(jnp.zeros(8), num_kept)


# Which ones


def test_exactly_c_tokens_whatever_ties():
    assert kept([1.0] * 8, 2) == [0, 1]
    assert kept([3, 1, 2, 0], 2) == [0, 2]
    assert kept([0, 5, 5, 5, 9], 3) == [1, 2, 4]  # ties at the cut: the earlier positions
    assert kept([0.0, -0.0, 0.0, -0.0], 2) == [0, 1]  # both zeros are one number
    scores = np.array([3.0, 1.0, 2.0, 0.0])
    strict = np.flatnonzero(scores > np.sort(scores)[-2])  # the faulty rule
    assert strict.tolist() == [0]


def test_random_rows_with_many_ties_and_nans_match_the_rule_in_plain_python():
    rng = np.random.default_rng(0)
    for _ in range(50):
        scores = rng.integers(-2, 3, 17).astype(np.float32)
        scores[rng.random(17) < 0.2] = np.nan
        scores[rng.random(17) < 0.1] = -np.inf
        valid = rng.random(17) < 0.7
        for num_kept in (1, 5, 17):
            idx = kept(scores, num_kept, valid)
            assert idx == topk_by_hand(scores, num_kept, valid)
            assert idx == sorted(set(idx))  # different and increasing


def test_nan_counts_as_minus_infinity():
    nan = float("nan")
    assert kept([nan, 1, nan, 0, 2, -5], 3) == [1, 3, 4]
    assert kept([nan, -1e30, nan], 1) == [1]
    assert kept([nan, nan, 7], 2) == [0, 2]  # real tokens have run out
    _, wins = jax.lax.top_k(jnp.array([nan, 1, 2]), 1)
    assert wins.tolist() == [0]  # the fault: plain top-k lets it win
    assert routing.select_causal(jnp.array([nan, 1.0, -1.0]), 0.0).tolist() == [False, True, False]


def test_infinite_scores_keep_their_rank():
    assert kept([0, float("inf"), float("-inf"), 5], 2) == [1, 3]
    assert kept([float("-inf"), 0, float("-inf")], 2) == [0, 1]


def test_padding_is_selected_only_when_real_tokens_have_run_out():
    valid = [True, True, True, True, True, False, False, False]
    assert kept([0, 0, 0, 0, 0, 9, 9, 9], 4, valid) == [0, 1, 2, 3]
    assert kept([-np.inf, np.nan, 0, 0, 0, 9, 9, 9], 5, valid) == [0, 1, 2, 3, 4]  # even the lowest real score
    assert kept([0, 0, 0, 0, 0, 9, 9, 9], 6, valid) == [0, 1, 2, 3, 4, 5]
    assert kept([0, 0, 0, 0, 0, 9, 9, 9], 4) == [0, 5, 6, 7]  # it is the mask that does it


def test_bfloat16_scores_are_ranked_as_they_are():
    scores = jnp.array([1.0, 3.0, 2.0, 3.0], jnp.bfloat16)
    assert select(scores, 3, None).tolist() == [1, 2, 3]


def test_selection_takes_no_gradient_and_has_no_nan_to_give():
    def loss(scores_T, x_TD):
        idx_C = routing.select_topk(scores_T, 2)
        return jnp.sum(routing.gather_tokens(x_TD, idx_C) * routing.gather_tokens(scores_T, idx_C)[:, None])

    x_TD = jnp.arange(8.0).reshape(4, 2)
    to_scores, to_x = jax.grad(loss, argnums=(0, 1))(jnp.array([0.5, 3.0, jnp.nan, 2.0]), x_TD)
    assert to_scores.tolist() == [0, 5, 0, 13]  # rows 1 and 3 sum to 2 + 3 and 6 + 7
    assert to_x.tolist() == [[0, 0], [3, 3], [0, 0], [2, 2]]


def test_a_causal_decision_looks_at_one_token():
    scores = jnp.array([0.3, -0.1, 0.0, 2.0])
    assert routing.select_causal(scores, 0.0).tolist() == [True, False, False, True]
    assert routing.select_causal(scores, 0.3).tolist() == [False, False, False, True]
    assert routing.select_causal(scores.at[3].set(-9.0), 0.0).tolist()[:3] == [True, False, False]


# Out of the residual stream and back


def test_targets_belong_to_their_own_row():
    scores_BT = jnp.array([[9, 8, 0, 0, 0, 0, 0, 0], [0, 0, 0, 7, 0, 0, 0, 7], [0, 1, 2, 3, 4, 5, 6, 7]], jnp.float32)
    idx_BC = jax.vmap(routing.select_topk, (0, None))(scores_BT, 2)
    targets_BT = np.asarray(jax.vmap(routing.topk_targets, (0, None))(idx_BC, 8))
    assert targets_BT.sum(axis=1).tolist() == [2, 2, 2]
    assert [np.flatnonzero(row).tolist() for row in targets_BT] == [[0, 1], [3, 7], [6, 7]]
    of_row_0 = np.broadcast_to(targets_BT[:1], targets_BT.shape)  # the faulty rule
    assert of_row_0.sum(axis=1).tolist() == [2, 2, 2]
    assert (of_row_0 != targets_BT).any()


def test_gather_and_scatter_move_whole_tokens():
    x_TD = jnp.arange(10.0).reshape(5, 2)
    idx_C = jnp.array([1, 4])
    assert routing.gather_tokens(x_TD, idx_C).tolist() == [[2, 3], [8, 9]]
    moved = routing.scatter_add(x_TD, idx_C, jnp.array([[10.0, 0.0], [0.0, -9.0]]))
    assert moved.tolist() == [[0, 1], [12, 3], [4, 5], [6, 7], [8, 0]]


def test_scatter_add_leaves_other_positions_bit_for_bit():
    x_TD = jnp.array([[-0.0, 1e-45], [3.0, 4.0], [jnp.inf, -1.5]])
    out = routing.scatter_add(x_TD, jnp.array([1]), jnp.full((1, 2), 0.1))
    same = np.asarray(out).view(np.int32) == np.asarray(x_TD).view(np.int32)
    assert same.tolist() == [[True, True], [False, False], [True, True]]


# Shares within documents


def test_share_is_the_rank_within_the_document_over_its_length():
    segments = jnp.array([1, 1, 1, 1, 2, 2, 0])
    scores = jnp.array([5.0, 7.0, 6.0, 7.0, 1.0, 2.0, 9.0])
    # document 1 ranks 3, 0, 2, 1 of 4 (the tie to the earlier); document 2 ranks 1, 0 of 2; padding alone
    expected = [3.5 / 4, 0.5 / 4, 2.5 / 4, 1.5 / 4, 1.5 / 2, 0.5 / 2, 0.5]
    np.testing.assert_allclose(share(scores, segments), expected, rtol=1e-6)
    with_nan = share(scores.at[1].set(jnp.nan), segments)
    np.testing.assert_allclose(with_nan[:4], [2.5 / 4, 3.5 / 4, 1.5 / 4, 0.5 / 4], rtol=1e-6)


def test_every_document_gets_its_share_of_the_slots():
    rng = np.random.default_rng(1)
    for lengths in ([8, 8, 8, 8], [20, 4, 8], [31, 1], [5, 27]):
        segments = np.repeat(np.arange(1, len(lengths) + 1), lengths)
        idx = select(-share(jnp.array(rng.normal(size=32), jnp.float32), jnp.array(segments)), 8, None)
        counts = np.bincount(segments[np.asarray(idx)], minlength=len(lengths) + 1)[1:]
        assert counts.sum() == 8
        assert np.abs(counts - np.array(lengths) / 4).max() <= 1  # a quarter of each document


def test_a_document_is_ranked_by_its_own_scores_only():
    rng = np.random.default_rng(2)
    segments = jnp.array(np.repeat([1, 2], 16))
    scores = jnp.array(rng.normal(size=32), jnp.float32)
    louder = jnp.where(segments == 1, scores + 10, scores)
    second = slice(16, None)
    per_document = [select(-share(s, segments), 8, None).tolist() for s in (scores, louder)]
    assert per_document[0] == per_document[1]
    per_row = [np.asarray(routing.topk_targets(select(s, 8, None), 32))[second] for s in (scores, louder)]
    assert per_row[0].sum() > 0
    assert per_row[1].sum() == 0  # the coupling that top-k over the packed row has


# On a mesh


def test_the_ranked_axis_is_never_sharded_and_ranking_would_survive_it():
    mesh = jax.make_mesh((8, 1, 1, 1), sharding.AXES, axis_types=(AxisType.Auto,) * 4)
    assert sharding.batch_sharding(mesh).spec == PartitionSpec(("data", "fsdp", "expert"))  # rows only
    scores_BT = jnp.round(jax.random.normal(jax.random.key(0), (8, 16)), 1)  # with ties
    ranked = jax.jit(jax.vmap(routing.select_topk, (0, None)), static_argnums=1)
    expected = ranked(scores_BT, 4)
    for spec in (PartitionSpec(("data", "fsdp")), PartitionSpec(None, "data")):
        placed = jax.device_put(scores_BT, NamedSharding(mesh, spec))
        np.testing.assert_array_equal(ranked(placed, 4), expected)
