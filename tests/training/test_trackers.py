"""Trackers get the finite numbers, and one that fails does not cost the run."""

import math
import struct
import sys
import time
import types

import jax.numpy as jnp
import pytest

from mod_jax.errors import ConfigError
from mod_jax.training.rows import MetricWriter, read_metrics


def _steps(workdir):
    return [row["step"] for row in read_metrics(workdir / "metrics.jsonl")]


@pytest.mark.parametrize("tracker", ["tensorboard", "wandb", "trackio"])
def test_missing_tracker_package_says_what_to_install(tmp_path, monkeypatch, tracker):
    monkeypatch.setitem(sys.modules, "tensorboardX" if tracker == "tensorboard" else tracker, None)
    with pytest.raises(ConfigError, match=rf"train\.tracker = '{tracker}'.*pip install -e '\.\[{tracker}\]'"):
        MetricWriter(tmp_path, tracker=tracker)


class _FakeRun:
    def __init__(self, fail_at=math.inf):
        self.logged, self.finished, self.fail_at = [], False, fail_at

    def log(self, row, step):
        if step >= self.fail_at:
            raise ConnectionError("server went away")
        self.logged.append((step, row))

    def finish(self):
        self.finished = True


def _fake_wandb(monkeypatch, run):
    calls = []
    module = types.ModuleType("wandb")
    module.init = lambda **kwargs: calls.append(kwargs) or run
    monkeypatch.setitem(sys.modules, "wandb", module)
    return calls


def test_tracker_gets_the_finite_numbers(tmp_path, monkeypatch):
    run = _FakeRun()
    calls = _fake_wandb(monkeypatch, run)
    writer = MetricWriter(tmp_path, tracker="wandb", config={"seed": 3}, run_name="first")
    writer.write(5, {"train/loss": jnp.float32(1.5), "train/z": math.nan, "data/digest": "ab12"})
    writer.close()
    assert run.logged == [(5, {"train/loss": 1.5})]
    assert run.finished
    assert calls[0]["config"] == {"seed": 3}
    assert calls[0]["name"] == "first"


def test_resumed_run_continues_the_same_wandb_run_and_a_fresh_one_does_not(tmp_path, monkeypatch):
    calls = _fake_wandb(monkeypatch, _FakeRun())
    for _ in range(2):
        MetricWriter(tmp_path, tracker="wandb").close()
    (tmp_path / "metrics.jsonl").unlink()
    MetricWriter(tmp_path, tracker="wandb").close()
    first, second, fresh = (call["id"] for call in calls)
    assert first == second != fresh


def test_tracker_that_fails_is_switched_off_with_one_warning(tmp_path, monkeypatch, caplog):
    run = _FakeRun(fail_at=2)
    _fake_wandb(monkeypatch, run)
    writer = MetricWriter(tmp_path, tracker="wandb")
    for step in (1, 2, 3, 4):
        writer.write(step, {"train/loss": 1.0})
    writer.close()
    assert _steps(tmp_path) == [1, 2, 3, 4]
    assert [step for step, _ in run.logged] == [1]
    assert caplog.text.count("tracker switched off") == 1


def _events(workdir):
    """Of all files that a run left for TensorBoard, in the order in which it reads them."""
    from tensorboardX.proto.event_pb2 import Event

    for path in sorted((workdir / "tensorboard").iterdir()):
        data = path.read_bytes()
        while data:
            (length,) = struct.unpack("<Q", data[:8])
            yield Event.FromString(data[12 : 12 + length])
            data = data[12 + length + 4 :]


def _shown_steps(workdir):
    """Steps of train/loss that TensorBoard shows: the start of a session hides earlier events from its step on."""
    steps = []
    for event in _events(workdir):
        if event.HasField("session_log"):
            steps = [step for step in steps if step < event.step]
        steps += [event.step for value in event.summary.value if value.tag == "train/loss"]
    return steps


def test_tensorboard_shows_no_step_twice_and_loses_none_when_a_run_was_killed(tmp_path):
    pytest.importorskip("tensorboardX")
    killed = MetricWriter(tmp_path, tracker="tensorboard", config={"seed": 0}, resumed_at=0)
    for step in (1, 2, 3):
        killed.write(step, {"train/loss": 1.0})
    while _shown_steps(tmp_path) != [1, 2, 3]:  # soon on disk, though nobody closes it
        time.sleep(0.1)
    resumed = MetricWriter(tmp_path, tracker="tensorboard", config={"seed": 0}, resumed_at=1)
    resumed.write(2, {"train/loss": 1.0})
    resumed.close()
    assert _shown_steps(tmp_path) == [1, 2]
