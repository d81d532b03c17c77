"""Serving-time budgets: shifted cut-offs select the share that was asked for, in every block."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from mod_jax.errors import ConfigError, RequestError
from mod_jax.evaluation.budget import calibrate, cutoff_between
from mod_jax.sampling import Sampler


def batches_of(tools, num_rows=8, length=32):
    tokens_BT = tools.random_tokens(num_rows, length)
    segments_BT = np.ones_like(tokens_BT)
    segments_BT[-1] = 0  # a row of padding, which must not count
    positions_BT = np.broadcast_to(np.arange(length, dtype=np.int32), tokens_BT.shape)
    return [dict(tokens_BT=tokens_BT, positions_BT=positions_BT, segment_ids_BT=segments_BT)]


def test_cutoff_between_by_hand():
    scores = np.array([1.0, 2.0, 3.0, 4.0], np.float32)
    assert cutoff_between(scores, 0.25) == 3.5
    assert cutoff_between(scores, 0.5) == 2.5
    assert (scores > cutoff_between(scores, 1.0)).all()
    assert not (scores > cutoff_between(scores, 0.01)).any()
    adjacent = np.array([1.0, np.nextafter(np.float32(1), np.float32(2))], np.float32)
    assert (adjacent > cutoff_between(adjacent, 0.5)).tolist() == [False, True]


@pytest.mark.parametrize("capacity", [0.1, (0.5, 0.2), 1.0])
def test_every_block_selects_the_share_asked_for(build, tools, capacity):
    model, batches = build(), batches_of(tools)
    shifted = calibrate(model, capacity, batches)
    wanted = np.broadcast_to(capacity, 2)
    np.testing.assert_allclose(shifted.capacity_L, wanted, atol=0.5 / (7 * 32))
    model = dataclasses.replace(model, cutoffs_L=jnp.asarray(shifted.cutoffs_L))
    _, selected_LBT = tools.uncached(model, "threshold", batches[0]["tokens_BT"])
    np.testing.assert_allclose(selected_LBT[:, :7].mean(axis=(1, 2)), wanted, atol=0.5 / (7 * 32))


def test_a_budget_changes_what_sampling_spends(build, tools):
    model, batches = build(), batches_of(tools)
    spent = []
    for capacity in (0.1, 0.9):
        shifted = calibrate(model, capacity, batches)
        sampler = Sampler(model, "threshold", cutoffs_L=shifted.cutoffs_L, capacity_L=(1.0, 1.0))
        spent.append(np.mean([c.routed_fraction for c in sampler.generate(["a", "b", "c"], seed=4)]))
    assert spent[0] < 0.35 < 0.65 < spent[1]


def test_a_budget_so_small_that_it_selects_nobody_samples(build, tools):
    model = build()
    shifted = calibrate(model, 1e-6, batches_of(tools))
    assert shifted.capacity_L == (0.0, 0.0)
    sampler = Sampler(model, "threshold", cutoffs_L=shifted.cutoffs_L, capacity_L=shifted.capacity_L)
    assert len(sampler.generate("a", max_new_tokens=2, temperature=0)[0].tokens) == 2


def test_what_cannot_be_budgeted_is_refused(build, tools):
    batches = batches_of(tools)
    for bad in (0.0, 1.5, -1.0, float("nan"), (0.5,), "0.5", None, ("a", 0.5)):
        with pytest.raises(RequestError, match="capacity"):
            calibrate(build(), bad, batches)
    with pytest.raises(ConfigError, match="no cut-offs"):
        calibrate(build(**{"model.layout": "F", "routing.aux_weight": 0.0}), 0.5, batches)
    with pytest.raises(ConfigError, match="no cut-offs"):  # those of experts that choose are of another kind
        calibrate(build(**{"model.layout": "E", "routing.aux_weight": 0.0, "experts.choice": "expert"}), 0.5, batches)
