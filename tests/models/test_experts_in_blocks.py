"""Experts inside the whole program: every way of computing a step gives one step, and sampling runs what was trained.

The variants are those of configs/mode.py: staged (routed blocks with experts), integrated (no-op experts), experts that
choose their tokens; and, in the slow tests, experts alone, and with slots for half of the tokens.
"""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from mod_jax import sharding
from mod_jax.data.batches import MODEL_INPUTS
from mod_jax.errors import ConfigError
from mod_jax.evaluation.budget import check_capacity
from mod_jax.models.model import make_model
from mod_jax.sampling import Sampler
from mod_jax.training import prepare
from mod_jax.training.language import Language
from mod_jax.training.step import init_state, make_train_step

VARIANTS = {
    "staged": {"model.layout": "Ee", "experts.count": 4},
    "integrated": {"model.layout": "E", "experts.count": 4, "experts.noop": 4, "experts.capacity": 0.625},
    "chosen": {"model.layout": "Ee", "experts.count": 4, "experts.choice": "expert", "experts.capacity": 0.5},
}
SMALL = {
    "train.batch_size": 16,
    "data.seq_len": 32,
    "optimizer.eps": 1e-3,  # so that a rounding error in a small gradient stays one in the update
    "seed": 1,  # seed 0 has, at step 2, two scores that tie at the cut but for rounding
}
OTHERS = {
    "moe": {"model.layout": "E", "experts.count": 4, "experts.chosen": 2},
    "reduced": {"model.layout": "E", "experts.count": 4, "experts.capacity": 0.5},
    "paced": {"model.layout": "Ee", "experts.count": 4, "experts.capacity": 0.5, "experts.overflow": "paced"},
}
VARIANTS = {name: changes | SMALL for name, changes in VARIANTS.items()}
OTHERS = {name: changes | SMALL for name, changes in OTHERS.items()}
VOCABULARY = 32


@pytest.fixture(params=VARIANTS)
def variant(request):
    return VARIANTS[request.param]


def make_batch(config):
    rng = np.random.default_rng(0)
    shape = config.train.batch_size, config.data.seq_len
    tokens_BT = rng.integers(1, VOCABULARY, shape).astype(np.int32)
    segments_BT = np.ones(shape, np.int32)
    segments_BT[:, 20:] = 2
    segments_BT[-1, 28:] = 0
    positions_BT = np.where(segments_BT == 2, np.arange(shape[1]) - 20, np.arange(shape[1])).astype(np.int32)
    return dict(zip(MODEL_INPUTS, (tokens_BT, np.roll(tokens_BT, -1, 1), positions_BT, segments_BT), strict=True))


@functools.cache
def two_steps(config):
    """(parameters, cut-offs, metrics) after two steps on one batch, on the config's mesh."""
    model, mesh = make_model(config, VOCABULARY), sharding.make_mesh(config)
    batch = make_batch(config)
    with jax.set_mesh(mesh):
        placed = jax.tree.map(lambda leaf: leaf.sharding, prepare.abstract_state(config, model, mesh))
        state = jax.jit(lambda: init_state(config, model), out_shardings=placed)()
        step = jax.jit(make_train_step(Language(config, model), 4))
        for _ in range(2):
            state, metrics = step(state, sharding.put_batch(mesh, batch, config.train.batch_size))
    return jax.device_get((state.params, state.cutoffs_L, state.expert_cutoffs_LE, metrics))


def assert_close(got, expected, rtol=1e-3, atol=1e-4):
    paths = jax.tree_util.tree_leaves_with_path(expected)
    for (path, a), b in zip(paths, jax.tree.leaves(got), strict=True):
        np.testing.assert_allclose(b, a, rtol=rtol, atol=atol, err_msg=jax.tree_util.keystr(path))


ONE_DEVICE = {"mesh.data": 1}


@pytest.mark.parametrize(
    "changes",
    [
        {"train.accumulation": 4},
        pytest.param({"model.remat": "full"}, marks=pytest.mark.slow),
        pytest.param({"model.scan": False}, marks=pytest.mark.slow),
        {"mesh.data": 4, "mesh.expert": 2},
        pytest.param({"mesh.data": 2, "mesh.expert": 4}, marks=pytest.mark.slow),
        pytest.param({"mesh.data": 1, "mesh.fsdp": 2, "mesh.expert": 2, "mesh.tensor": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_every_way_of_computing_a_step_gives_the_same_step(tiny_config, variant, changes):
    one_way = two_steps(tiny_config(**{**variant, **ONE_DEVICE}))
    other_way = two_steps(tiny_config(**{**variant, **ONE_DEVICE, **changes}))
    assert_close(other_way, one_way)


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_all_ways_at_once_give_the_same_step(tiny_config, name):
    one_way = two_steps(tiny_config(**{**OTHERS[name], **ONE_DEVICE}))
    ways = {"train.accumulation": 4, "model.remat": "full", "model.scan": False, "mesh.data": 2, "mesh.expert": 2}
    assert_close(two_steps(tiny_config(**{**OTHERS[name], **ways})), one_way)


def test_all_metrics_of_experts_are_reported(tiny_config, variant):
    *_, metrics = two_steps(tiny_config(**{**variant, **ONE_DEVICE}))
    num_blocks = 4  # every block of both layouts has experts
    for name in ("dropped", "computed"):
        assert metrics[f"experts/{name}"].shape == (num_blocks,)
    load_LN = metrics["experts/load"]
    assert load_LN.shape == (num_blocks, variant["experts.count"] + variant.get("experts.noop", 0))
    np.testing.assert_allclose(load_LN.mean(axis=1), 1.0, rtol=1e-5)
    if variant.get("experts.choice") != "expert":  # whose load is even by construction
        assert metrics["train/balance_loss"] >= 1 - 1e-6
    assert metrics["train/expert_z_loss"] > 0


@pytest.mark.parametrize("name", [*VARIANTS, pytest.param("moe", marks=pytest.mark.slow)])
def test_sampling_is_the_uncached_causal_model_whatever_the_batch_holds(build, tools, name):
    """Ragged rows, each at its own position: logits and decisions of every token equal those of the decoder itself."""
    changes = {**(VARIANTS | OTHERS)[name], "model.depth": 2, "train.batch_size": 8}
    if changes["model.layout"] == "E":
        changes["routing.aux_weight"] = 0.0  # there is no routed block
    model = build(**changes)
    tokens_BT = tools.random_tokens(5, 24)
    for selection in model.config.causal_selections:
        logits_BTV, selected_LBT, _ = tools.replay(model, selection, tokens_BT, [1, 7, 24, 12, 20], rows=2)
        expected_BTV, expected_LBT = tools.uncached(model, selection, tokens_BT)
        assert (selected_LBT == expected_LBT).all()
        np.testing.assert_allclose(logits_BTV, expected_BTV, rtol=1e-4, atol=1e-4)


def test_old_states_have_no_leaf_for_experts(tiny_config):
    """So that checkpoints written before there were experts restore."""
    config = tiny_config()
    state = jax.eval_shape(lambda: init_state(config, make_model(config, VOCABULARY)))
    assert state.expert_cutoffs_LE is None
    assert not any("expert" in jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(state))


@pytest.mark.parametrize(
    ("selection", "message"),
    [
        ("predictor", r"selection = 'predictor': this model has no routed blocks; this run has all"),
        ("threshold", r"selection = 'threshold': this model has no routed blocks; this run has all"),
        ("topk", r"selection = 'topk': this model has no routed blocks; this run has all"),
    ],
)
def test_selections_that_experts_do_not_have_are_refused(build, selection, message):
    model = build(**VARIANTS["integrated"] | {"model.depth": 1, "train.batch_size": 8, "routing.aux_weight": 0.0})
    with pytest.raises(ConfigError, match=message):
        Sampler(model, selection)


def test_experts_that_choose_sample_by_cutoffs_or_not_at_all(build):
    model = build(**VARIANTS["chosen"] | {"model.depth": 2, "train.batch_size": 8})
    with pytest.raises(ConfigError, match=r"experts.choice = 'expert': sampling needs expert_cutoffs_LE"):
        Sampler(dataclasses.replace(model, expert_cutoffs_LE=None))
    with pytest.raises(ConfigError, match=r"capacity = 0.5: this model has no cut-offs to shift"):
        check_capacity(build(**VARIANTS["integrated"] | {"model.depth": 1, "routing.aux_weight": 0.0}), 0.5)
