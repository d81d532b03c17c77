"""How fast a run is: tokens and FLOP/s, time left, and the share of the devices' peak.

A *rate* is measured since this process started, also after a resume. Model FLOP/s over the peak is the MFU; it carries
an asterisk unless the peak is published.
"""

import contextlib
import dataclasses
import math
import time
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from mod_jax.tuning import Peak, published_peak


class Throughput:
    """Rates and time left, since this process started.

    The clock starts when the first step has finished, so that its compilation counts nowhere. Time inside `pause()`
    (evaluation, saving) is left out of the rates, and kept in the time left, which will need as many pauses again.
    """

    def __init__(
        self, total_steps: int, tokens_per_step: int, flops_per_step: float, peak: Peak, clock=time.perf_counter
    ):
        self._total_steps, self._tokens_per_step, self._flops_per_step = total_steps, tokens_per_step, flops_per_step
        self._peak, self._clock, self._paused = peak, clock, 0.0
        self._first = self._last = None  # (step, time, seconds paused so far)

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Marks time that is not training."""
        start = self._clock()
        try:
            yield
        finally:
            self._paused += self._clock() - start

    def measure(self, step: int) -> dict[str, float]:
        """Call when `step` steps of the run are finished on the device: after the first, then as often as wanted.

        Returns `perf/` metrics: rates since the first call, `step_seconds` since the last one; {} from the first call.
        """
        now = (step, self._clock(), self._paused)
        first, last = self._first or now, self._last or now
        self._first, self._last = first, now
        if step == last[0]:
            return {}
        wall = (now[1] - first[1]) / (step - first[0])
        busy = wall - (now[2] - first[2]) / (step - first[0])
        metrics = {
            "perf/step_seconds": (now[1] - last[1] - (now[2] - last[2])) / (step - last[0]),
            "perf/tokens_per_second": self._tokens_per_step / busy,
            "perf/flops_per_second": self._flops_per_step / busy,
            "perf/eta_seconds": wall * max(self._total_steps - step, 0),
        }
        if self._peak.flops:
            metrics["perf/mfu"] = metrics["perf/flops_per_second"] / self._peak.flops
        return metrics


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
