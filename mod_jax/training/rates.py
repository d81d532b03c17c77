"""How fast a run is: tokens and FLOP/s, time left, and the share of the devices' peak.

A *rate* is measured since this process started, also after a resume. Model FLOP/s over the peak is the MFU. It carries
an asterisk unless the peak is published: then the peak is the largest rate that was seen.
"""

import contextlib
import dataclasses
import functools
import math
import time
import types
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp

from mod_jax.tuning import Peak, published_peak


def seconds_compiling() -> float:
    """Seconds that XLA has compiled in this process since the first call."""
    return _compilations().total


@functools.cache
def _compilations() -> types.SimpleNamespace:
    counted = types.SimpleNamespace(total=0.0)

    def add(event: str, seconds: float, **_) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            counted.total += seconds

    jax.monitoring.register_event_duration_secs_listener(add)
    return counted


class Throughput:
    """Rates and time left, since this process started.

    The clock starts when the first step has finished, so that its compilation counts nowhere. Time inside `pause()` is
    left out of the rates. The time left holds the pauses to come, each as long as the shortest of its kind so far,
    without what XLA compiled in it: the first evaluation compiles.
    """

    def __init__(
        self,
        total_steps: int,
        tokens_per_step: int,
        flops_per_step: float,
        peak: Peak,
        pauses: dict[str, int] | None = None,
        clock=time.perf_counter,
        compiled: Callable[[], float] = seconds_compiling,
    ):
        """`pauses`: by kind, every how many steps one comes. All come at the last step too; those with 0 only there.

        `clock` gives the time, `compiled` how much of it this process has spent compiling so far, both in seconds.
        """
        self._total_steps, self._tokens_per_step, self._flops_per_step = total_steps, tokens_per_step, flops_per_step
        self._peak, self._pauses, self._clock, self._compiled = peak, pauses or {}, clock, compiled
        self._paused = 0.0
        self._shortest: dict[str, float] = {}  # seconds of a pause, by kind
        self._first = self._last = None  # (step, time, seconds paused so far)

    @contextlib.contextmanager
    def pause(self, kind: str = "") -> Iterator[None]:
        """Marks time that is not training. `kind`: of those that come again, as given to `__init__`."""
        start, compiled = self._clock(), self._compiled()
        try:
            yield
        finally:
            seconds = self._clock() - start
            self._paused += seconds
            again = max(seconds - (self._compiled() - compiled), 0.0)
            self._shortest[kind] = min(again, self._shortest.get(kind, math.inf))

    def measure(self, step: int) -> dict[str, float]:
        """Call when `step` steps of the run are finished on the device: after the first, then as often as wanted.

        Returns `perf/` metrics: rates since the first call, `step_seconds` since the last one; {} from the first call.
        """
        now = (step, self._clock(), self._paused)
        first, last = self._first or now, self._last or now
        self._first, self._last = first, now
        if step == last[0]:
            return {}
        busy = _busy_seconds(first, now)
        metrics = {
            "perf/step_seconds": _busy_seconds(last, now),
            "perf/tokens_per_second": self._tokens_per_step / busy,
            "perf/flops_per_second": self._flops_per_step / busy,
            "perf/eta_seconds": busy * max(self._total_steps - step, 0) + self._pauses_ahead(step),
        }
        if self._peak.flops:
            if not self._peak.published:  # measured beside other programs it may be too low: a step has shown more
                seen = self._flops_per_step / metrics["perf/step_seconds"]
                self._peak = dataclasses.replace(self._peak, flops=max(self._peak.flops, seen))
            metrics["perf/mfu"] = metrics["perf/flops_per_second"] / self._peak.flops
        return metrics

    def _pauses_ahead(self, step: int) -> float:
        """Seconds of all pauses after `step`; a kind that has not been seen yet counts nothing."""
        last = self._total_steps
        seconds = 0.0
        for kind, every in self._pauses.items():
            count = (1 + ((last - 1) // every - step // every if every else 0)) if step < last else 0
            seconds += count * self._shortest.get(kind, 0.0)
        return seconds


def _busy_seconds(start: tuple[int, float, float], end: tuple[int, float, float]) -> float:
    """Seconds of a step between two measurements, without the pauses."""
    return (end[1] - start[1] - (end[2] - start[2])) / (end[0] - start[0])


def peak_of_devices(devices: list[jax.Device]) -> Peak:
    """The peak of all devices together. On CPU it is measured, once per process: virtual devices share the cores."""
    if devices[0].platform == "cpu" and len(devices) > jax.process_count():
        return Peak(None, "virtual devices", published=False)
    if devices[0].platform == "cpu":
        measured = measure_matmul_peak()
        return dataclasses.replace(measured, flops=measured.flops * jax.process_count())
    kind = devices[0].device_kind
    peak = published_peak(kind)
    if peak is None:
        return Peak(None, f"no published peak for {kind}", published=False)
    return Peak(peak.flops * len(devices), f"{peak.name} bf16")


def measure_matmul_peak(size: int = 768, seconds: float = 0.25) -> Peak:
    """Best rate of a float32 matmul on the default device: a floor for the machine's peak, not a data sheet's."""
    multiply = jax.jit(jnp.matmul)
    x_DD = jnp.ones((size, size), jnp.float32)
    multiply(x_DD, x_DD).block_until_ready()
    best, deadline = math.inf, time.perf_counter() + seconds
    while (start := time.perf_counter()) < deadline:
        multiply(x_DD, x_DD).block_until_ready()
        best = min(best, time.perf_counter() - start)
    return Peak(2 * size**3 / best, "measured float32 matmul", published=False)
