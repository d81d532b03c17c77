"""The step by equality of two paths: accumulation, remat, scan, predictor on or off; and by what it must not change."""

import functools
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from output_losses import sums_of

from mod_jax.config import make_config
from mod_jax.data.batches import MODEL_INPUTS
from mod_jax.models.blocks import Choice
from mod_jax.models.model import make_model
from mod_jax.training.language import Language
from mod_jax.training.optimizer import make_schedule
from mod_jax.training.step import init_state, make_train_step, routing_keys

VOCAB, B, T, NUM_STEPS = 32, 8, 16, 20
RARE = VOCAB - 1  # a token that only row 0 holds
# A batch with this much of each row real: uneven between rows, and between micro-batches however they are cut.
LENGTHS = np.array([16, 5, 16, 9, 3, 0, 16, 1])
BASE = {
    "model.width": 16,
    "model.depth": 2,
    "model.layout": "R",  # the cheapest stack with two scanned units
    "model.num_heads": 2,
    "data.seq_len": T,
    "routing.capacity": 0.25,
    "routing.aux_weight": 0.1,
    "optimizer.eps": 1e-3,  # so that a rounding error in a small gradient stays one in the update
    "train.batch_size": B,
    "train.steps": NUM_STEPS,
}
STOCHASTIC = {"routing.score": "stochastic", "routing.predictor": False, "routing.aux_weight": 0.0}
FROZEN = {"routing.score": "frozen", "routing.aux_weight": 0.0}


def config_of(changes):
    return make_config(**{**BASE, **changes})


def make_batch(seed=0, lengths=LENGTHS):
    rng = np.random.default_rng(seed)
    tokens_BT, targets_BT = rng.integers(0, RARE, (2, B, T), np.int32)
    tokens_BT[0, 3] = RARE
    real_BT = np.arange(T) < lengths[:, None]
    second_BT = (np.arange(T) >= 6) & (np.arange(B) % 3 == 0)[:, None]  # two documents in some rows
    return dict(
        tokens_BT=tokens_BT,
        targets_BT=targets_BT,
        positions_BT=np.broadcast_to(np.arange(T, dtype=np.int32), (B, T)) - 6 * second_BT.astype(np.int32),
        segment_ids_BT=np.where(real_BT, 1 + second_BT, 0).astype(np.int32),
    )


@functools.cache
def program(**changes):
    """(model, jitted step) of the base config with changes; each is compiled once for all tests."""
    config = config_of(changes)
    model = make_model(config, VOCAB)
    return model, jax.jit(make_train_step(Language(config, model), NUM_STEPS))


@functools.cache
def initial_state(**changes):
    config = config_of(changes)
    return jax.jit(lambda: init_state(config, make_model(config, VOCAB)))()


def train_step(state, batch=None, **changes):
    return program(**changes)[1](state, make_batch() if batch is None else batch)


def by_path(tree):
    return {jax.tree_util.keystr(path): np.asarray(x) for path, x in jax.tree_util.tree_leaves_with_path(tree)}


def assert_close(actual, expected, rtol=2e-5, atol=2e-7):
    actual, expected = by_path(actual), by_path(expected)
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(
            actual[name], value, rtol=rtol, atol=atol * max(1, np.abs(value).max(initial=0)), err_msg=name
        )


def assert_same_bits(actual, expected):
    actual, expected = by_path(actual), by_path(expected)
    assert actual.keys() == expected.keys()
    differing = [name for name, value in expected.items() if actual[name].tobytes() != value.tobytes()]
    assert not differing


def replace_param(state, name, change):
    """The state with `change` applied to every parameter whose last name is `name`."""
    params = jax.tree_util.tree_map_with_path(
        lambda path, x: change(x) if getattr(path[-1], "key", None) == name else x, state.params
    )
    assert any((a != b).any() for a, b in zip(by_path(params).values(), by_path(state.params).values(), strict=True))
    return state._replace(params=params)


@pytest.mark.parametrize("accumulation", [2, 4])
@pytest.mark.parametrize("score", ["learned", "stochastic"])
def test_accumulation_changes_nothing(score, accumulation):
    """Gradients (in the first moment), parameters, cut-offs and every metric, under unequal padding."""
    changes = STOCHASTIC if score == "stochastic" else {}
    state = initial_state(**changes)
    expected = train_step(state, **changes)
    assert_close(train_step(state, **changes, **{"train.accumulation": accumulation}), expected)
    if score == "learned":
        assert expected[1]["train/aux_loss"] > 0.1
        assert expected[1]["train/predictor_loss"] > 0.1


def test_the_batch_would_show_a_mean_of_means():
    """The guard of the test above: here the mean of the micro-batches' means is another number."""
    model, _ = program()
    batch = make_batch()
    assert {tuple(LENGTHS.reshape(-1, a).sum(axis=0)) for a in (2, 4)} == {(51, 15), (19, 5, 32, 10)}
    output = jax.jit(model.run)(initial_state().params, *(batch[n] for n in MODEL_INPUTS if n != "targets_BT"))
    nats_B = np.array(
        [
            sums_of(jax.tree.map(lambda x: x[None], row), target[None], segments[None]).cross_entropy
            for row, target, segments in zip(
                [type(output)(logits, None) for logits in output.logits_BTV],
                batch["targets_BT"],
                batch["segment_ids_BT"],
                strict=True,
            )
        ]
    )
    weighted = nats_B.sum() / LENGTHS.sum()
    mean_of_means = np.mean(nats_B.reshape(-1, 4).sum(axis=0) / LENGTHS.reshape(-1, 4).sum(axis=0))
    np.testing.assert_allclose(train_step(initial_state())[1]["train/loss"], weighted, rtol=1e-5)
    assert abs(mean_of_means - weighted) > 5e-4


@pytest.mark.parametrize("change", [{"model.remat": "full"}, {"model.remat": "dots"}, {"model.scan": False}])
def test_remat_and_scan_change_nothing(change):
    assert_close(train_step(initial_state(), **change), train_step(initial_state()))


def without_predictor(tree):
    if isinstance(tree, dict):
        return {name: without_predictor(child) for name, child in tree.items() if name != "predictor"}
    return tree


def test_the_predictor_s_values_leave_all_else_bit_identical():
    """The same program, with predictors whose gradient is of another size: everything else moves by the same bits."""
    state = initial_state()
    expected, metrics = train_step(state)
    for factor in (0.0, 1e4):
        other, other_metrics = train_step(replace_param(state, "down_P", lambda x, f=factor: x * f + f))
        assert other_metrics["train/predictor_loss"] != metrics["train/predictor_loss"]
        assert_same_bits(without_predictor(other.params), without_predictor(expected.params))
        assert_same_bits(other.cutoffs_L, expected.cutoffs_L)
    # The comparison can fail: the router's score multiplies the update, so the router does reach the trunk.
    other, _ = train_step(replace_param(state, "weight_D", lambda x: 2 * x))
    with pytest.raises(AssertionError):
        assert_same_bits(without_predictor(other.params), without_predictor(expected.params))


def test_training_without_a_predictor_is_the_same_training():
    off = {"routing.predictor": False}
    state = initial_state()
    bare = initial_state(**off)._replace(params=without_predictor(state.params))
    for step in range(2):
        state, metrics = train_step(state, make_batch(step))
        bare, bare_metrics = train_step(bare, make_batch(step), **off)
        assert_close(bare.params, without_predictor(state.params))
        assert_close(bare_metrics["train/loss"], metrics["train/loss"])


def assert_skipped(new, metrics, old, bad_steps):
    assert_same_bits((new.params, new.opt_state, new.cutoffs_L), (old.params, old.opt_state, old.cutoffs_L))
    assert int(new.step) == int(old.step) + 1
    assert int(new.bad_steps) == int(metrics["train/bad_steps"]) == bad_steps
    assert metrics["train/finite"] == 0.0


@pytest.mark.parametrize("poison", [3e38, -3e38])  # finite as a parameter; embedding makes it infinite
@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_non_finite_step_changes_nothing_and_is_counted(poison, accumulation):
    """Token 31 has a poisoned embedding and stands in one row: one micro-batch is enough to skip the step."""
    changes = {"train.accumulation": accumulation}
    state, _ = train_step(initial_state(), **changes)  # moments that a skipped update could spoil
    poisoned = replace_param(state, "table_VD", lambda x: x.at[RARE, 0].set(poison))
    clean = make_batch()
    clean["tokens_BT"][0, 3] = 0

    first, metrics = train_step(poisoned, **changes)
    assert not np.isfinite(metrics["train/loss"])
    assert_skipped(first, metrics, poisoned, bad_steps=1)
    second, metrics = train_step(first, **changes)
    assert_skipped(second, metrics, first, bad_steps=2)

    # The next good step is what it would have been, at the rate of its own step number.
    good, metrics = train_step(second, clean, **changes)
    assert metrics["train/finite"] == 1.0
    assert int(good.bad_steps) == 0
    untroubled, _ = train_step(poisoned._replace(step=second.step), clean, **changes)
    assert_same_bits(good, untroubled)
    assert (good.params["final_norm"]["scale_D"] != second.params["final_norm"]["scale_D"]).any()


def test_non_finite_scores_alone_skip_the_step():
    """A frozen router's gate is 1, so that its NaN scores leave the loss finite; but they chose the tokens."""
    state = initial_state(**FROZEN)
    poisoned = replace_param(state, "weight_D", lambda x: x * math.nan)
    new, metrics = train_step(poisoned, **FROZEN)
    assert np.isfinite(metrics["train/loss"])
    assert_skipped(new, metrics, poisoned, bad_steps=1)


def test_a_frozen_router_never_changes():
    state = initial_state(**FROZEN)
    new = state
    for step in range(3):
        new, _ = train_step(new, make_batch(step), **FROZEN)
    old_params, params = by_path(state.params), by_path(new.params)
    unchanged = {name for name in params if (params[name] == old_params[name]).all()}
    assert unchanged == {name for name in params if "router" in name}
    assert len(unchanged) == 1


def test_stochastic_routing_is_fresh_per_row_block_and_step_and_reproducible():
    config = config_of(STOCHASTIC)
    model, _ = program(**STOCHASTIC)
    params, batch = initial_state(**STOCHASTIC).params, make_batch()

    @jax.jit
    def scores(step):
        keys_B = routing_keys(config, step, B)
        return model.run(params, batch["tokens_BT"], choice=Choice("topk", keys_B=keys_B)).routing.router_logits_BT

    noise = np.stack([scores(step) for step in range(4)])  # [step, L, B, T]
    flat = noise.reshape(-1, T)
    assert len(np.unique(flat[:, 0])) == len(flat) == 4 * 2 * B
    assert abs(flat.mean()) < 0.1
    assert abs(flat.std() - 1) < 0.1
    correlation = np.corrcoef(flat) - np.eye(len(flat))
    assert np.abs(correlation).max() < 0.95
    np.testing.assert_array_equal(noise[2], scores(2))
    # A row's noise depends on its place in the batch, not on how many rows there are.
    key_data = [jax.random.key_data(routing_keys(config, 3, rows)) for rows in (4, B)]
    np.testing.assert_array_equal(key_data[0], key_data[1][:4])
    assert routing_keys(config_of({}), 3, B) is None


def test_cutoffs_are_a_moving_average_by_hand():
    """The first value is exact; then 1/11 old + 10/11 new, 2/12 old + 10/12 new: decay = step / (step + 10)."""
    model, _ = program()
    forward = jax.jit(model.run)
    state, expected_L = initial_state(), np.zeros(2)
    for step in range(3):
        batch = make_batch(step)
        output = forward(state.params, *(batch[n] for n in MODEL_INPUTS if n != "targets_BT"))
        selected_LBT = np.asarray(output.routing.selected_BT)
        smallest_LB = np.where(selected_LBT, output.routing.router_logits_BT, np.inf).min(axis=-1)
        new_L = smallest_LB[:, LENGTHS > 0].mean(axis=1)  # the row of nothing but padding has no cut-off
        expected_L = (step * expected_L + 10 * new_L) / (step + 10)
        state, _ = train_step(state, batch)
        np.testing.assert_allclose(state.cutoffs_L, expected_L, rtol=1e-5)


def test_after_a_bad_first_step_the_cutoffs_still_start_at_their_first_value():
    state = initial_state()
    skipped, metrics = train_step(replace_param(state, "table_VD", lambda x: x.at[RARE].set(math.nan)))
    assert metrics["train/finite"] == 0.0
    first, _ = train_step(skipped._replace(params=state.params), make_batch(1))
    assert_same_bits(first.cutoffs_L, train_step(state, make_batch(1))[0].cutoffs_L)


def test_metrics_by_hand():
    full = make_batch(lengths=np.full(B, T))
    state = initial_state()
    _, metrics = train_step(state, full)
    np.testing.assert_allclose(metrics["routing/topk_fraction"], [0.25, 0.25])
    # The predictor starts at the base rate: -(1/4 ln 1/4 + 3/4 ln 3/4) = 0.5623 nats; the router near ln 2.
    assert metrics["train/predictor_loss"] == pytest.approx(0.5623, abs=0.02)
    assert metrics["train/aux_loss"] == pytest.approx(math.log(2), abs=0.1)
    loss = metrics["train/loss"] + 2 * (0.1 * metrics["train/aux_loss"] + metrics["train/predictor_loss"])
    assert metrics["train/objective"] == pytest.approx(float(loss), rel=1e-5)
    assert metrics["train/loss"] == pytest.approx(math.log(VOCAB), abs=1.5)
    selected = np.asarray(LENGTHS.clip(max=4).sum() / LENGTHS.sum())  # C = 4, or all that a row has
    np.testing.assert_allclose(train_step(state)[1]["routing/topk_fraction"], [selected] * 2, rtol=1e-6)


def test_the_rate_of_each_step_is_the_schedule_s():
    schedule, state = make_schedule(config_of({}).optimizer, NUM_STEPS), initial_state()
    for step in (0, 1, 19, 7):
        _, metrics = train_step(state._replace(step=jnp.int32(step)))
        np.testing.assert_allclose(metrics["train/learning_rate"], schedule(step), rtol=1e-6)


COMPILATIONS = []
jax.monitoring.register_event_duration_secs_listener(
    lambda event, seconds, **kwargs: COMPILATIONS.append(event) if "backend_compile" in event else None
)


def test_the_step_compiles_exactly_once_and_donates_its_state():
    config = config_of({})
    model = make_model(config, VOCAB)
    chex.clear_trace_counter()
    step = jax.jit(chex.assert_max_traces(make_train_step(Language(config, model), NUM_STEPS), n=1), donate_argnums=0)
    state = jax.jit(lambda: init_state(config, model))()
    old, compilations = state, []
    for i in range(4):
        batch = jax.device_put(make_batch(i))
        COMPILATIONS.clear()
        state, _ = step(state, batch)
        compilations.append(len(COMPILATIONS))
    assert compilations == [1, 0, 0, 0]
    assert step._cache_size() == 1
    kept = {name for name, leaf in zip(by_path(state), jax.tree.leaves(old), strict=True) if not leaf.is_deleted()}
    assert not kept
    # The counters can count: a batch of another length compiles again.
    with pytest.raises(AssertionError, match="traced"):
        step(state, {name: x[:, :8] for name, x in batch.items()})


def test_the_optimizer_state_follows_the_parameters():
    state = initial_state()
    moments = optax.tree.get(state.opt_state, "mu")
    assert jax.tree.map(jnp.shape, moments) == jax.tree.map(jnp.shape, state.params)
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(state.params))
