"""Metrics survive kills and broken trackers; rates, time left and MFU are honest after a resume."""

import io
import json
import math
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mod_jax.config import ConfigError
from mod_jax.training import metrics

PEAK = metrics.Peak(1e12, "TPU v9 bf16")


def _steps(workdir):
    return [row["step"] for row in metrics.read_metrics(workdir / "metrics.jsonl")]


def test_rows_come_back_as_written(tmp_path):
    writer = metrics.MetricWriter(tmp_path)
    writer.write(1, {"train/loss": jnp.float32(2.5), "train/tokens": np.int64(2**40), "data/digest": "ab12"})
    writer.write(2, {"train/loss": jnp.nan, "train/grad_norm": -np.inf, "train/z": jnp.bfloat16(0.5)})
    writer.close()
    first, second = metrics.read_metrics(tmp_path / "metrics.jsonl")
    assert first == {"step": 1, "train/loss": 2.5, "train/tokens": 2**40, "data/digest": "ab12"}
    assert math.isnan(second["train/loss"])
    assert second["train/grad_norm"] == -math.inf
    assert second["train/z"] == 0.5


def test_every_line_is_strict_json(tmp_path):
    writer = metrics.MetricWriter(tmp_path)
    writer.write(1, {"train/loss": math.nan, "train/grad_norm": math.inf})

    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    line = (tmp_path / "metrics.jsonl").read_text()  # on disk before close
    assert json.loads(line, parse_constant=refuse) == {"step": 1, "train/loss": "NaN", "train/grad_norm": "Infinity"}


def test_resume_drops_the_rows_that_will_be_repeated(tmp_path):
    writer = metrics.MetricWriter(tmp_path)
    for step in (10, 20, 20, 30, 40):
        writer.write(step, {"train/loss": 1.0})
    writer.close()
    resumed = metrics.MetricWriter(tmp_path)
    resumed.truncate_after(20)
    resumed.write(30, {"train/loss": 2.0})
    resumed.close()
    assert _steps(tmp_path) == [10, 20, 20, 30]
    assert metrics.read_metrics(tmp_path / "metrics.jsonl")[-1]["train/loss"] == 2.0
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]  # nothing left of the rewrite


@pytest.mark.parametrize("end", ['{"step": 20, "trai', '{"step": 20}', "\x00\x00"])
def test_half_written_last_line_does_not_spoil_the_next_row(tmp_path, caplog, end):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 10, "train/loss": 3.0}\n' + end)
    assert _steps(tmp_path) == [10]
    assert caplog.text == ""  # nothing unusual: the run may be writing right now
    writer = metrics.MetricWriter(tmp_path)
    writer.write(20, {"train/loss": 2.0})
    writer.close()
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [10, 20]


def test_bad_line_in_the_middle_is_announced(tmp_path, caplog):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 10}\n\x00\x00\x00\n{"no_step": 1}\n{"step": 20}\n')
    assert _steps(tmp_path) == [10, 20]
    assert "metrics.jsonl:2" in caplog.text
    assert "metrics.jsonl:3" in caplog.text


def test_only_process_0_writes(tmp_path, monkeypatch):
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    writer = metrics.MetricWriter(tmp_path, tracker="wandb")
    writer.write(1, {"train/loss": 1.0})
    writer.truncate_after(0)
    writer.flush()
    writer.close()
    assert list(tmp_path.iterdir()) == []
    stream = io.StringIO()
    console = metrics.Console(10, 0, PEAK, stream)
    console.log(1, {})
    assert stream.getvalue() == ""


@pytest.mark.parametrize("tracker", ["tensorboard", "wandb", "trackio"])
def test_missing_tracker_package_says_what_to_install(tmp_path, monkeypatch, tracker):
    monkeypatch.setitem(sys.modules, "tensorboardX" if tracker == "tensorboard" else tracker, None)
    with pytest.raises(ConfigError, match=rf"train\.tracker = '{tracker}'.*pip install -e '\.\[{tracker}\]'"):
        metrics.MetricWriter(tmp_path, tracker=tracker)


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
    writer = metrics.MetricWriter(tmp_path, tracker="wandb", config={"seed": 3}, run_name="first")
    writer.write(5, {"train/loss": jnp.float32(1.5), "train/z": math.nan, "data/digest": "ab12"})
    writer.close()
    assert run.logged == [(5, {"train/loss": 1.5})]
    assert run.finished
    assert calls[0]["config"] == {"seed": 3}
    assert calls[0]["name"] == "first"


def test_resumed_run_continues_the_same_wandb_run_and_a_fresh_one_does_not(tmp_path, monkeypatch):
    calls = _fake_wandb(monkeypatch, _FakeRun())
    for _ in range(2):
        metrics.MetricWriter(tmp_path, tracker="wandb").close()
    (tmp_path / "metrics.jsonl").unlink()
    metrics.MetricWriter(tmp_path, tracker="wandb").close()
    first, second, fresh = (call["id"] for call in calls)
    assert first == second != fresh


def test_tracker_that_fails_is_switched_off_with_one_warning(tmp_path, monkeypatch, caplog):
    run = _FakeRun(fail_at=2)
    _fake_wandb(monkeypatch, run)
    writer = metrics.MetricWriter(tmp_path, tracker="wandb")
    for step in (1, 2, 3, 4):
        writer.write(step, {"train/loss": 1.0})
    writer.close()
    assert _steps(tmp_path) == [1, 2, 3, 4]
    assert [step for step, _ in run.logged] == [1]
    assert caplog.text.count("tracker switched off") == 1


def test_tensorboard_files_appear(tmp_path):
    pytest.importorskip("tensorboardX")
    writer = metrics.MetricWriter(tmp_path, tracker="tensorboard", config={"seed": 0})
    writer.write(1, {"train/loss": 1.0})
    writer.close()
    (events,) = (tmp_path / "tensorboard").iterdir()
    assert b"train/loss" in events.read_bytes()


@pytest.mark.parametrize(
    ("device_kind", "expected"),
    [
        ("TPU v4", 275e12),
        ("TPU v5 lite", 197e12),
        ("TPU v5", 459e12),
        ("TPU v5p", 459e12),
        ("TPU v6 lite", 918e12),
        ("TPU7x", 1153.5e12),  # 2307 per chip, two devices a chip
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA B200", 2250e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA L40S", 362e12),
        ("cpu", None),
        ("NVIDIA A1000", None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),  # a slice of the card has a slice of its peak
        ("TPU v99", None),
    ],
)
def test_peak_is_that_of_the_device(device_kind, expected):
    assert metrics.peak_flops(device_kind) == expected


def test_peak_of_devices_adds_up_names_itself_and_admits_ignorance():
    def devices(kind, count):
        return [types.SimpleNamespace(device_kind=kind, platform="tpu")] * count

    assert metrics.peak_of_devices(devices("TPU v5 lite", 8)) == metrics.Peak(8 * 197e12, "TPU v5e bf16")
    unknown = metrics.peak_of_devices(devices("TPU v99", 8))
    assert unknown.flops is None
    assert not unknown.published
    cpu = metrics.peak_of_devices(jax.devices("cpu")[:1])
    assert 1e8 < cpu.flops < 1e14
    assert cpu.name == "measured float32 matmul"
    assert not cpu.published
    assert metrics.peak_of_devices(jax.devices("cpu")).flops is None  # virtual devices share the cores


class _Clock:
    now = 0.0

    def __call__(self):
        return self.now


def _meter(total_steps=1000):
    clock = _Clock()
    return clock, metrics.Throughput(total_steps, 100, 5e11, PEAK, clock)


def test_compilation_of_the_first_step_counts_nowhere():
    clock, meter = _meter()
    clock.now = 60.0  # a minute to compile and run step 1
    assert meter.measure(1) == {}
    clock.now = 64.0  # 2 steps in 4 s
    assert meter.measure(3) == {
        "perf/step_seconds": 2.0,
        "perf/tokens_per_second": 50.0,
        "perf/flops_per_second": 2.5e11,
        "perf/mfu": 0.25,
        "perf/eta_seconds": 997 * 2.0,
    }


def test_rates_and_time_left_after_a_resume_ignore_the_steps_of_the_earlier_process():
    clock, meter = _meter()
    meter.measure(901)  # resumed at step 900
    clock.now = 10.0
    found = meter.measure(911)  # 10 steps in 10 s, 89 to go
    assert found["perf/tokens_per_second"] == 100.0
    assert found["perf/eta_seconds"] == 89.0


def test_pauses_slow_the_run_but_not_the_rates():
    clock, meter = _meter()
    with meter.pause():  # an evaluation before the first step
        clock.now = 100.0
    meter.measure(0)
    clock.now = 110.0  # 10 steps of 1 s
    meter.measure(10)
    with meter.pause():
        clock.now = 120.0
    clock.now = 130.0  # 10 more
    found = meter.measure(20)
    assert found["perf/step_seconds"] == 1.0
    assert found["perf/tokens_per_second"] == 100.0
    assert found["perf/eta_seconds"] == 980 * 1.5  # 20 steps took 30 s in all


def test_last_interval_shows_a_slowdown():
    clock, meter = _meter()
    meter.measure(0)
    clock.now = 10.0
    meter.measure(10)
    clock.now = 50.0
    found = meter.measure(20)
    assert found["perf/step_seconds"] == 4.0
    assert found["perf/tokens_per_second"] == 40.0  # 20 steps in 50 s


ROW = {
    "train/loss": 1.64841,
    "train/learning_rate": 2.913e-3,
    "perf/tokens_per_second": 412_345.0,
    "perf/flops_per_second": 1.214e12,
    "perf/mfu": 0.3824,
    "perf/eta_seconds": 3753.4,
    "routing/block01/topk_fraction": 0.12,
    "routing/block03/topk_fraction": 0.14,
    "routing/block01/update_ratio": 0.3,
    "routing/block03/update_ratio": 34.0,
}


def test_line_by_hand():
    assert metrics.format_line(1200, 40000, ROW, PEAK) == (
        "step  1200/40000  loss 1.6484  lr 2.91e-03  412 ktok/s  1.21 TFLOP/s  MFU 38.2% of TPU v9 bf16  "
        "ETA 1:02:33  routed 13.0%  update/residual 34 in block03 (!)"
    )
    assert metrics.format_line(1, 8, {"train/loss": math.nan}, PEAK) == "step 1/8  loss nan"


def test_t17_mfu_without_a_published_peak_carries_an_asterisk():
    unknown = metrics.Peak(None, "no published peak for TPU v99", published=False)
    rates = {"perf/flops_per_second": 1e12}
    assert "MFU unknown (no published peak for TPU v99)" in metrics.format_line(1, 8, rates, unknown)
    measured = metrics.Peak(1e11, "measured float32 matmul", published=False)
    assert "MFU 31.0%* of measured float32 matmul" in metrics.format_line(1, 8, {"perf/mfu": 0.31}, measured)


@pytest.mark.parametrize(
    ("ratios", "shown"),
    [
        ((0.3, 0.002), "update/residual 0.002 in block01 (!)"),  # dead
        ((6.0, 0.3), "update/residual 6 in block00 (!)"),  # takes over
        ((0.3, 0.0), "update/residual 0 in block01 (!)"),
        ((0.3, math.nan), "update/residual nan in block01 (!)"),
        ((0.2, 1.5), "update/residual 1.5 in block01"),
    ],
)
def test_line_shows_the_least_healthy_block(ratios, shown):
    row = {f"routing/block{i:02d}/update_ratio": ratio for i, ratio in enumerate(ratios)}
    assert metrics.format_line(1, 8, row, PEAK).endswith(shown)


def test_console_prints_lines_to_a_file_and_redraws_one_on_a_terminal():
    log_file = io.StringIO()
    console = metrics.Console(100, 0, PEAK, log_file)
    console.log(10, ROW)
    console.say("saved step 10")
    console.close()
    assert log_file.getvalue().splitlines() == [metrics.format_line(10, 100, ROW, PEAK), "saved step 10"]

    terminal = io.StringIO()
    terminal.isatty = lambda: True
    console = metrics.Console(100, 40, PEAK, terminal)
    assert "\r 40% " in terminal.getvalue()  # resumed at step 40
    console.log(50, {"train/loss": 1.5})
    console.say("saved step 50")
    console.close()
    shown = terminal.getvalue()
    assert "\r 50% " in shown  # of the whole run, not of this process
    assert "step  50/100  loss 1.5000" in shown
    assert "saved step 50\n" in shown
