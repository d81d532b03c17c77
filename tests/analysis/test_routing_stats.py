"""Hand-worked routing statistics."""

import math

import numpy as np
import pytest

from mod_jax.analysis import routing_stats


def _bits(text):
    return np.array([[[c == "1" for c in text]]])  # one block, one row


def _stats(topk, decided, valid=None, logits=None, weights=None):
    stats = routing_stats.RoutingStats(depths=[3])
    topk_LBT, decided_LBT = _bits(topk), _bits(decided)
    valid_BT = np.ones(topk_LBT.shape[1:], bool) if valid is None else _bits(valid)[0]
    logits_LBT = np.zeros(topk_LBT.shape) if logits is None else np.array([[logits]], np.float32)
    stats.update(logits_LBT, decided_LBT, topk_LBT, valid_BT, weights)
    return stats


def test_agreement_by_hand():
    # Members 1, 4; decided 1, 2, 3: one hit, one miss (4), two false alarms (2, 3), four agreed bypasses.
    found = _stats(topk="01001000", decided="01110000").summary()
    expected = dict(
        accuracy=5 / 8,  # 1 hit + 4 bypasses
        base_rate_accuracy=6 / 8,
        precision=1 / 3,
        recall=1 / 2,
        recall_lift=1 / 5,  # (1/2 - 3/8) / (1 - 3/8)
        f1=2 / 5,  # harmonic mean of 1/3 and 1/2 = 2 * (1/6) / (5/6)
        realised_capacity=3 / 8,
        topk_fraction=2 / 8,
    )
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], [value], err_msg=name)


def test_always_bypass_scores_the_base_rate_and_nothing_else():
    found = _stats(topk="10000000", decided="00000000").summary()
    assert found["accuracy"] == found["base_rate_accuracy"] == 7 / 8
    assert found["recall"] == 0
    assert found["f1"] == 0
    assert found["realised_capacity"] == 0
    assert np.isnan(found["precision"])  # nothing decided: undefined, not 0


def test_padding_counts_nowhere():
    padded = _stats(topk="01001011", decided="01110101", valid="11111000", logits=[0, 2, 0, 0, 4, 9, 9, 9]).summary()
    plain = _stats(topk="01001", decided="01110", logits=[0, 2, 0, 0, 4]).summary()
    for name in ("accuracy", "precision", "recall", "realised_capacity", "topk_fraction", "weight_mean", "weight_std"):
        np.testing.assert_allclose(padded[name], plain[name], err_msg=name)


def test_weights_are_those_of_members():
    # Members 1 and 4 have weights 2 and 4: mean 3, standard deviation 1. The 100 is bypassed.
    found = _stats(topk="01001000", decided="01110000", logits=[0, 2, 100, 0, 4, 0, 0, 0]).summary()
    np.testing.assert_allclose(found["weight_mean"], [3.0])
    np.testing.assert_allclose(found["weight_std"], [1.0])
    gated = _stats("01001000", "0" * 8, logits=[0, 2, 0, 0, 4, 0, 0, 0], weights=np.full((1, 1, 8), 0.5)).summary()
    np.testing.assert_allclose(gated["weight_mean"], [0.5])


def test_position_share_and_entropy():
    # 20 positions: tenths of 2 tokens. Members 0, 1 (first tenth), 5 (third), 19 (last): shares 1/2, 1/4, 1/4.
    topk = "".join("1" if i in (0, 1, 5, 19) else "0" for i in range(20))
    found = _stats(topk, topk).summary()
    np.testing.assert_allclose(found["position_share"], [[0.5, 0, 0.25, 0, 0, 0, 0, 0, 0, 0.25]])
    # Entropy: 1/2 log 2 + 2 * 1/4 log 4 = 1.5 log 2, over log 10.
    np.testing.assert_allclose(found["position_entropy"], [1.5 * math.log(2) / math.log(10)])
    assert _stats("1" * 20, "1" * 20).summary()["position_entropy"] == pytest.approx(1.0)
    assert _stats("1" + "0" * 19, "0" * 20).summary()["position_entropy"] == 0.0


def test_the_share_that_positions_explain():
    # Two rows, two positions: members 1 0 / 1 0, mean 1/2. Between positions 2 * 2 * 1/4 = 1, in all 4 * 1/4: R2 is 1.
    def r2(topk):
        stats = routing_stats.RoutingStats([1])
        topk_LBT = np.array([topk], bool)
        stats.update(np.zeros(topk_LBT.shape), topk_LBT, topk_LBT, np.ones(topk_LBT.shape[1:]))
        return stats.summary()["position_r2"][0]

    assert r2([[1, 0], [1, 0]]) == pytest.approx(1.0)
    # 1 0 / 0 1: between 0 of 1, so R2 is 0; adjusted 1 - 1 * (4 - 1) / (4 - 2).
    assert r2([[1, 0], [0, 1]]) == pytest.approx(-0.5)
    assert np.isnan(r2([[1, 0]]))  # one token per position explains itself
    chance = np.random.default_rng(0).random((500, 16)) < 0.25
    assert r2(chance) == pytest.approx(0.0, abs=0.01)


def test_recall_beyond_chance_by_hand():
    # Half of the tokens decided, all members among them: (1 - 1/2) / (1 - 1/2). Half of the members: (1/2 - 1/2) / ...
    assert _stats("1100", "1100").summary()["recall_lift"] == 1.0
    assert _stats("1100", "1010").summary()["recall_lift"] == 0.0
    assert np.isnan(_stats("1111", "1111").summary()["recall_lift"])  # nothing was chosen


def test_batching_does_not_matter():
    rng = np.random.default_rng(0)
    logits_LBT, topk_LBT = rng.normal(size=(2, 6, 12)), rng.random((2, 6, 12)) < 0.3
    decided_LBT, valid_BT = rng.random((2, 6, 12)) < 0.3, rng.random((6, 12)) < 0.8
    whole, parts = routing_stats.RoutingStats([1, 3]), routing_stats.RoutingStats([1, 3])
    whole.update(logits_LBT, decided_LBT, topk_LBT, valid_BT)
    for rows in (slice(0, 1), slice(1, 6)):
        parts.update(logits_LBT[:, rows], decided_LBT[:, rows], topk_LBT[:, rows], valid_BT[rows])
    for name, value in whole.summary().items():
        np.testing.assert_allclose(parts.summary()[name], value, err_msg=name)


def test_metrics_are_named_by_depth_and_by_the_selection_that_decided():
    stats = _stats(topk="01001000", decided="01110000")
    metrics = stats.metrics("topk") | stats.metrics("predictor")
    assert metrics["routing/block03/recall/predictor"] == 0.5
    assert metrics["routing/block03/realised_capacity/predictor"] == 3 / 8
    assert metrics["routing/block03/topk_fraction"] == 2 / 8
    assert sum(metrics[f"routing/block03/position_share/{i}"] for i in range(10)) == pytest.approx(1.0)
    assert all(isinstance(value, float) for value in metrics.values())


def test_the_error_of_a_capacity_is_the_mean_over_blocks():
    """A block that nobody enters is not made up for by one that twice as many do."""
    metrics = {}
    for block, realised in (("block01", 0.0), ("block03", 0.25)):
        metrics |= {f"routing/{block}/topk_fraction": 0.125, f"routing/{block}/realised_capacity/router": realised}
    assert routing_stats.capacity_error(metrics, "router") == 1.0  # (|0 - 1| + |2 - 1|) / 2
    assert routing_stats.capacity_error(metrics, "predictor") is None


def test_wrong_number_of_blocks_is_refused():
    stats = routing_stats.RoutingStats(depths=[1, 3])
    with pytest.raises(ValueError, match=r"router_logits has shape \(1, 2, 4\), expected \(2, 2, 4\)"):
        stats.update(np.zeros((1, 2, 4)), np.zeros((1, 2, 4)), np.zeros((1, 2, 4)), np.ones((2, 4)))


def test_what_the_token_explains_by_hand():
    # Token 0 scores 1 and 3, token 1 scores 6 and 6: means 2 and 6, left over 1, 1, 0, 0 of (3, 1, 2, 2) about 4.
    scores_M, tokens_M = np.array([1.0, 3.0, 6.0, 6.0]), np.array([7, 7, 9, 9])
    assert routing_stats.explained_by_token(scores_M, tokens_M) == pytest.approx(1 - 2 / 18)
