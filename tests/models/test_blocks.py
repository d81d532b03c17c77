"""The routed block against the equation written by hand; the faults that others shipped, each of which is seen."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from mod_jax.layout import BlockSpec
from mod_jax.models import blocks
from mod_jax.models.blocks import SELECTIONS, TOPK, Choice, make_block
from mod_jax.models.dispatch import uncached
from mod_jax.models.memory import Present, make_tokens

D = 16
tokens_of = functools.partial(make_tokens, head_dim=8, rope_base=1e4)  # as in the tiny config


@functools.cache
def make(config, capacity=0.25):
    """A routed block with weights of order 1: (run, params); run gives (x, routing record) for pure params."""

    def build():
        return routed_block(config, capacity)

    graphdef, abstract = nnx.split(nnx.eval_shape(build), nnx.Param)
    rng = np.random.default_rng(3)
    params = jax.tree.map(lambda p: jnp.asarray(0.3 * rng.normal(size=p.shape), p.dtype), nnx.to_pure_dict(abstract))

    def run(params, x_BTD, tokens, choice=TOPK):
        return apply(nnx.merge(graphdef, nnx.State(params)), x_BTD, tokens, choice)

    return jax.jit(run), params


def routed_block(config, capacity):
    return make_block(config, BlockSpec("R", capacity), nnx.Rngs(params=jax.random.key(0)))


def apply(block, x_BTD, tokens, choice=TOPK):
    """(x behind the block, its routing record), without a cache."""
    x_BTD, _, record = block(x_BTD, tokens, Present(), choice, uncached(choice.rule))
    return x_BTD, record.routing


@functools.cache
def full_update(config):
    """f(x_S) of pure params, jitted."""
    full = BlockSpec("F", 1.0)
    graphdef = nnx.graphdef(nnx.eval_shape(lambda: make_block(config, full, nnx.Rngs(params=jax.random.key(0)))))

    def update(params, x_BTD, tokens):
        return nnx.merge(graphdef, nnx.State(params)).update(x_BTD, tokens, Present(), TOPK)[0]

    return jax.jit(update)


@functools.cache
def weighted_sum(run):
    """A function of (params, x, tokens): ((a loss of the block's output alone, (out, record)), its gradients)."""

    def loss(params, x, tokens):
        out, record = run(params, x, tokens)
        weights = np.random.default_rng(9).normal(size=out.shape).astype(np.float32)
        return jnp.sum(jnp.sin(out) * weights) / out.size, (out, record)

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))


def inputs(batch=2, length=8, seed=0):
    x_BTD = np.random.default_rng(seed).normal(size=(batch, length, D)).astype(np.float32)
    positions = np.tile(np.arange(length, dtype=np.int32), (batch, 1))
    return x_BTD, tokens_of(positions, np.ones((batch, length), np.int32))


def with_router(params, weight_D):
    return {**params, "router": {"weight_D": jnp.asarray(weight_D, jnp.float32)}}


def unit(scale):
    """A router whose score is `scale` times the token's first entry (router_input = "raw")."""
    return scale * np.eye(D, dtype=np.float32)[0]


def bits(x):
    return np.asarray(x).view(np.int32)


# The equation


def test_gate_one_on_every_token_is_the_full_block(tiny_config):
    config = tiny_config(**{"routing.router_input": "raw"})
    run, params = make(config, capacity=1.0)
    x, tokens = inputs()
    x[..., 0] = 1.0  # so that every score is exactly 1
    out, record = run(with_router(params, unit(1.0)), x, tokens)
    assert (record.gate_BT == 1).all()
    assert record.selected_BT.all()
    update = full_update(config)(params["block"], x, tokens)
    np.testing.assert_allclose(out, x + update, atol=1e-6)
    for wrong in (x + (x + update), x + update + x, 2 * x + update):  # x + r (x + f), r (x + f) + x, 2x + f at r = 1
        assert np.abs(wrong - out).max() > 0.1


def test_gate_zero_is_the_identity(tiny_config):
    run, params = make(tiny_config(), capacity=1.0)
    x, tokens = inputs()
    out, record = run(with_router(params, np.zeros(D)), x, tokens)
    np.testing.assert_array_equal(out, x)
    assert record.selected_BT.all()
    assert np.abs(run(params, x, tokens)[0] - x).max() > 0.1


class ReluPlusOne(nnx.Module):
    def update(self, x_BTD, tokens, memory, choice):
        return jax.nn.relu(x_BTD) + 1.0, memory, None


def test_the_gate_multiplies_the_output_of_the_block(tiny_config):
    block = routed_block(tiny_config(**{"routing.router_input": "raw"}), 1.0)
    block.block = ReluPlusOne()
    block.router.weight_D[...] = jnp.asarray(unit(0.25))
    x, tokens = inputs(1, 2)
    x[...] = np.array([2.0, -4.0])[None, :, None]
    out, record = nnx.jit(lambda block: apply(block, x, tokens))(block)
    assert record.gate_BT.tolist() == [[0.5, -1.0]]
    # x + r f(x): 2 + 0.5 * 3 = 3.5 and -4 - 1 * (0 + 1) = -5
    assert out[0, :, 0].tolist() == [3.5, -5.0]
    gated_input = [2 + (0.5 * 2 + 1), -4 + (4 + 1)]  # x + f(r x): 4 and 1
    assert gated_input != out[0, :, 0].tolist()


def test_routed_block_is_the_equation_whatever_the_order_of_slots(tiny_config):
    config = tiny_config()
    run, params = make(config, capacity=0.5)
    x, tokens = inputs()
    out, record = run(params, x, tokens)
    scores = np.asarray(record.router_logits_BT)
    normed = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6)
    np.testing.assert_allclose(scores, normed @ np.asarray(params["router"]["weight_D"]), rtol=1e-4, atol=1e-5)
    chosen = np.argsort(-scores, axis=1)[:, :4]  # by falling score: not in the order of positions
    assert (np.diff(chosen) < 0).any()
    rows = np.arange(2)[:, None]
    gathered = tokens_of(tokens.positions_BT[rows, chosen], tokens.segments_BT[rows, chosen])
    update = full_update(config)(params["block"], x[rows, chosen], gathered)
    by_hand = x.copy()
    by_hand[rows, chosen] += scores[rows, chosen][..., None] * update
    np.testing.assert_allclose(out, by_hand, atol=1e-5)

    renumbered = tokens_of(tokens.positions_BT[:, :4], gathered.segments_BT)  # R7: angles and order of the slots
    faulty = full_update(config)(params["block"], x[rows, chosen], renumbered)
    assert np.abs(faulty - update).max() > 0.05


@pytest.mark.parametrize("selection", SELECTIONS)
def test_bypassed_tokens_pass_bit_for_bit(tiny_config, selection):
    run, params = make(tiny_config())
    x, tokens = inputs(4, seed=1)
    x[:, :, 3] = -0.0  # adding +0.0 would flip this sign
    out, record = run(params, x, tokens, Choice(selection, 0.5))
    selected = np.asarray(record.selected_BT)
    assert 0 < selected.sum() < selected.size
    assert (bits(out)[~selected] == bits(x)[~selected]).all()
    assert (bits(out)[selected] != bits(x)[selected]).any(axis=-1).all()


@pytest.mark.parametrize("selection", SELECTIONS)
def test_with_kept_keys_a_selected_token_gets_what_the_full_block_gives_it(tiny_config, selection):
    config = tiny_config(**{"routing.skipped_keys": "kept", "routing.gate": "one"})
    run, params = make(config)
    x, tokens = inputs(4, seed=1)
    out, record = run(params, x, tokens, Choice(selection, 0.5))
    selected = np.asarray(record.selected_BT)
    assert 0 < selected.sum() < selected.size
    update = full_update(config)(params["block"], x, tokens)
    np.testing.assert_allclose(out[selected], (x + update)[selected], atol=2e-5)
    assert (bits(out)[~selected] == bits(x)[~selected]).all()
    without, params_too = make(tiny_config(**{"routing.gate": "one"}))
    out, _ = without(params_too, x, tokens, Choice(selection, 0.5))  # so that the comparison can fail
    assert np.abs(out[selected] - (x + update)[selected]).max() > 1e-3


def test_with_kept_keys_nobody_attends_to_padding_or_another_document(tiny_config):
    run, params = make(tiny_config(**{"routing.skipped_keys": "kept"}))
    x, tokens = inputs()
    segments = np.array([[1, 1, 1, 2, 2, 2, 0, 0]] * 2, np.int32)
    tokens = tokens._replace(segments_BT=segments)
    out, _ = run(params, x, tokens, Choice("all"))
    moved, _ = run(params, np.where(segments[..., None] == 2, x, 7.0).astype(np.float32), tokens, Choice("all"))
    np.testing.assert_allclose(moved[segments == 2], out[segments == 2], atol=2e-5)
    assert np.abs(moved[segments == 1] - out[segments == 1]).max() > 1e-2


# Gates


@pytest.mark.parametrize(
    ("gate", "at_zero", "at_two"),
    [
        ("raw", 0.0, 2.0),
        ("sigmoid", 0.5, 1 / (1 + math.exp(-2))),
        ("tanh", 1.0, 1 + math.tanh(2)),
        ("one", 1.0, 1.0),
        # 8 tokens, one with score 2: 8 * e^s / (7 + e^2)
        ("softmax", 8 / (7 + math.exp(2)), 8 * math.exp(2) / (7 + math.exp(2))),
    ],
)
def test_gates_by_hand(tiny_config, gate, at_zero, at_two):
    config = tiny_config(**{"routing.gate": gate, "routing.router_input": "raw"})
    run, params = make(config, capacity=1.0)
    x, tokens = inputs()
    x[..., 0] = 0.0
    x[:, 5, 0] = 2.0
    out, record = run(with_router(params, unit(1.0)), x, tokens)
    expected = np.full(8, at_zero)
    expected[5] = at_two
    np.testing.assert_allclose(record.gate_BT, [expected, expected], rtol=1e-5, atol=1e-7)
    update = full_update(config)(params["block"], x, tokens)
    np.testing.assert_allclose(out, x + expected[None, :, None] * update, atol=2e-5)


@pytest.mark.parametrize("gate", ["raw", "sigmoid", "tanh", "softmax"])
def test_a_row_of_nothing_but_padding_is_untouched_and_its_gradient_finite(tiny_config, gate):
    run, params = make(tiny_config(**{"routing.gate": gate}), capacity=0.125)
    x, tokens = inputs()
    tokens = tokens._replace(segments_BT=np.array([[0] * 8, [1] * 8], np.int32))
    (_, (out, record)), grads = weighted_sum(run)(params, x, tokens)
    assert (bits(out)[0] == bits(x)[0]).all()
    assert record.selected_BT.sum(axis=1).tolist() == [0, 1]
    assert all(bool(jnp.isfinite(g).all()) for g in jax.tree.leaves(grads))
    weights = np.random.default_rng(9).normal(size=x.shape)
    np.testing.assert_allclose(grads[1][0], (np.cos(x) * weights)[0] / x.size, rtol=1e-4, atol=1e-7)


# Gradients of the router


def test_gate_one_moves_nothing_and_has_the_gradient_of_the_score(tiny_config):
    run, params = make(tiny_config(**{"routing.gate": "one"}), capacity=1.0)
    x, tokens = inputs()
    out, _ = run(params, x, tokens)
    other, _ = run(with_router(params, unit(-3.0)), x, tokens)
    np.testing.assert_array_equal(bits(out), bits(other))
    _, (grads, _) = weighted_sum(run)(params, x, tokens)
    assert np.abs(grads["router"]["weight_D"]).max() > 1e-3


def test_the_router_learns_from_the_output_as_finite_differences_say(tiny_config):
    run, params = make(tiny_config(), capacity=0.5)
    x, tokens = inputs()
    loss = weighted_sum(run)
    (_, (_, record)), (grads, _) = loss(params, x, tokens)
    gradient, weight = np.asarray(grads["router"]["weight_D"]), np.asarray(params["router"]["weight_D"])
    assert np.linalg.norm(gradient) > 1e-3
    for direction in (gradient / np.linalg.norm(gradient), np.eye(D, dtype=np.float32)[2]):
        step, values = 1e-2, []
        for sign in (1, -1):
            (value, (_, moved)), _ = loss(with_router(params, weight + sign * step * direction), x, tokens)
            np.testing.assert_array_equal(moved.selected_BT, record.selected_BT)  # away from ties
            values.append(float(value))
        slope = (values[0] - values[1]) / (2 * step)
        assert slope == pytest.approx(float(gradient @ direction), rel=1e-2, abs=1e-6)


def test_without_the_score_as_weight_the_router_would_learn_nothing(tiny_config):
    run, params = make(tiny_config(**{"routing.score": "frozen"}), capacity=0.5)  # gate 1
    (_, (_, record)), (grads, _) = weighted_sum(run)(params, *inputs())
    assert (grads["router"]["weight_D"] == 0).all()
    assert (record.gate_BT == 1).all()
    assert np.std(record.router_logits_BT) > 0.1
    assert record.selected_BT.sum(axis=1).tolist() == [4, 4]


@pytest.mark.parametrize("gate", ["raw", "sigmoid", "tanh", "softmax"])
def test_one_slot_still_teaches_the_router(tiny_config, gate):
    run, params = make(tiny_config(**{"routing.gate": gate}), capacity=0.125)
    (_, (_, record)), (grads, _) = weighted_sum(run)(params, *inputs())
    assert record.selected_BT.sum(axis=1).tolist() == [1, 1]
    assert np.linalg.norm(grads["router"]["weight_D"]) > 1e-3
    over_the_selected_set = jax.grad(lambda score: jax.nn.softmax(score[None])[0])(0.7)
    assert over_the_selected_set == 0  # the fault


def test_initial_scores_differ_and_reach_the_block(tiny_config):
    config = tiny_config()
    run, _ = make(config, capacity=0.5)
    block = nnx.jit(lambda: routed_block(config, 0.5))()
    params = nnx.to_pure_dict(nnx.state(block, nnx.Param))
    (_, (_, record)), (grads, _) = weighted_sum(run)(params, *inputs())
    # Normed input and weights of std 0.1 * D^-0.5: scores of std 0.1.
    assert 0.03 < np.std(record.router_logits_BT) < 0.3
    trunk = jax.tree_util.tree_leaves_with_path(grads["block"])
    assert [path for path, g in trunk if not np.abs(g).max() > 0] == []
    (_, (_, zero)), (dead, _) = weighted_sum(run)(with_router(params, np.zeros(D)), *inputs())
    assert np.std(zero.router_logits_BT) == 0
    assert all((g == 0).all() for g in jax.tree.leaves(dead["block"]))  # the fault


# Scores


def test_the_router_is_float32_whatever_computes(tiny_config):
    config = tiny_config(**{"routing.predictor": False})
    block = routed_block(config, 0.25)
    x, tokens = inputs(1, 512)
    x = jnp.asarray(x, jnp.bfloat16)
    scores, _ = block.score(x, tokens)
    assert scores.dtype == jnp.float32
    exact, weight = np.asarray(x, np.float64), np.asarray(block.router.weight_D[...], np.float64)
    exact = exact @ weight / np.sqrt((exact**2).mean(-1) + 1e-6)

    def ranking(scores):
        return np.argsort(-np.asarray(scores, np.float64)[0], kind="stable").tolist()

    assert ranking(scores) == ranking(exact)
    assert ranking(jnp.asarray(exact, jnp.bfloat16)) != ranking(exact)  # the fault: a score rounded to bfloat16
    run, params = make(config)
    out, record = run(params, x[:, :8], jax.tree.map(lambda field: field[:, :8], tokens))
    assert out.dtype == jnp.bfloat16
    assert {f.dtype for f in (record.router_logits_BT, record.gate_BT, record.cutoff_B)} == {jnp.dtype("float32")}


def test_a_nan_score_is_never_selected_and_stays_visible(tiny_config):
    run, params = make(tiny_config(), capacity=0.5)
    x, tokens = inputs()
    x[0, 2] = np.nan
    out, record = run(params, x, tokens)
    assert not record.selected_BT[0, 2]
    assert record.selected_BT.sum(axis=1).tolist() == [4, 4]
    assert np.isnan(record.router_logits_BT[0, 2])  # what the step's non-finite flag looks at
    assert np.isfinite(np.delete(out, 2, axis=1)).all()  # nobody read it


@pytest.mark.parametrize("router_input", ["normed", "raw"])
def test_a_normed_router_does_not_feed_itself(tiny_config, router_input):
    run, params = make(tiny_config(**{"routing.router_input": router_input}))
    x, tokens = inputs()
    scores, louder = (run(params, scale * x, tokens)[1].router_logits_BT for scale in (1.0, 10.0))
    np.testing.assert_allclose(louder, scores * (10 if router_input == "raw" else 1), rtol=1e-3, atol=1e-4)


def test_a_position_router_sees_only_the_position(tiny_config):
    run, params = make(tiny_config(**{"routing.score": "position"}))
    x, tokens = inputs()
    scores = run(params, x, tokens)[1].router_logits_BT
    np.testing.assert_array_equal(run(params, -2 * x, tokens)[1].router_logits_BT, scores)
    np.testing.assert_array_equal(scores[0], scores[1])
    assert np.std(scores[0]) > 0.1
    moved = run(params, x, tokens._replace(positions_BT=tokens.positions_BT + 1))[1].router_logits_BT
    np.testing.assert_allclose(moved[:, :-1], scores[:, 1:], rtol=1e-5)


def test_stochastic_scores_belong_to_the_key_of_the_row(tiny_config):
    run, params = make(tiny_config(**{"routing.score": "stochastic", "routing.predictor": False}))
    assert "router" not in params
    x, tokens = inputs()
    keys = jax.random.split(jax.random.key(5), 2)
    scores = run(params, x, tokens, Choice("topk", keys_B=keys))[1].router_logits_BT
    swapped = run(params, x, tokens, Choice("topk", keys_B=keys[::-1]))[1].router_logits_BT
    np.testing.assert_array_equal(swapped, scores[::-1])
    assert np.abs(scores[0] - scores[1]).max() > 0.1
    with pytest.raises(ValueError, match=r"needs Choice\.keys_B"):
        run(params, x, tokens)


# Selection


def test_padding_is_never_updated_and_never_a_target(tiny_config):
    # 5 of 8 tokens are real and C = 4; the same 5 alone, with C = 4 of 5.
    config = tiny_config()
    x, tokens = inputs()
    padded = tokens._replace(segments_BT=np.where(np.arange(8) < 5, 1, 0)[None].repeat(2, 0).astype(np.int32))
    (run, params), (run_alone, _) = make(config, 0.5), make(config, 0.8)
    loud_padding = x.copy()
    loud_padding[:, 5:] *= 50 * np.sign(x[:, 5:] @ np.asarray(params["router"]["weight_D"]))[..., None]
    out, record = run(params, loud_padding, padded)
    assert record.selected_BT.sum(axis=1).tolist() == [4, 4]
    assert not record.selected_BT[:, 5:].any()
    assert (bits(out)[:, 5:] == bits(loud_padding)[:, 5:]).all()
    alone, record_alone = run_alone(params, x[:, :5], jax.tree.map(lambda field: field[:, :5], tokens))
    np.testing.assert_array_equal(record.selected_BT[:, :5], record_alone.selected_BT)
    np.testing.assert_allclose(out[:, :5], alone, atol=1e-6)
    assert run(params, loud_padding, tokens)[1].selected_BT[:, 5:].any()  # unmarked, padding is chosen


def test_fewer_real_tokens_than_slots(tiny_config):
    run, params = make(tiny_config(), 0.5)
    x, tokens = inputs()
    tokens = tokens._replace(segments_BT=np.array([[1, 1, 0, 0, 0, 0, 0, 0], [1] * 8], np.int32))
    out, record = run(params, x, tokens)
    assert record.selected_BT.sum(axis=1).tolist() == [2, 4]
    assert record.selected_BT[0].tolist() == [True, True] + [False] * 6
    assert (bits(out)[0, 2:] == bits(x)[0, 2:]).all()
    np.testing.assert_array_equal(record.cutoff_B[0], record.router_logits_BT[0, :2].min())


def test_causal_selections_decide_each_token_alone(tiny_config):
    run, params = make(tiny_config())
    x, tokens = inputs(4)
    tokens.segments_BT[0, 5:] = 0
    real = tokens.segments_BT > 0

    def selected(selection, cutoff=0.0):
        record = run(params, x, tokens, Choice(selection, cutoff))[1]
        return record, np.asarray(record.selected_BT)

    record, chosen = selected("router")
    np.testing.assert_array_equal(chosen, (np.asarray(record.router_logits_BT) > 0) & real)
    record, chosen = selected("threshold", 0.5)
    np.testing.assert_array_equal(chosen, (np.asarray(record.router_logits_BT) > 0.5) & real)
    record, chosen = selected("predictor")
    np.testing.assert_array_equal(chosen, (np.asarray(record.predictor_logits_BT) > 0) & real)
    assert 0 < chosen.sum() < chosen.size


def test_nobody_selected_is_the_identity_and_everybody_the_gated_block(tiny_config):
    config = tiny_config()
    run, params = make(config)
    x, tokens = inputs(4)
    out, record = run(params, x, tokens, Choice("threshold", 1e9))
    assert (bits(out) == bits(x)).all()
    assert np.isposinf(record.cutoff_B).all()
    assert float(record.update_square_sum) == float(record.residual_square_sum) == 0
    out, record = run(params, x, tokens, Choice("threshold", -1e9))
    update = full_update(config)(params["block"], x, tokens)
    np.testing.assert_allclose(out, x + record.router_logits_BT[..., None] * update, atol=1e-5)


def test_what_cannot_be_selected_is_refused_by_name(tiny_config):
    x, tokens = inputs()
    run, params = make(tiny_config())
    with pytest.raises(ValueError, match="selection = 'argmax': must be one of topk, router, predictor, threshold"):
        run(params, x, tokens, Choice("argmax"))
    run, params = make(tiny_config(**{"routing.predictor": False}))
    with pytest.raises(ValueError, match="this model has no predictor"):
        run(params, x, tokens, Choice("predictor"))
    run, params = make(tiny_config(**{"routing.gate": "softmax"}))
    with pytest.raises(ValueError, match="no causal selection exists"):
        run(params, x, tokens, Choice("router"))


def test_topk_per_document_gives_each_document_its_share(tiny_config):
    run, params = make(tiny_config(**{"routing.topk_per": "document"}), capacity=0.5)
    x, tokens = inputs()
    x[:, :4] += 10 * np.asarray(params["router"]["weight_D"])  # document 1 scores high everywhere
    tokens = tokens_of(tokens.positions_BT % 4, np.repeat([[1, 2]], 4, axis=1).repeat(2, 0))
    selected = np.asarray(run(params, x, tokens)[1].selected_BT)
    assert selected.reshape(2, 2, 4).sum(-1).tolist() == [[2, 2], [2, 2]]
    per_row, _ = make(tiny_config(), capacity=0.5)
    selected = np.asarray(per_row(params, x, tokens)[1].selected_BT)
    assert selected.reshape(2, 2, 4).sum(-1).tolist() == [[4, 0], [4, 0]]


# Record and predictor


def test_the_record_says_what_was_done(tiny_config):
    run, params = make(tiny_config(), capacity=0.5)
    x, tokens = inputs()
    out, record = run(params, x, tokens)
    selected = np.asarray(record.selected_BT)
    scores = np.asarray(record.router_logits_BT)
    np.testing.assert_array_equal(record.gate_BT, scores)
    np.testing.assert_array_equal(record.cutoff_B, np.where(selected, scores, np.inf).min(axis=1))
    np.testing.assert_allclose(record.update_square_sum, ((out - x)[selected] ** 2).sum(), rtol=1e-4)
    np.testing.assert_allclose(record.residual_square_sum, (x[selected] ** 2).sum(), rtol=1e-5)


def test_the_predictor_starts_at_the_base_rate():
    predictor = blocks.Predictor(D, 0.125, nnx.Rngs(params=jax.random.key(0)))
    x = jnp.asarray(inputs()[0])
    logits = predictor(x, jnp.ones(x.shape[:2]))
    # log(0.125 / 0.875) = -1.9459
    assert float(jnp.mean(logits)) == pytest.approx(-1.9459, abs=0.2)
    assert np.std(logits) > 1e-3
    certain = blocks.Predictor(D, 1.0, nnx.Rngs(params=jax.random.key(0)))
    assert float(certain.down_bias_1[...][0]) == pytest.approx(math.log(99))


def test_the_predictor_reads_the_blocks_input_and_gives_nothing_back(tiny_config):
    run, params = make(tiny_config(), capacity=0.5)
    x, tokens = inputs()

    def predictor_loss(params, x):
        return jnp.sum(jnp.sin(run(params, x, tokens)[1].predictor_logits_BT))

    to_params, to_x = jax.grad(predictor_loss, argnums=(0, 1))(params, x)
    assert (to_x == 0).all()
    assert all((g == 0).all() for name in ("block", "router") for g in jax.tree.leaves(to_params[name]))
    assert all(np.abs(g).max() > 0 for g in jax.tree.leaves(to_params["predictor"]))
    other_block = {**params, "block": jax.tree.map(lambda p: 2 * p, params["block"])}
    logits, same = (run(p, x, tokens)[1].predictor_logits_BT for p in (params, other_block))
    np.testing.assert_array_equal(logits, same)  # so it cannot be the block's output that it reads
    assert np.abs(run(params, 2 * x[:, ::-1], tokens)[1].predictor_logits_BT - logits).max() > 0.1


# On a mesh


def all_gathers(compiled):
    return [line.strip() for line in compiled.as_text().splitlines() if re.search(r" = .* all-gather(-start)?\(", line)]


def test_rows_on_their_devices_are_never_gathered(tiny_config):
    run, params = make(tiny_config())
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    rows, everywhere = (NamedSharding(mesh, spec) for spec in (PartitionSpec("data"), PartitionSpec()))
    x, tokens = inputs(8)

    def loss(params, x, tokens):
        out, record = run(params, x, tokens)
        return jnp.sum(jnp.sin(out)) + jnp.sum(record.predictor_logits_BT)

    step = jax.jit(jax.grad(loss), in_shardings=(everywhere, rows, rows), out_shardings=everywhere)
    compiled = step.lower(params, x, tokens).compile()
    assert "all-reduce" in compiled.as_text()  # it is partitioned: gradients are summed
    assert all_gathers(compiled) == []

    def indexed_by_row(x, idx):  # the fault: the batch as one more index
        return x.at[jnp.arange(8)[:, None], idx].add(1.0)

    idx = np.tile(np.arange(4), (8, 1))
    faulty = jax.jit(indexed_by_row, in_shardings=(rows, rows), out_shardings=rows).lower(x, idx).compile()
    assert all_gathers(faulty) != []


def test_the_cutoff_keeps_the_share_when_each_document_has_its_own_top_k(build, tools):
    """Eight documents a row: the smallest selected score is that of the poorest one, and would select far more."""
    B, T, capacity = 64, 64, 0.125
    tokens_BT = tools.random_tokens(B, T)
    segments_BT = np.broadcast_to(1 + np.arange(T, dtype=np.int32) // (T // 8), (B, T))
    positions_BT = np.broadcast_to(np.arange(T, dtype=np.int32) % (T // 8), (B, T))
    for topk_per in ("row", "document"):
        changes = {"routing.topk_per": topk_per, "routing.capacity": capacity, "data.seq_len": T, "model.depth": 2}
        model = build(**changes)
        record = jax.jit(model.model.run)(model.params, tokens_BT, positions_BT, segments_BT).routing
        realised = np.mean(np.asarray(record.router_logits_BT[0]) > np.mean(record.cutoff_B[0]))
        assert realised == pytest.approx(capacity, rel=0.1), topk_per
