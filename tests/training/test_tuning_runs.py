"""Runs that tune a model: what stays as it was, what is stored, and that a stopped one goes on bit for bit."""

import contextlib
import io
import json

import jax
import numpy as np
import optax
import pytest
from tiny import TINY

from mod_jax import trained
from mod_jax.config import make_config
from mod_jax.errors import ConfigError, ResumeRefused
from mod_jax.models.decoder import by_depth
from mod_jax.models.model import make_model
from mod_jax.training import loop, optimizer, prepare
from mod_jax.training.checkpoint import Checkpointer
from mod_jax.training.rows import read_metrics

BASE = {
    **TINY,
    "model.depth": 2,
    "data.eval_windows": 8,
    "routing.gate": "one",
    "routing.skipped_keys": "kept",
    "routing.predictor": False,
    "train.eval_every": 0,
}
LORA = {"optimizer.train": "lora", "optimizer.lora_rank": 2, "optimizer.weight_decay": 0.0}


def quietly(function, *args, **kwargs):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        result = function(*args, **kwargs)
    return result, out.getvalue()


def flat(tree):
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def keys(tree):
    return {jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)}


def stored_state(workdir, config):
    run, _ = quietly(prepare.prepare_run, config, workdir)
    with Checkpointer(workdir / "checkpoints", read_only=True) as checkpointer:
        return jax.device_get(checkpointer.restore(run.abstract_state).state)


def test_additions_norms_and_routing_are_all_that_lora_trains():
    config = make_config(**BASE, **LORA)
    model = make_model(config, 32)
    trained_params, frozen = optimizer.split(model.abstract_params, config.optimizer, model.groups)
    groups = flat(jax.tree.map(lambda group: np.array(group), model.groups))
    assert {str(groups[name]) for name in keys(frozen)} == {"matrix"}
    state = jax.eval_shape(optimizer.make_optimizer(config.optimizer, model.groups).init, model.abstract_params)
    for moment in ("mu", "nu"):
        shapes = sorted(leaf.shape for leaf in jax.tree.leaves(optax.tree.get(state, moment)))
        assert shapes == sorted(leaf.shape for leaf in jax.tree.leaves(trained_params))


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """The workdir of a routed run."""
    workdir = tmp_path_factory.mktemp("start") / "run"
    quietly(loop.train, make_config(**BASE), workdir)
    return workdir


@pytest.fixture(scope="module")
def tuned(start, tmp_path_factory):
    """(workdir, config, what was said) of a run with additions and a teacher."""
    workdir = tmp_path_factory.mktemp("tuned") / "run"
    config = make_config(**BASE, **LORA, **{"train.teacher": str(start)})
    _, said = quietly(loop.train, config, workdir, init_from=start)
    return workdir, config, said


def test_frozen_weights_stay_bit_for_bit_and_have_no_moments(start, tuned):
    workdir, config, said = tuned
    state, before = stored_state(workdir, config), flat(trained.restore(start).params)
    stored = flat({name: part for name, part in state.params.items() if name != "lora"})
    moved = {name for name in before if (stored[name] != before[name]).any()}
    assert moved == {name for name in before if "scale_D" in name or "router" in name}
    factors = flat(state.params["lora"])
    assert all(leaf.any() for leaf in factors.values())
    moments = sum(leaf.size for leaf in jax.tree.leaves(state.opt_state))
    assert moments == 2 * (sum(leaf.size for leaf in factors.values()) + sum(before[name].size for name in moved)) + 1
    assert "afresh: the optimizer, the cut-offs" in said
    dense = sum(leaf.size for name, leaf in before.items() if "router" not in name)
    assert f"teacher   step 4 of {start}, {dense:,} parameters in float32" in said


def test_what_is_restored_has_the_additions_in_it(start, tuned):
    workdir, config, _ = tuned
    model, before = trained.restore(workdir), trained.restore(start)
    assert jax.tree.structure(model.params) == jax.tree.structure(before.params)
    blocks = [by_depth(each.params, each.config)[1]["block"]["mlp"]["up_DF"] for each in (model, before)]
    assert (blocks[0] != blocks[1]).any()
    apart = stored_state(workdir, config)
    run, _ = quietly(prepare.make_run, config, workdir, 257)
    ids_BT = np.arange(32, dtype=np.int32).reshape(2, 16)
    unmerged = jax.jit(run.task.model.run)(apart.params, ids_BT).logits_BTV
    np.testing.assert_allclose(jax.jit(model.model.run)(model.params, ids_BT).logits_BTV, unmerged, atol=1e-5)
    metrics = read_metrics(workdir / "metrics.jsonl")
    assert model.evaluation["eval/topk_loss"] == metrics[-1]["eval/topk_loss"]
    assert (model.cutoffs_L != 0).all()
    first = next(row for row in metrics if row["step"] == 1)
    assert 0 < first["train/teacher_loss"] == pytest.approx(first["train/objective"], rel=1e-5)


def test_a_run_begins_with_tuned_weights_as_with_any(tuned, tmp_path):
    workdir, _, _ = tuned
    still = make_config(**BASE | {"optimizer.learning_rate": 1e-30, "train.steps": 1})
    quietly(loop.train, still, tmp_path / "next", init_from=workdir)
    after, before = (flat(trained.restore(folder).params) for folder in (tmp_path / "next", workdir))
    assert after.keys() == before.keys()
    for name in after:
        np.testing.assert_allclose(after[name], before[name], atol=1e-7)


@pytest.mark.slow
def test_a_stopped_run_goes_on_bit_for_bit(start, tuned, tmp_path, monkeypatch):
    workdir, config, _ = tuned
    monkeypatch.setattr(loop.PreemptionGuard, "requested", lambda guard, step: step == 2)
    outcome, _ = quietly(loop.train, config, tmp_path / "run", init_from=start)
    assert outcome is loop.Outcome.PREEMPTED
    monkeypatch.undo()
    _, said = quietly(loop.train, config, tmp_path / "run")
    assert "RESUMED step 2 of 4" in said
    whole, again = (flat(stored_state(folder, config)._asdict()) for folder in (workdir, tmp_path / "run"))
    assert whole.keys() == again.keys()
    for name in whole:
        np.testing.assert_array_equal(whole[name], again[name], err_msg=name)


@pytest.mark.slow
def test_routing_alone_moves_routers_alone(start, tmp_path):
    config = make_config(**BASE, **{"optimizer.train": "routing"})
    quietly(loop.train, config, tmp_path / "run", init_from=start)
    after, before = (flat(trained.restore(folder).params) for folder in (tmp_path / "run", start))
    assert {name for name in before if (after[name] != before[name]).any()} == {n for n in before if "router" in n}


def test_a_model_that_is_its_own_teacher_learns_nothing(start, tmp_path):
    """With capacity 1 the student does what its teacher does."""
    keys = {"routing.capacity": 1.0, "train.steps": 1, "train.teacher": str(start), "optimizer.clip_norm": 1e9}
    quietly(loop.train, make_config(**BASE | LORA | keys), tmp_path / "run", init_from=start)
    row = next(row for row in read_metrics(tmp_path / "run" / "metrics.jsonl") if row["step"] == 1)
    assert abs(row["train/teacher_loss"]) < 1e-6
    assert row["train/grad_norm"] < 1e-5
    assert row["train/loss"] > 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train.teacher": "/nowhere"}, "config.train.teacher = '/nowhere': there is no finished checkpoint"),
        ({"train.teacher": "START", "model.vocab_size": 300}, "has a vocabulary of 257, this run one of 300"),
        (
            {"train.teacher": "START", "train.steps": 0, "train.flops": 1e9},
            "config.train.flops = 1000000000.0: must be 0",
        ),
        ({"optimizer.lora_rank": 0}, "config.optimizer.lora_rank = 0: must be an integer in [1, 65536]"),
        ({"optimizer.lora_alpha": 0.0}, "config.optimizer.lora_alpha = 0.0: must be a number > 0"),
        ({"optimizer.train": "adapters"}, "config.optimizer.train = 'adapters': must be one of all, routing, lora"),
        (
            {"train.teacher_dtype": "float16"},
            "config.train.teacher_dtype = 'float16': must be one of float32, bfloat16",
        ),
    ],
)
def test_what_cannot_be_is_refused_by_name(start, tmp_path, changes, message):
    changes = {name: str(start) if value == "START" else value for name, value in changes.items()}
    with pytest.raises(ConfigError) as refused:
        quietly(loop.train, make_config(**{**BASE, **LORA, **changes}), tmp_path / "run")
    assert message in str(refused.value)
    assert not (tmp_path / "run").exists()


def test_a_routed_teacher_must_be_an_upgraded_model(tmp_path):
    quietly(loop.train, make_config(**BASE | {"routing.gate": "raw", "train.steps": 1}), tmp_path / "raw")
    with pytest.raises(ConfigError, match=r"its routing\.gate is 'raw', and must be 'one'"):
        quietly(loop.train, make_config(**BASE, **{"train.teacher": str(tmp_path / "raw")}), tmp_path / "run")


def test_a_teacher_that_looks_ahead_or_does_not_fit_the_mesh_is_refused(start, tmp_path):
    experts = {"model.layout": "E", "experts.choice": "expert", "experts.count": 2, "train.steps": 1}
    quietly(loop.train, make_config(**BASE | {"routing.aux_weight": 0.0} | experts), tmp_path / "experts")
    for teacher, changes, message in (
        (tmp_path / "experts", {}, "its experts.choice is 'expert'"),
        (
            start,
            {"model.num_heads": 4, "mesh.tensor": 4},
            "of its model, config.model.num_heads = 2: must be divisible",
        ),
    ):
        config = make_config(**BASE | {"train.teacher": str(teacher)} | changes)
        with pytest.raises(ConfigError, match=r"^config\.train\.teacher = ") as refused:
            quietly(loop.train, config, tmp_path / "run")
        assert message in str(refused.value)
        assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("other", [{"step": 3}, {"fingerprint": "0123456789ab"}])
def test_another_teacher_is_refused(start, tuned, tmp_path, other):
    workdir, config, _ = tuned
    changed = json.loads((workdir / "config.json").read_text())["teacher"] | other
    run, _ = quietly(prepare.prepare_run, config, workdir)
    with Checkpointer(tmp_path / "run" / "checkpoints", metric=run.task.ranking_metric) as checkpointer:
        about = prepare.metadata(run, 0.0) | {"teacher": changed}
        checkpointer.save(2, loop.fresh_state(run), about)
    with pytest.raises(
        ResumeRefused, match=f"this run began with step .*{other.popitem()[1]}.*; there now lies step 4 of config"
    ):
        quietly(loop.train, config, tmp_path / "run")
