"""Rates, time left and MFU are honest after a resume."""

import types

import jax
import jax.numpy as jnp
import pytest

from mod_jax.training import rates
from mod_jax.training.rates import Throughput, peak_of_devices
from mod_jax.tuning import Peak, peak_flops

PEAK = Peak(1e12, "TPU v9 bf16")


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
    assert peak_flops(device_kind) == expected


def test_peak_of_devices_adds_up_names_itself_and_admits_ignorance():
    def devices(kind, count):
        return [types.SimpleNamespace(device_kind=kind, platform="tpu")] * count

    assert peak_of_devices(devices("TPU v5 lite", 8)) == Peak(8 * 197e12, "TPU v5e bf16")
    unknown = peak_of_devices(devices("TPU v99", 8))
    assert unknown.flops is None
    assert not unknown.published
    cpu = peak_of_devices(jax.devices("cpu")[:1])
    assert 1e8 < cpu.flops < 1e14
    assert cpu.name == "measured float32 matmul"
    assert not cpu.published
    assert peak_of_devices(jax.devices("cpu")).flops is None  # virtual devices share the cores


class _Clock:
    now = 0.0

    def __call__(self):
        return self.now


def _meter(total_steps=1000, peak=PEAK, pauses=None):
    clock = _Clock()
    return clock, Throughput(total_steps, 100, 5e11, peak, pauses, clock)


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
    assert found["perf/eta_seconds"] == 980  # these pauses do not come again


def test_time_left_holds_the_evaluations_and_saves_to_come_and_does_not_jump_after_one():
    clock = _Clock()
    compiled = _Clock()
    meter = Throughput(100, 100, 5e11, PEAK, {"evaluation": 20, "save": 0}, clock, compiled)

    def evaluate(seconds, compiling=0.0):
        with meter.pause("evaluation"):
            clock.now += seconds + compiling
            compiled.now += compiling

    def train(step):
        clock.now += 10.0  # 10 steps of 1 s
        return meter.measure(step)["perf/eta_seconds"]

    meter.measure(0)
    evaluate(9.0, compiling=60.0)
    assert train(10) == 90 + 5 * 9  # at 20, 40, 60, 80, 100
    assert train(20) == 80 + 4 * 9  # the one at 20 is taken for begun
    evaluate(3.0)
    assert train(30) == 70 + 4 * 3
    assert train(40) == 60 + 3 * 3
    evaluate(3.0)
    assert train(50) == 50 + 3 * 3
    with meter.pause("save"):
        clock.now += 2.0
    assert train(60) == 40 + 2 * 3 + 2  # saves with 0: at the end alone
    clock.now += 30.0
    assert train(100) == 0


@pytest.mark.parametrize("published", [True, False])
def test_a_measured_peak_is_a_floor_so_no_mfu_above_one_is_told_as_a_fact(published):
    clock, meter = _meter(peak=Peak(1e11, "measured float32 matmul", published=published))
    meter.measure(0)
    clock.now = 2.0
    assert meter.measure(1)["perf/mfu"] == (2.5 if published else 1.0)  # 2.5e11 FLOP/s seen: the peak is no less
    clock.now = 12.0
    if not published:
        assert meter.measure(2)["perf/mfu"] == pytest.approx((1e12 / 12) / 2.5e11)  # of the largest rate seen


def test_last_interval_shows_a_slowdown():
    clock, meter = _meter()
    meter.measure(0)
    clock.now = 10.0
    meter.measure(10)
    clock.now = 50.0
    found = meter.measure(20)
    assert found["perf/step_seconds"] == 4.0
    assert found["perf/tokens_per_second"] == 40.0  # 20 steps in 50 s


def test_time_spent_compiling_is_counted_whatever_compiles():
    before = rates.seconds_compiling()
    jax.jit(lambda x: x * 3 + 1).lower(jnp.ones(5)).compile()
    after = rates.seconds_compiling()
    assert after > before
    assert rates.seconds_compiling() == after
