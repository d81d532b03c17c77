"""Runs with experts that are stopped and go on: bit for bit the run that never stopped, cut-offs and rows included."""

import jax
import numpy as np
import pytest
from tiny import TINY

from mod_jax.config import make_config
from mod_jax.training import prepare
from mod_jax.training.checkpoint import Checkpointer
from mod_jax.training.loop import Outcome, train
from mod_jax.training.preemption import PreemptionGuard
from mod_jax.training.rows import read_metrics

CHANGES = {
    "model.layout": "Ee",
    "model.depth": 2,
    "experts.count": 4,
    "data.eval_windows": 8,
    "train.steps": 6,
    "train.log_every": 4,  # so that the stop is inside an interval
    "train.save_every": 0,
    "train.eval_every": 0,
    "routing.predictor": False,
    "mesh.data": 1,
}
VARIANTS = {
    "experts that choose": {"experts.choice": "expert", "experts.capacity": 0.5},
    "integrated": {"model.layout": "E", "experts.noop": 4, "experts.capacity": 0.625},
    "paced": {"experts.overflow": "paced", "experts.capacity": 0.5, "train.accumulation": 2},
}


def left_by(workdir, config):
    """(the newest state as NumPy arrays, the rows without what depends on the clock)."""
    run = prepare.prepare_run(config, workdir)
    with Checkpointer(run.workdir / "checkpoints", read_only=True) as checkpointer:
        state = jax.device_get(checkpointer.restore(run.abstract_state).state)
    rows = [
        {name: value for name, value in row.items() if not name.startswith("perf/")}
        for row in read_metrics(run.workdir / "metrics.jsonl")
    ]
    return state, rows


@pytest.mark.slow
@pytest.mark.parametrize("name", VARIANTS)
def test_a_stopped_run_goes_on_bit_for_bit(tmp_path, monkeypatch, name):
    config = make_config(**{**TINY, **CHANGES, **VARIANTS[name]})
    assert train(config, tmp_path / "whole") is Outcome.DONE
    with monkeypatch.context() as patch:
        patch.setattr(PreemptionGuard, "requested", lambda guard, step: step == 2)
        assert train(config, tmp_path / "stopped") is Outcome.PREEMPTED
    assert train(config, tmp_path / "stopped") is Outcome.DONE
    (whole, rows), (stopped, other_rows) = (left_by(tmp_path / n, config) for n in ("whole", "stopped"))
    assert jax.tree.structure(stopped) == jax.tree.structure(whole)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b, strict=True), stopped, whole)
    assert rows == other_rows
    assert [row["step"] for row in rows if "train/loss" in row] == [1, 4, 6]
    assert "experts/block00/smallest_load" in rows[0]
    if name == "experts that choose":
        assert whole.expert_cutoffs_LE.shape == (2, 4)
        assert (whole.expert_cutoffs_LE > 0).all()
    assert (tmp_path / "whole" / "report" / "experts_of_tokens.png").is_file()
