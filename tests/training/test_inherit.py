"""A new run with the weights of another: what is taken over, what starts afresh, what is refused."""

import contextlib
import io
import json

import jax
import numpy as np
import pytest
from tiny import TINY

from mod_jax.config import make_config
from mod_jax.errors import ConfigError, ResumeRefused
from mod_jax.models.decoder import by_depth
from mod_jax.models.model import make_model
from mod_jax.training import loop, prepare
from mod_jax.training.checkpoint import Checkpointer
from mod_jax.training.inherit import merge, taken_parts

CHANGES = {"model.depth": 2, "data.eval_windows": 8, "train.steps": 2, "train.eval_every": 0}
DENSE = {"model.layout": "F", "routing.predictor": False}


def make_run_config(**changes):
    return make_config(**{**TINY, **CHANGES, **changes})


def quietly(function, *args, **kwargs):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        result = function(*args, **kwargs)
    return result, out.getvalue()


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    """The workdir of a finished dense run."""
    workdir = tmp_path_factory.mktemp("dense") / "run"
    quietly(loop.train, make_run_config(**DENSE), workdir)
    return workdir


def params_of(workdir, config):
    run, _ = quietly(prepare.prepare_run, config, workdir)
    with Checkpointer(workdir / "checkpoints", read_only=True) as checkpointer:
        return jax.device_get(checkpointer.restore(run.abstract_state).state.params)


def contents(workdir):
    return {path: path.read_bytes() for path in workdir.rglob("*") if path.is_file()}


def assert_equal(actual, expected):
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


def test_a_dense_run_becomes_a_routed_one(dense, tmp_path):
    """With rates too small to move a float32, training leaves the weights as they were at step 0."""
    before, still = contents(dense), {"optimizer.learning_rate": 1e-30, "seed": 7}
    config = make_run_config(**still, **{"data.seq_len": 8})
    outcome, output = quietly(loop.train, config, tmp_path / "routed", init_from=dense)
    assert outcome is loop.Outcome.DONE
    assert f"FRESH RUN with weights of step 2 of {dense}; afresh: routers of blocks 1, predictors of blocks 1" in output
    taken, source = params_of(tmp_path / "routed", config), params_of(dense, make_run_config(**DENSE))
    first, second = by_depth(taken, config)
    source_first, source_second = by_depth(source, make_run_config(**DENSE))
    assert_equal([taken["embedder"], taken["final_norm"]], [source["embedder"], source["final_norm"]])
    assert_equal([first, second["block"]], [source_first, source_second])
    fresh = make_model(config, 257).init()
    _, fresh_second = by_depth(fresh, config)
    for part in ("router", "predictor"):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-6, 1e-9), second[part], fresh_second[part])
    assert contents(dense) == before

    stored = json.loads((tmp_path / "routed" / "result.json").read_text())
    assert (stored["init_from"]["workdir"], stored["init_from"]["step"]) == (str(dense), 2)


def test_the_same_command_goes_on_and_other_weights_are_refused(dense, tmp_path):
    config, longer = make_run_config(), make_run_config(**{"train.steps": 3})
    quietly(loop.train, config, tmp_path / "run", init_from=dense)
    _, output = quietly(loop.train, longer, tmp_path / "run", init_from=dense, extend=True)
    assert "RESUMED step 2 of 3" in output
    _, output = quietly(loop.train, longer, tmp_path / "run", init_from=dense)
    assert "FINISHED" in output
    with pytest.raises(ResumeRefused, match=r"has begun, with the weights of .*dense"):  # finished as it is
        quietly(loop.train, longer, tmp_path / "run", init_from=tmp_path)
    with pytest.raises(ResumeRefused, match=r"has begun, with the weights of .*dense"):
        quietly(loop.train, make_run_config(**{"train.steps": 4}), tmp_path / "run", init_from=tmp_path, extend=True)
    with pytest.raises(ResumeRefused, match="has begun, with weights of its own"):
        quietly(loop.train, make_run_config(**DENSE, **{"train.steps": 4}), dense, init_from=dense, extend=True)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"model.depth": 4}, "model.depth: 2 -> 4"),
        ({"model.width": 32}, "model.width: 16 -> 32"),
        ({"model.vocab_size": 300}, "model.vocab_size: 257 -> 300"),
        ({"model.layout": "FE"}, "model.layout: 'F' -> 'FE'"),
        ({"model.layout": "Fa"}, "model.layout: 'F' -> 'Fa'"),
        ({"model.activation": "gelu"}, "model.activation: 'relu_squared' -> 'gelu'"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(dense, tmp_path, changes, line):
    with pytest.raises(ResumeRefused, match="do not fit this run") as refused:
        quietly(loop.train, make_run_config(**changes), tmp_path / "run", init_from=dense)
    assert f"  {line}" in str(refused.value).splitlines()
    assert not (tmp_path / "run" / "config.json").exists()


def test_a_workdir_without_a_checkpoint_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"--init_from = '.*nothing': there is no finished checkpoint"):
        quietly(loop.train, make_run_config(), tmp_path / "run", init_from=tmp_path / "nothing")


@pytest.mark.parametrize(
    ("old", "new", "parts"),
    [
        ({}, {}, {"router": [1, 3], "predictor": [1, 3]}),
        ({}, {"model.layout": "FRFF"}, {"router": [1], "predictor": [1]}),
        ({}, {"routing.score": "position"}, {"router": [], "predictor": [1, 3]}),
        ({"routing.predictor": False}, {}, {"router": [1, 3], "predictor": []}),
        ({}, {**DENSE}, {"router": [], "predictor": []}),
        ({"model.layout": "FFR"}, {"routing.capacity": (0.5, 0.25)}, {"router": [], "predictor": []}),
    ],
)
def test_routers_and_predictors_are_taken_over_where_both_have_one_of_a_kind(old, new, parts):
    old_config, config = (make_config(**{**TINY, **changes}) for changes in (old, new))
    assert taken_parts(config, old_config) == parts
    before, fresh = make_model(old_config, 257).init(), make_model(config, 257).init()
    before = jax.tree.map(lambda leaf: leaf + 1, before)
    merged = merge(fresh, config, before, old_config)
    assert jax.tree.structure(merged) == jax.tree.structure(fresh)
    blocks = zip(*(by_depth(*pair) for pair in ((merged, config), (before, old_config), (fresh, config))), strict=True)
    for depth, (block, was, start) in enumerate(blocks):
        assert_equal(block.get("block", block), was.get("block", was))
        for part in {"router", "predictor"} & block.keys():
            assert_equal(block[part], was[part] if depth in parts[part] else start[part])
