"""Parameter groups by name, clipping apart, and a learning rate that is a function of the step."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiny import TINY

from mod_jax.config import OptimizerConfig, make_config
from mod_jax.models.model import make_model
from mod_jax.training import optimizer

MATRICES = ("q_DNH", "k_DKH", "v_DKH", "o_NHD", "up_DF", "down_FD")
PREDICTOR = ("predictor", "predictor_bias")


def model_of(config):
    return make_model(config, vocab_size=32)


def path_name(path):
    return "/".join(str(part.key) for part in path)


def paths(groups, *names):
    """Paths, as "units/blocks/0/mlp/up_DF", of the parameters in groups of these names."""
    return {path_name(path) for path, group in jax.tree_util.tree_leaves_with_path(groups) if group in names}


def random_like(tree, seed=0, scale=1.0):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: scale * rng.standard_normal(x.shape, np.float32), tree)


def update(config, model, params, grads):
    """The optimizer's first direction for these gradients, by path."""
    return _update(params, grads, config=config, model=model)


@functools.partial(jax.jit, static_argnames=("config", "model"))
def _update(params, grads, config, model):
    transform = optimizer.make_optimizer(config, model.value.groups)
    updates, _ = transform.update(grads, transform.init(params), params)
    return {path_name(path): u for path, u in jax.tree_util.tree_leaves_with_path(updates)}


def scale_groups(grads, model, names, factor):
    return jax.tree.map(lambda g, group: g * factor if group in names else g, grads, model.value.groups)


class Hashable:
    """A model as a static argument: the same one is compiled once."""

    def __init__(self, value):
        self.value = value


@pytest.fixture(scope="module")
def model():
    """Of the stack F R F R F: two stacked units and a tail."""
    return Hashable(model_of(make_config(**{**TINY, "model.depth": 5})))


@pytest.fixture(scope="module")
def params(model):
    return random_like(model.value.abstract_params)


def test_decayed_parameters_are_listed_by_name(tiny_config):
    expected = {f"units/blocks/0/{part}/{m}" for part, m in parts()}
    expected |= {f"units/blocks/1/block/{part}/{m}" for part, m in parts()}
    expected |= {f"tail/blocks/0/{part}/{m}" for part, m in parts()}
    expected |= {"embedder/table_VD", "embedder/unembed_DV"}
    for scan in (True, False):
        groups = model_of(tiny_config(**{"model.depth": 5, "model.scan": scan})).groups
        assert paths(groups, "matrix") == expected
    tied = model_of(tiny_config(**{"model.depth": 5, "model.tie_embedding": True})).groups
    assert paths(tied, "matrix") == expected - {"embedder/unembed_DV"}


def parts():
    return [("mlp" if matrix in ("up_DF", "down_FD") else "attention", matrix) for matrix in MATRICES]


def test_stacking_changes_no_parameter_s_group(tiny_config):
    """F R F R is stacked; with capacities that never repeat, the same blocks are one long unit of single layers."""

    def rules(capacity):
        model = model_of(tiny_config(**{"routing.capacity": capacity}))
        shapes = jax.tree_util.tree_leaves_with_path(model.abstract_params["units"])
        groups = jax.tree_util.tree_leaves_with_path(model.groups)
        return {path[-1].key: x.ndim for path, x in shapes}, {path_name(path[-2:]): group for path, group in groups}

    assert rules((0.25, 0.25))[1] == rules((0.25, 0.5))[1]
    assert rules(0.25)[0]["scale_D"] == 2  # a stacked norm has two dimensions: "ndim >= 2" would decay it


def test_every_matrix_is_decayed_or_known_not_to_be(model):
    """A matrix added to the model must be put in a group, not fall through."""
    shapes, groups = model.value.abstract_params, model.value.groups
    ranks = {path_name(path): x.ndim for path, x in jax.tree_util.tree_leaves_with_path(shapes)}
    matrices = {name for name, rank in ranks.items() if rank - name.startswith("units/") >= 2}
    routing = {"units/blocks/1/predictor/up_DP"}
    assert matrices == paths(groups, "matrix") | routing


def test_decay_reaches_exactly_these(model, params):
    zeros = jax.tree.map(np.zeros_like, params)
    moved = {name for name, u in update(OptimizerConfig(weight_decay=0.1), model, params, zeros).items() if u.any()}
    assert moved == paths(model.value.groups, "matrix")
    moved = update(OptimizerConfig(weight_decay=0.0, router_weight_decay=0.5), model, params, zeros)
    routing = {f"units/blocks/1/{name}" for name in ("router/weight_D", "predictor/up_DP", "predictor/down_P")}
    assert {name for name, u in moved.items() if u.any()} == routing
    weight_D = params["units"]["blocks"][1]["router"]["weight_D"]
    np.testing.assert_allclose(moved["units/blocks/1/router/weight_D"], 0.5 * weight_D, rtol=1e-6)


def test_router_learning_rate_scale_scales_router_and_predictor_alone(model, params):
    grads = random_like(params, seed=1)
    plain, scaled = (
        update(OptimizerConfig(router_learning_rate_scale=s, router_weight_decay=0.1), model, params, grads)
        for s in (1.0, 0.25)
    )
    routing = paths(model.value.groups, "router", *PREDICTOR)
    assert {name.split("/")[-1] for name in routing} == {"weight_D", "up_DP", "up_bias_P", "down_P", "down_bias_1"}
    for name in plain:
        np.testing.assert_allclose(scaled[name], plain[name] * (0.25 if name in routing else 1.0), rtol=1e-6)


def test_a_predictor_gradient_of_any_size_leaves_all_else_bit_identical(model, params):
    config, grads = OptimizerConfig(), random_like(params, seed=1, scale=0.1)
    predictor = paths(model.value.groups, *PREDICTOR)
    assert predictor

    plain = update(config, model, params, grads)
    for factor in (0.0, 1e-6, 1e6):
        changed = update(config, model, params, scale_groups(grads, model, PREDICTOR, factor))
        assert all((changed[name] == plain[name]).all() for name in plain.keys() - predictor)
    # The other way round too; and the comparison can fail: the router shares the trunk's clip.
    changed = update(config, model, params, scale_groups(grads, model, ("matrix", "vector"), 1e6))
    assert all((changed[name] == plain[name]).all() for name in predictor)
    changed = update(config, model, params, scale_groups(grads, model, ("router",), 1e6))
    assert any((changed[name] != plain[name]).any() for name in plain.keys() - predictor)


def test_what_is_not_trained_is_not_moved_and_has_no_moments(model, params):
    config = OptimizerConfig(train="routing")
    grads = random_like(params, seed=1)
    alone, together = update(config, model, params, grads), update(OptimizerConfig(), model, params, grads)
    routing = paths(model.value.groups, "router", *PREDICTOR)
    assert all(not alone[name].any() for name in alone.keys() - routing)
    assert all(alone[name].any() for name in routing)
    predictor = paths(model.value.groups, *PREDICTOR)  # whose gradient is clipped apart, so that it gets what it did
    assert all((alone[name] == together[name]).all() for name in predictor)
    state = jax.eval_shape(optimizer.make_optimizer(config, model.value.groups).init, params)
    moments = [leaf.shape for leaf in jax.tree.leaves(optax.tree.get(state, "mu"))]
    shapes = {path_name(path): leaf.shape for path, leaf in jax.tree_util.tree_leaves_with_path(params)}
    assert sorted(moments) == sorted(shapes[name] for name in routing)

    trained, frozen = optimizer.split(params, config, model.value.groups)
    assert {path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(trained)} == routing
    assert {path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(frozen)} == shapes.keys() - routing


def test_clipping_by_hand():
    # Trunk and router (3, 4) have norm 5, clipped to 1: (0.6, 0.8). The predictor's 0.5 is below 1 and stays. The first
    # moment is (1 - b1) times that.
    grads = {"weight_D": 3.0, "up_DF": 4.0, "down_P": 0.5}
    grads = jax.tree.map(lambda g: jnp.array([g]), grads)
    groups = {"weight_D": "router", "up_DF": "matrix", "down_P": "predictor"}
    transform = optimizer.make_optimizer(OptimizerConfig(clip_norm=1.0, b1=0.9), groups)
    _, state = transform.update(grads, transform.init(grads), grads)
    mu = optax.tree.get(state, "mu")
    np.testing.assert_allclose([float(mu[name][0]) for name in groups], [0.06, 0.08, 0.05], rtol=1e-6)


def test_schedule_by_hand():
    # 11 steps, warm-up 2: 1/3, 2/3, then a cosine from 1 at step 2 to 0.1 at step 10; halfway, at step 6, 0.55.
    schedule = optimizer.make_schedule(
        OptimizerConfig(learning_rate=2.0, warmup_fraction=0.2, final_fraction=0.1), num_steps=11
    )
    rates = np.array([schedule(step) for step in range(14)]) / 2.0
    np.testing.assert_allclose(rates[[0, 1, 2, 6, 10]], [1 / 3, 2 / 3, 1.0, 0.55, 0.1], rtol=1e-6)
    assert rates[10] * 2.0 == np.float32(2.0) * np.float32(0.1)  # exactly
    assert (rates[11:] == rates[10]).all()
    assert (np.diff(rates[2:11]) < 0).all()


@pytest.mark.parametrize("num_steps", [1, 2, 3, 20, 1000])
@pytest.mark.parametrize("warmup", [0.0, 0.05, 1.0])
def test_no_step_is_wasted_and_no_rate_negative(num_steps, warmup):
    config = OptimizerConfig(learning_rate=1e-3, warmup_fraction=warmup, final_fraction=0.0)
    rates = np.asarray(jax.vmap(optimizer.make_schedule(config, num_steps))(jnp.arange(2 * num_steps)))
    assert (rates[: max(1, num_steps - 1)] > 0).all()
    assert (rates >= 0).all()
    assert (rates <= np.float32(1e-3)).all()
    if num_steps > 1 and warmup < 1:
        assert rates[num_steps - 1] == 0.0


def test_the_rate_is_a_function_of_the_step_alone():
    schedule = optimizer.make_schedule(OptimizerConfig(), 100)
    traced = jax.jit(schedule)
    steps = [7, 0, 99, 7, 42]
    np.testing.assert_allclose([traced(s) for s in steps], [schedule(s) for s in steps], rtol=1e-6)
    assert traced(7) == traced(jnp.int32(7))
    assert math.isfinite(schedule(2**31 - 1))
