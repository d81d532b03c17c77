"""Losses by hand: cross-entropy, its log-normaliser, membership; padding counts nowhere."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from output_losses import sums_of

from mod_jax.models.blocks import RoutingRecord
from mod_jax.models.decoder import ModelOutput
from mod_jax.models.model import make_model
from mod_jax.training.losses import (
    Distilled,
    LossSums,
    distillation_sums,
    membership_cross_entropy,
    next_token_sums,
    objective,
    token_cross_entropy,
)

VOCAB = 32


def make_record(router_logits_LBT, selected_LBT, predictor_logits_LBT=None):
    nothing = jnp.zeros(())
    return RoutingRecord(router_logits_LBT, predictor_logits_LBT, selected_LBT, nothing, nothing, nothing, nothing)


def test_cross_entropy_by_hand():
    # exp(0) + exp(ln 3) = 4, so the log-normaliser is ln 4; token 0 costs ln 4 - 0, token 1 costs ln 4 - ln 3.
    logits_BTV = jnp.array([[[0.0, math.log(3)], [0.0, math.log(3)]]])
    nats_BT, log_normaliser_BT = token_cross_entropy(logits_BTV, jnp.array([[0, 1]]))
    np.testing.assert_allclose(nats_BT, [[math.log(4), math.log(4 / 3)]], rtol=1e-6)
    np.testing.assert_allclose(log_normaliser_BT, [[math.log(4)] * 2], rtol=1e-6)


def test_membership_cross_entropy_by_hand():
    # p = sigmoid(ln 3) = 3/4: a member costs -ln 3/4, a stranger -ln 1/4. Far out it is linear and never overflows.
    logits = jnp.array([0.0, 0.0, math.log(3), math.log(3), 1000.0, 1000.0, -1000.0])
    is_member = jnp.array([True, False, True, False, True, False, True])
    expected = [math.log(2), math.log(2), math.log(4 / 3), math.log(4), 0.0, 1000.0, 1000.0]
    np.testing.assert_allclose(membership_cross_entropy(logits, is_member), expected, rtol=1e-6)


def test_sums_by_hand_and_padding_counts_nowhere():
    # One real token (the first): cross-entropy ln 4, z (ln 4)^2. Two routed blocks: the router says 0 for a member and
    # ln 3 for a stranger, ln 2 + ln 4; the predictor says ln 3 for the member and 0 for the stranger, ln 4/3 + ln 2.
    log3, pad = math.log(3), 50.0
    logits_BTV = jnp.array([[[0.0, log3], [pad, -pad]]])
    record = make_record(
        jnp.array([[[0.0, pad]], [[log3, pad]]]),
        jnp.array([[[True, False]], [[False, False]]]),
        jnp.array([[[log3, pad]], [[0.0, pad]]]),
    )
    sums = sums_of(ModelOutput(logits_BTV, record), jnp.array([[0, 1]]), jnp.array([[1, 0]]), z_loss=0.5)
    log2, log4 = math.log(2), math.log(4)
    expected = [log4 + 0.5 * log4**2, log4, log2 + log4, math.log(4 / 3) + log2]
    np.testing.assert_allclose(jnp.array(sums), [*expected, 0, 0, 0], rtol=1e-6)
    counted = sums_of(ModelOutput(logits_BTV, record), jnp.array([[0, 1]]), jnp.array([[1, 1]]), z_loss=0.5)
    assert all(c > s + 1 for c, s in zip(counted[:4], sums[:4], strict=True))  # the padding here would have been seen


def test_objective_by_hand(tiny_config):
    # (2 + 0.1 * 5 + 2 * 7 + 0.5 * 11 + 0.25 * 13) / 4 = 25.25 / 4
    config = tiny_config(
        **{
            "routing.aux_weight": 0.1,
            "routing.predictor_weight": 2.0,
            "experts.balance_weight": 0.5,
            "experts.z_weight": 0.25,
        }
    )
    sums = LossSums(*map(jnp.float32, (2, 3, 5, 7, 11, 13, 17)))
    assert float(objective(sums, jnp.float32(4), config)) == pytest.approx(6.3125)


def test_a_dense_model_has_no_routing_losses():
    sums = sums_of(ModelOutput(jnp.zeros((1, 2, 4)), None), jnp.zeros((1, 2), int), jnp.ones((1, 2), int), z_loss=1.0)
    expected = [2 * math.log(4) + 2 * math.log(4) ** 2, 2 * math.log(4), 0, 0]
    np.testing.assert_allclose(jnp.array(sums), [*expected, 0, 0, 0], rtol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("chunk", [0, 1, 6, 8, 26])  # tokens; two rows of 13: chunks of 13, 1, 3, 4, 13 positions
def test_chunks_give_the_loss_and_gradients_of_whole_logits(chunk, dtype):
    keys = jax.random.split(jax.random.key(0), 4)
    x_BTD = jax.random.normal(keys[0], (2, 13, 8), dtype)
    weight_DV = jax.random.normal(keys[1], (8, 32))
    targets_BT = jax.random.randint(keys[2], (2, 13), 0, 32)
    weights_BT = jax.random.bernoulli(keys[3], 0.7, (2, 13)).astype(jnp.float32)

    def whole(x_BTD, weight_DV):
        logits_BTV = jnp.einsum("BTD,DV->BTV", x_BTD, weight_DV.astype(dtype), preferred_element_type=jnp.float32)
        nats_BT, log_normaliser_BT = token_cross_entropy(logits_BTV, targets_BT)
        return jnp.sum((nats_BT + 0.1 * log_normaliser_BT**2) * weights_BT) / 7

    def chunked(x_BTD, weight_DV):
        return next_token_sums(0.1, chunk, x_BTD, weight_DV, targets_BT, weights_BT)[0] / 7

    expected, actual = (jax.jit(jax.value_and_grad(f, (0, 1)))(x_BTD, weight_DV) for f in (whole, chunked))
    tolerance = 1e-5 if dtype == jnp.float32 else 3e-2
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert a.dtype == e.dtype
        scale = np.abs(np.asarray(e, np.float32)).max()
        np.testing.assert_allclose(np.asarray(a, np.float32) / scale, np.asarray(e, np.float32) / scale, atol=tolerance)


def test_the_divergence_by_hand():
    # The teacher says 3/4, 1/4, the model 1/2, 1/2: KL = 3/4 ln 3/2 + 1/4 ln 1/2. The second token is padding.
    x_BTD, teacher_BTE = jnp.array([[[0.0], [5.0]]]), jnp.array([[[math.log(3), 0.0], [9.0, 1.0]]])
    args = x_BTD, jnp.ones((1, 2)), jnp.array([[0, 1]]), jnp.array([[1.0, 0.0]]), teacher_BTE, jnp.eye(2)
    kl = 0.75 * math.log(1.5) + 0.25 * math.log(0.5)
    for weight in (1.0, 0.25):
        minimised, nats, found = distillation_sums(Distilled(0.0, weight), 0, *args)
        assert float(found) == pytest.approx(kl, rel=1e-5)
        assert float(nats) == pytest.approx(math.log(2), rel=1e-6)
        assert float(minimised) == pytest.approx(weight * kl + (1 - weight) * math.log(2), rel=1e-5)


@pytest.mark.parametrize("chunk", [0, 6])
def test_the_divergence_and_its_gradients_are_those_of_whole_logits(chunk):
    """The teacher is of another width, and has no gradient."""
    keys = jax.random.split(jax.random.key(0), 6)
    x_BTD, weight_DV = jax.random.normal(keys[0], (2, 13, 8)), jax.random.normal(keys[1], (8, 32))
    targets_BT = jax.random.randint(keys[2], (2, 13), 0, 32)
    weights_BT = jax.random.bernoulli(keys[3], 0.7, (2, 13)).astype(jnp.float32)
    teacher = jax.random.normal(keys[4], (2, 13, 5)), jax.random.normal(keys[5], (5, 32))

    def whole(x_BTD, weight_DV, teacher):
        log_q_BTV, log_p_BTV = (jax.nn.log_softmax(jnp.matmul(*pair)) for pair in ((x_BTD, weight_DV), teacher))
        kl_BT = jnp.sum(jnp.exp(log_p_BTV) * (log_p_BTV - log_q_BTV), axis=-1)
        nats_BT, normaliser_BT = token_cross_entropy(x_BTD @ weight_DV, targets_BT)
        return jnp.sum((0.3 * nats_BT + 0.7 * kl_BT + 0.1 * normaliser_BT**2) * weights_BT)

    def chunked(x_BTD, weight_DV, teacher):
        return distillation_sums(Distilled(0.1, 0.7), chunk, x_BTD, weight_DV, targets_BT, weights_BT, *teacher)[0]

    expected, actual = (jax.jit(jax.value_and_grad(f, (0, 1)))(x_BTD, weight_DV, teacher) for f in (whole, chunked))
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, e, rtol=1e-4, atol=1e-4)
    gradients = jax.jit(jax.grad(chunked, 2))(x_BTD, weight_DV, teacher)
    assert not any(leaf.any() for leaf in jax.tree.leaves(gradients))


def test_a_model_has_nothing_to_learn_from_itself():
    x_BTD, weight_DV = jax.random.normal(jax.random.key(0), (2, 8, 4)), jax.random.normal(jax.random.key(1), (4, 32))
    rest = jnp.zeros((2, 8), int), jnp.ones((2, 8)), x_BTD, weight_DV

    def kl(x_BTD, weight_DV):
        return distillation_sums(Distilled(0.0, 1.0), 0, x_BTD, weight_DV, *rest)[0]

    value, gradients = jax.jit(jax.value_and_grad(kl, (0, 1)))(x_BTD, weight_DV)
    assert abs(float(value)) < 1e-6  # of 16 tokens
    assert max(float(jnp.abs(leaf).max()) for leaf in gradients) < 1e-5
    assert float(jax.jit(kl)(x_BTD + 0.1, weight_DV)) > 0.01


def test_bfloat16_features_give_float32_logits():
    """Near 300, neighbours in bfloat16 are 2 apart: the logits 301 and 300 must cost ln(1 + 1/e), not ln 2."""
    x_BTD = jnp.ones((1, 1, 2), jnp.bfloat16)
    weight_DV = jnp.array([[300.0, 300.0], [1.0, 0.0]])
    targets_BT, weights_BT = jnp.zeros((1, 1), int), jnp.ones((1, 1))
    nats, _ = jax.jit(lambda *args: next_token_sums(0.0, 0, *args, targets_BT, weights_BT))(x_BTD, weight_DV)
    assert float(nats) == pytest.approx(math.log1p(math.exp(-1)), rel=1e-5)


def test_no_array_of_all_logits_is_left_in_a_chunked_program():
    """256 positions of 512 ids: whole logits are 131,072 numbers; with chunks of 32 no array holds more than 16,384."""
    x_BTD, weight_DV = jnp.ones((1, 256, 8)), jnp.ones((8, 512))
    targets_BT, weights_BT = jnp.zeros((1, 256), int), jnp.ones((1, 256))

    def largest(chunk):
        loss = jax.grad(lambda *args: next_token_sums(0.0, chunk, *args, targets_BT, weights_BT)[0], (0, 1))
        text = jax.jit(loss).lower(x_BTD, weight_DV).compile().as_text()
        return max(math.prod(map(int, dims.split(","))) for dims in re.findall(r"f32\[([\d,]+)\]", text))

    assert largest(256) >= 256 * 512  # the guard: whole logits would be seen
    assert largest(32) <= 32 * 512


def test_a_padded_row_costs_what_its_tokens_cost_alone(tiny_config):
    """5 tokens of 8 at capacity 0.5, C = 4; alone, 5 tokens at capacity 0.8, C = 4."""
    padded, alone = (tiny_config(**{"model.depth": 2, "routing.capacity": c}) for c in (0.5, 0.8))
    model, unpadded_model = make_model(padded, VOCAB), make_model(alone, VOCAB)
    params = jax.jit(model.init)()
    tokens_BT, targets_BT = jax.random.randint(jax.random.key(1), (2, 1, 8), 0, VOCAB)
    segments_BT = jnp.array([[1, 1, 1, 1, 1, 0, 0, 0]])
    positions_BT = jnp.arange(8)[None]

    output = jax.jit(model.run)(params, tokens_BT, positions_BT, segments_BT)
    sums = sums_of(output, targets_BT, segments_BT)
    expected = jax.jit(unpadded_model.run)(params, tokens_BT[:, :5], positions_BT[:, :5], segments_BT[:, :5])
    expected_sums = sums_of(expected, targets_BT[:, :5], segments_BT[:, :5])

    np.testing.assert_array_equal(output.routing.selected_BT[..., :5], expected.routing.selected_BT)
    assert not output.routing.selected_BT[..., 5:].any()
    assert (output.routing.selected_BT.sum(axis=-1) == 4).all()
    np.testing.assert_allclose(jnp.array(sums), jnp.array(expected_sums), rtol=1e-5)


def test_every_row_has_its_own_targets(tiny_config):
    """B = 3, T = 8, C = 2: two members per row and block, those with the largest scores, and a loss over all rows."""
    config = tiny_config(**{"routing.aux_weight": 0.1, "model.layout": "R", "model.depth": 2})
    model = make_model(config, VOCAB)
    tokens_BT, targets_BT = jax.random.randint(jax.random.key(1), (2, 3, 8), 0, VOCAB)
    output = jax.jit(model.run)(jax.jit(model.init)(), tokens_BT)

    scores_LBT, member_LBT = np.asarray(output.routing.router_logits_BT), np.asarray(output.routing.selected_BT)
    np.testing.assert_array_equal(member_LBT.sum(axis=-1), np.full((2, 3), 2))
    largest = np.argsort(-scores_LBT, axis=-1)[..., :2]
    assert np.take_along_axis(member_LBT, largest, axis=-1).all()
    assert (member_LBT != member_LBT[:, :1]).any()  # rows do differ

    sums = sums_of(output, targets_BT, jnp.ones((3, 8), int))
    nats_LBT = np.where(member_LBT, np.log1p(np.exp(-scores_LBT)), np.log1p(np.exp(scores_LBT)))
    np.testing.assert_allclose(sums.aux, nats_LBT.sum(), rtol=1e-5)


def test_the_base_rate_of_the_predictor_loss():
    """With 1 member in 8, the best constant answer costs -(1/8 ln 1/8 + 7/8 ln 7/8) = 0.3768 nats per token."""
    member_LBT = jnp.arange(16).reshape(1, 1, 16) % 8 == 3
    costs = []
    for p in (0.1, 0.125, 0.15):
        logits_LBT = jnp.full((1, 1, 16), math.log(p / (1 - p)))
        record = make_record(logits_LBT, member_LBT, logits_LBT)
        sums = sums_of(ModelOutput(jnp.zeros((1, 16, 4)), record), jnp.zeros((1, 16), int), jnp.ones((1, 16), int))
        costs.append(float(sums.predictor) / 16)
    assert costs[1] == pytest.approx(0.3768, abs=1e-4)
    assert costs[1] < min(costs[0], costs[2])
