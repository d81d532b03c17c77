"""What a person sees of a run: rows, lines, warnings, and the end of a run whose numbers went bad."""

import json
import math

import jax
import numpy as np
import pytest

from mod_jax import outputs
from mod_jax.errors import NumericsError
from mod_jax.training import watch as watch_lib
from mod_jax.training.interval import Interval
from mod_jax.training.rows import MetricWriter, read_metrics
from mod_jax.training.watch import Watch
from mod_jax.tuning import Peak

EXAMPLES = np.array([70, 12, 5, 31, 8, 9])


def step_metrics(loss=2.0, *, bad_steps=0, ratios=(0.5, 0.5), rate=0.1):
    """What a step of a model with routed blocks at depths 1 and 3 returns."""
    return {
        "train/loss": np.float32(math.nan if bad_steps else loss),
        "train/learning_rate": np.float32(rate),
        "train/finite": np.float32(not bad_steps),
        "train/bad_steps": np.int32(bad_steps),
        "train/finite_parts": np.array([True, True, not bad_steps, not bad_steps]),
        "routing/topk_fraction": np.array([0.25, 0.25], np.float32),
        "routing/update_ratio": np.array(ratios, np.float32),
    }


@pytest.fixture
def make_watch(tiny_config, tmp_path, monkeypatch):
    monkeypatch.setattr(watch_lib, "peak_of_devices", lambda devices: Peak(1e12, "test"))

    def make(first_step=0, interval=None, **changes):
        config = tiny_config(**{"train.log_every": 2, **changes})
        sizes = dict(num_steps=10, tokens_per_step=128, flops_per_step=1e6)
        writer = MetricWriter(tmp_path)
        return Watch(
            config,
            writer,
            first_step=first_step,
            **sizes,
            devices=jax.devices(),
            digest="ab12",
            interval=Interval(interval),
            part_names=["params/a", "router scores of block 1", "loss", "gradient of params/a"],
            commit="c0ffee",
        )

    return make


def rows(tmp_path):
    return read_metrics(tmp_path / "metrics.jsonl")


def test_rows_are_means_over_the_interval_and_carry_the_digest(make_watch, tmp_path, capsys):
    watch = make_watch()
    for step, loss in enumerate((5.0, 4.0, 2.0, 1.0), start=1):
        watch.after_step(step, step_metrics(loss, rate=step / 10), EXAMPLES)
    watch.flush()
    first, second, third = rows(tmp_path)  # step 1, the end of compilation; then intervals that end at 2 and 4
    assert [first["step"], second["step"], third["step"]] == [1, 2, 4]
    assert third["train/loss"] == 1.5  # (2 + 1) / 2
    assert third["train/learning_rate"] == pytest.approx(0.4)  # of the last step
    assert third["routing/block01/topk_fraction"] == third["routing/block03/topk_fraction"] == 0.25
    assert {row["data/digest"] for row in rows(tmp_path)} == {"ab12"}  # T22
    assert "step  4/10  loss 1.5000" in capsys.readouterr().out


def test_steps_and_tokens_count_from_the_run_s_start_and_rates_from_the_process_s(make_watch, tmp_path):
    watch = make_watch(first_step=4)
    for step in (5, 6, 7, 8):
        watch.after_step(step, step_metrics(), EXAMPLES)
    watch.flush()
    assert [row["step"] for row in rows(tmp_path)] == [6, 8]
    last = rows(tmp_path)[-1]
    assert last["train/tokens"] == 8 * 128
    assert last["train/flops"] == 8e6
    # Two steps are left; the rates count from step 5, the first of this process.
    seconds = [row["perf/step_seconds"] for row in rows(tmp_path)]
    assert last["perf/eta_seconds"] == pytest.approx(2 * (seconds[0] + 2 * seconds[1]) / 3, rel=1e-3)
    assert last["perf/tokens_per_second"] == pytest.approx(128 * 3 / (seconds[0] + 2 * seconds[1]), rel=1e-3)


def test_an_unfinished_interval_goes_on_after_a_resume(make_watch, tmp_path):
    watch = make_watch(**{"train.log_every": 4})
    for step, loss in enumerate((9.0, 1.0, 2.0), start=1):
        watch.after_step(step, step_metrics(loss), EXAMPLES)
    saved = json.loads(outputs.to_json(watch.unfinished()))
    assert [row["step"] for row in rows(tmp_path)] == [1]  # the save ended no interval
    resumed = make_watch(first_step=3, interval=saved, **{"train.log_every": 4})
    resumed.after_step(4, step_metrics(3.0), EXAMPLES)
    assert resumed.unfinished()["steps"] == 0  # the row of step 4 was due, and is on disk before a save
    first, second = rows(tmp_path)
    assert (first["step"], first["train/loss"]) == (1, 9.0)
    assert (second["step"], second["train/loss"]) == (4, 2.0)  # (1 + 2 + 3) / 3


def test_bad_steps_alone_are_kept_as_they_are_and_give_way_to_a_good_one(make_watch, tmp_path):
    watch = make_watch(**{"train.log_every": 4})
    watch.after_step(1, step_metrics(), EXAMPLES)
    watch.after_step(2, step_metrics(bad_steps=1), EXAMPLES)
    saved = json.loads(outputs.to_json(watch.unfinished()))
    assert math.isnan(float(saved["sums"]["train/loss"]))
    resumed = make_watch(first_step=2, interval=saved, **{"train.log_every": 4})
    resumed.after_step(3, step_metrics(5.0), EXAMPLES)
    resumed.flush()
    row = rows(tmp_path)[-1]
    assert (row["train/loss"], row["train/skipped_steps"]) == (5.0, 1)


def test_bad_steps_are_counted_and_left_out_of_means(make_watch, tmp_path):
    watch = make_watch(**{"train.log_every": 3})
    watch.after_step(1, step_metrics(), EXAMPLES)
    for step, metrics in ((2, step_metrics(3.0)), (3, step_metrics(bad_steps=1))):
        watch.after_step(step, metrics, EXAMPLES)
    watch.flush()
    row = rows(tmp_path)[-1]
    assert row["train/loss"] == 3.0
    assert row["train/skipped_steps"] == 1
    assert watch.bad_steps == 1
    watch.after_step(4, step_metrics(), EXAMPLES)
    watch.flush()
    assert watch.bad_steps == 0


def test_too_many_bad_steps_stop_the_run(make_watch, tmp_path):
    watch = make_watch(**{"train.max_bad_steps": 3})
    for step in (1, 2, 3):
        watch.after_step(step, step_metrics(bad_steps=step), EXAMPLES)
    with pytest.raises(NumericsError, match="3 consecutive steps up to step 3"):
        watch.flush()
    assert math.isnan(rows(tmp_path)[-1]["train/loss"])  # the row is there to be seen
    # The streak counts, not the sum: 2 bad, 1 good, 2 bad goes on.
    watch = make_watch(**{"train.max_bad_steps": 3})
    for step, bad_steps in enumerate((1, 2, 0, 1, 2), start=1):
        watch.after_step(step, step_metrics(bad_steps=bad_steps), EXAMPLES)
    watch.flush()


def test_an_alarm_is_said_once_and_not_before_a_part_of_the_run_has_passed(make_watch, tmp_path, capsys):
    watch = make_watch(**{"train.log_every": 10})
    for step in range(1, 71):
        watch.after_step(step, step_metrics(ratios=(34.0, 0.001)), EXAMPLES)
    watch.flush()
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("WARNING")] == [
        "WARNING block01: update/residual norm 34, it drowns the other blocks; try routing.gate=sigmoid; said once",
        "WARNING block03: update/residual norm 0.001, it has died; try a lower optimizer.learning_rate; said once",
    ]
    counts = {row["step"]: row.get("routing/block03/alarms") for row in rows(tmp_path)}
    assert counts == {1: None, 10: None, 20: None, 30: None, 40: None, 50: 1, 60: 1, 70: 1}
    healthy = make_watch(first_step=60)
    healthy.after_step(61, step_metrics(), EXAMPLES)
    healthy.flush()
    assert "WARNING" not in capsys.readouterr().out
