"""Held-out losses by hand, under every selection; the causality gate passes, and it fails where there is a leak."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mod_jax import sharding
from mod_jax.data.corpus import prepare_corpus
from mod_jax.errors import CausalityError
from mod_jax.evaluation.evaluator import CAUSALITY_TOLERANCE, Evaluator
from mod_jax.models import blocks, flops
from mod_jax.models.blocks import Choice
from mod_jax.models.model import make_model
from mod_jax.training.step import init_state

VOCAB_SIZE = 300  # the tokenizer has 257 ids
NUM_WINDOWS = 12  # in batches of 8: the second one is half padding
CHANGES = {
    "model.depth": 2,
    "model.layout": "R",
    "model.vocab_size": VOCAB_SIZE,
    "routing.aux_weight": 0.1,
    "routing.router_init_scale": 1.0,
    "data.eval_windows": NUM_WINDOWS,
}


def make_evaluator(config):
    corpus = prepare_corpus(config.data)
    model = make_model(config, config.model.vocab_size or corpus.tokenizer.vocab_size)
    mesh = sharding.make_mesh(config)
    with jax.set_mesh(mesh):
        state = jax.jit(lambda: init_state(config, model), out_shardings=sharding.replicated(mesh))()
    return Evaluator(config, model, mesh, corpus), model, state, corpus


def busy_predictors(params):
    """Predictors that say yes to about half of the tokens; at the base rate they would say it to none."""

    def change(path, x):
        name = path[-1].key
        if name == "down_bias_1":
            return jnp.zeros_like(x)
        return jax.random.normal(jax.random.key(3), x.shape) if name == "down_P" else x

    return jax.tree_util.tree_map_with_path(change, params)


@pytest.fixture(scope="module")
def evaluated():
    """(config, evaluator, model, state, corpus, metrics) of a routed model on all eight devices."""
    from tiny import TINY

    from mod_jax.config import make_config

    config = make_config(**{**TINY, **CHANGES})
    evaluator, model, state, corpus = make_evaluator(config)
    state = state._replace(params=busy_predictors(state.params), cutoffs_L=jnp.array([0.3, 0.1]))
    with jax.set_mesh(sharding.make_mesh(config)):
        return config, evaluator, model, state, corpus, evaluator.evaluate(state.weights)


def windows(evaluator):
    """The real windows of all batches, one after the other."""
    batches = evaluator.batches
    joined = {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}
    assert joined["tokens_BT"].shape[0] == 16
    return {name: array[:NUM_WINDOWS] for name, array in joined.items()}


@pytest.mark.parametrize("selection", ["topk", "router", "predictor", "threshold"])
def test_losses_and_capacity_by_hand(evaluated, selection):
    """Plain NumPy on the real windows alone, so padding counts for nothing; one device, where the evaluator used 8."""
    config, evaluator, model, state, corpus, metrics = evaluated
    data = windows(evaluator)
    params, cutoffs_L = jax.device_get((state.params, state.cutoffs_L))
    inputs = (data["tokens_BT"], data["positions_BT"], data["segment_ids_BT"])
    logits_BTV, record, _ = jax.jit(model.run)(params, *inputs, Choice(selection, cutoffs_L))
    logits_BTV = np.asarray(logits_BTV, np.float64)
    log_normaliser_BT = np.log(np.exp(logits_BTV).sum(axis=-1))
    target_BT = np.take_along_axis(logits_BTV, data["targets_BT"][..., None], axis=-1)[..., 0]
    loss = (log_normaliser_BT - target_BT).mean()
    num_bytes = np.sum(data["targets_BT"] != corpus.tokenizer.separator_id)  # one byte a token
    bits = loss * target_BT.size / math.log(2) / num_bytes
    if selection == "topk":
        forward = flops.forward_flops(config, VOCAB_SIZE, predictor=False)
        assert metrics["eval/forward_flops_per_token/topk"] == pytest.approx(forward.total / 16)
        ratio_L = np.sqrt(record.update_square_sum / record.residual_square_sum)
        assert [metrics[f"routing/block0{d}/update_ratio/topk"] for d in (0, 1)] == pytest.approx(ratio_L, rel=1e-4)
        assert metrics["eval/topk_loss"] == pytest.approx(loss, rel=1e-5)
        assert metrics["eval/topk_bits_per_byte"] == pytest.approx(bits, rel=1e-5)
        return
    capacity_L = np.asarray(record.selected_BT).mean(axis=(1, 2))
    assert metrics[f"eval/causal_loss/{selection}"] == pytest.approx(loss, rel=1e-5)
    assert metrics[f"eval/causal_bits_per_byte/{selection}"] == pytest.approx(bits, rel=1e-5)
    assert metrics[f"eval/gap/{selection}"] == pytest.approx(loss - metrics["eval/topk_loss"], abs=1e-5)
    assert metrics[f"eval/realised_capacity/{selection}"] == pytest.approx(capacity_L.mean(), abs=1e-6)
    for depth, capacity in enumerate(capacity_L):
        assert metrics[f"routing/block{depth:02d}/realised_capacity/{selection}"] == pytest.approx(capacity, abs=1e-6)
    # The table of a larger model than its tokenizer needs is paid for, and a predictor by those whom it serves.
    with_predictor = selection == "predictor"
    forward = flops.forward_flops(config, VOCAB_SIZE, predictor=with_predictor, realised_capacity=tuple(capacity_L))
    assert metrics[f"eval/forward_flops_per_token/{selection}"] == pytest.approx(forward.total / 16)
    assert (capacity_L > 0.05).all()  # the selections here select
    assert (capacity_L < 0.95).all()


def test_every_loss_names_its_selection(evaluated):
    metrics = evaluated[-1]
    losses = {name for name in metrics if "loss" in name}
    assert losses == {"eval/topk_loss"} | {f"eval/causal_loss/{s}" for s in ("router", "predictor", "threshold")}


def test_the_gate_passes_for_causal_selections_and_the_probe_fails_for_topk(evaluated):
    config, evaluator, _, state, _, _ = evaluated
    with jax.set_mesh(sharding.make_mesh(config)):
        for selection in ("router", "predictor", "threshold"):
            assert evaluator.prefix_movement(state.weights, selection) < 1e-5
        assert evaluator.prefix_movement(state.weights, "topk") > 10 * CAUSALITY_TOLERANCE["float32"]


def test_the_gate_raises_for_a_selection_that_leaks(evaluated, monkeypatch, tiny_config):
    """A predictor compared with its row's mean asks about tokens to come."""
    honest = blocks.decide

    def leaking(selection, scores, predictor_logits, cutoff):
        if selection == "predictor":
            return predictor_logits > jnp.mean(predictor_logits, axis=-1, keepdims=True)
        return honest(selection, scores, predictor_logits, cutoff)

    monkeypatch.setattr(blocks, "decide", leaking)
    config = tiny_config(**CHANGES)
    evaluator, *_ = make_evaluator(config)
    state = evaluated[3]
    with jax.set_mesh(sharding.make_mesh(config)):
        assert evaluator.check_causal(state.weights, "threshold") < 1e-5
        with pytest.raises(CausalityError, match="selection 'predictor': replacing the suffix moved prefix logits by"):
            evaluator.check_causal(state.weights, "predictor")


def test_a_dense_model_has_one_loss(tiny_config):
    config = tiny_config(**{"model.depth": 1, "model.layout": "F", "routing.predictor": False})
    evaluator, _, state, _ = make_evaluator(config)
    with jax.set_mesh(sharding.make_mesh(config)):
        metrics = evaluator.evaluate(state.weights)
        seen = evaluator.records(state.weights)
    assert (seen.routing, seen.experts) == ({}, {})
    spent = {f"eval/forward_flops_per_token/{name}" for name in ("topk", "dense")}
    assert metrics.keys() == {"eval/topk_loss", "eval/topk_bits_per_byte", *spent}
    assert len({metrics[name] for name in spent}) == 1


def test_records_are_of_the_first_batch(evaluated):
    config, evaluator, _, state, _, _ = evaluated
    with jax.set_mesh(sharding.make_mesh(config)):
        seen = evaluator.records(state.weights)
    records = seen.routing
    assert len(seen.pieces) == 16
    assert seen.experts == {}
    assert records.keys() == {"topk", "router", "predictor", "threshold"}
    assert records["topk"].selected_BT.shape == (2, 8, 16)
    assert (records["topk"].selected_BT.sum(axis=-1) == 4).all()
