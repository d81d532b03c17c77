"""Where a run's numbers go: metrics.jsonl, an optional tracker, one console line; and how fast the run is.

Vocabulary. A *row* is one line of metrics.jsonl, `{"step": 20, "train/loss": 2.4, ...}`; training and evaluation may
each write one for the same step. A *rate* is measured since this process started, also after a resume. The *peak* is
the most that the devices could do; model FLOP/s over peak is the MFU, with an asterisk unless the peak is published.
"""

import contextlib
import dataclasses
import datetime
import importlib
import json
import math
import os
import pathlib
import re
import sys
import time
import uuid
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tqdm
from absl import logging

from mod_jax.analysis.routing_stats import HEALTHY_UPDATE_RATIO
from mod_jax.config import ConfigError

# JSON has no such numbers: they are written as these strings, and read back as floats.
NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class MetricWriter:
    """Appends rows to `workdir/metrics.jsonl` and, if asked, to one tracker. Does nothing outside process 0."""

    def __init__(self, workdir: str | os.PathLike, tracker="none", config: dict[str, Any] | None = None, run_name=""):
        """`tracker`: as in train.tracker. `config`: the flat config, for the tracker. `run_name`: '' for the workdir's.

        Raises:
          ConfigError: the tracker's package is not installed.
        """
        self._file = self._tracker = None
        if jax.process_index() != 0:
            return
        workdir = pathlib.Path(workdir).resolve()
        workdir.mkdir(parents=True, exist_ok=True)
        self._path = workdir / "metrics.jsonl"
        resumed = self._path.exists()
        self._open_after(math.inf)
        if tracker != "none":
            with self._tracking():
                self._tracker = _TRACKERS[tracker](workdir, config or {}, run_name or workdir.name, resumed)

    def write(self, step: int, metrics: dict[str, Any]) -> None:
        """Adds a row. Values are scalars (Python, NumPy or JAX) or strings; a tracker gets the finite numbers."""
        if self._file is None:
            return
        row = {name: _to_json(value) for name, value in metrics.items()}
        self._file.write(json.dumps({"step": int(step)} | row, allow_nan=False) + "\n")
        self._file.flush()
        with self._tracking():
            if self._tracker is not None:
                self._tracker.log({k: v for k, v in row.items() if not isinstance(v, str)}, step=int(step))

    def truncate_after(self, step: int) -> None:
        """Drops rows of steps that the run is about to repeat. `step`: the step restored; -1 drops every row."""
        if self._file is not None:
            self._file.close()
            self._open_after(step)

    def flush(self) -> None:
        """Makes every row written so far survive a power cut."""
        if self._file is not None:
            os.fsync(self._file.fileno())

    def close(self) -> None:
        if self._file is None:
            return
        self.flush()
        self._file.close()
        with self._tracking():
            if self._tracker is not None:
                self._tracker.finish()
        self._file = self._tracker = None

    def _open_after(self, step: float) -> None:
        """Rewrites the file without rows after `step` and without a half-written last line, then opens it to append."""
        if self._path.exists():
            partial = self._path.with_suffix(".partial")
            with partial.open("w", encoding="utf-8") as file:
                file.writelines(line for line, row in _parse(self._path) if row["step"] <= step)
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, self._path)
        self._file = self._path.open("a", encoding="utf-8")

    @contextlib.contextmanager
    def _tracking(self) -> Iterator[None]:
        """A tracker that fails is switched off with one warning: it must not cost the run."""
        try:
            yield
        except ConfigError:
            raise
        except Exception as error:
            self._tracker = None
            logging.warning("tracker switched off, metrics.jsonl goes on: %s: %s", type(error).__name__, error)


def read_metrics(path: str | os.PathLike) -> list[dict[str, Any]]:
    """The rows of a metrics.jsonl, in the order written; "NaN", "Infinity" and "-Infinity" become floats again."""
    return [
        {name: NON_FINITE.get(value, value) if isinstance(value, str) else value for name, value in row.items()}
        for _, row in _parse(pathlib.Path(path))
    ]


def _parse(path: pathlib.Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields each line with its row. A half-written last line (a killed run) is passed over, others are announced."""
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith("\n"):
                return
            try:
                row = json.loads(line)
            except ValueError:
                row = None
            if isinstance(row, dict) and isinstance(row.get("step"), int):
                yield line, row
            else:
                logging.warning("%s:%d is not a row of metrics, passed over: %.60r", path, number, line)


def _to_json(value: Any) -> Any:
    value = value if isinstance(value, str) else np.asarray(value).item()
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


class _TensorBoard:
    """tensorboardX behind the two methods that the runs of wandb and trackio have."""

    def __init__(self, workdir: pathlib.Path, config: dict[str, Any], run_name: str, resumed: bool):
        del run_name, resumed
        self._writer = _import("tensorboardX", "tensorboard").SummaryWriter(str(workdir / "tensorboard"))
        self._writer.add_text("config", "\n".join(f"    {name} = {value!r}" for name, value in config.items()))

    def log(self, metrics: dict[str, float], step: int) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def finish(self) -> None:
        self._writer.close()


def _start_wandb(workdir: pathlib.Path, config: dict[str, Any], run_name: str, resumed: bool) -> Any:
    wandb = _import("wandb", "wandb")
    id_file = workdir / "wandb" / "run_id"  # wandb continues a run by its id only
    if not (resumed and id_file.exists()):
        id_file.parent.mkdir(exist_ok=True)
        id_file.write_text(uuid.uuid4().hex[:12])
    return wandb.init(
        project="mod_jax", name=run_name, config=config, dir=workdir, id=id_file.read_text(), resume="allow"
    )


def _start_trackio(workdir: pathlib.Path, config: dict[str, Any], run_name: str, resumed: bool) -> Any:
    del workdir
    trackio = _import("trackio", "trackio")
    return trackio.init(project="mod_jax", name=run_name, config=config, resume="allow" if resumed else "never")


_TRACKERS = dict(tensorboard=_TensorBoard, wandb=_start_wandb, trackio=_start_trackio)


def _import(package: str, extra: str) -> Any:
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise ConfigError(f"config.train.tracker = {extra!r}: {error}; pip install -e '.[{extra}]'") from error


@dataclasses.dataclass(frozen=True)
class Peak:
    """The most FLOP/s that the devices could do; None where nobody knows. `published`: from the maker's data sheet."""

    flops: float | None
    name: str
    published: bool = True


# Dense bfloat16 FLOP/s of one JAX device. A key matches a device kind that has all its words; most words win.
PEAK_FLOPS = {
    "TPU v3": Peak(61.5e12, "TPU v3"),  # a device is one of the chip's two cores
    "TPU v4": Peak(275e12, "TPU v4"),
    "TPU v5 lite": Peak(197e12, "TPU v5e"),
    "TPU v5e": Peak(197e12, "TPU v5e"),
    "TPU v5": Peak(459e12, "TPU v5p"),
    "TPU v5p": Peak(459e12, "TPU v5p"),
    "TPU v6 lite": Peak(918e12, "TPU v6e"),
    "TPU v6e": Peak(918e12, "TPU v6e"),
    "TPU7x": Peak(2307e12 / 2, "TPU v7x"),  # a device is one of the chip's two chiplets
    "A100": Peak(312e12, "A100"),
    "L4": Peak(121e12, "L4"),
    "L40S": Peak(362e12, "L40S"),
    "H100": Peak(989e12, "H100 SXM"),
    "H100 NVL": Peak(835e12, "H100 NVL"),
    "H100 PCIe": Peak(756e12, "H100 PCIe"),
    "H200": Peak(989e12, "H200"),
    "B200": Peak(2250e12, "B200"),
}


def peak_flops(device_kind: str) -> float | None:
    """Published peak of one device of this kind (`jax.Device.device_kind`), or None."""
    peak = _published_peak(device_kind)
    return None if peak is None else peak.flops


def peak_of_devices(devices: list[jax.Device]) -> Peak:
    """The peak of all devices together. On CPU it is measured, once per process: virtual devices share the cores."""
    if devices[0].platform == "cpu" and len(devices) > jax.process_count():
        return Peak(None, "virtual devices", published=False)
    if devices[0].platform == "cpu":
        measured = measure_matmul_peak()
        return dataclasses.replace(measured, flops=measured.flops * jax.process_count())
    kind = devices[0].device_kind
    peak = _published_peak(kind)
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


def _published_peak(device_kind: str) -> Peak | None:
    words = set(re.split(r"[^a-z0-9]+", device_kind.lower()))
    found = [key for key in PEAK_FLOPS if words >= set(key.lower().split()) and "mig" not in words]
    return PEAK_FLOPS[max(found, key=lambda key: len(key.split()))] if found else None


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


class Console:
    """One line per log interval on stdout: plain lines in a log file, one line redrawn under a bar on a terminal."""

    def __init__(self, total_steps: int, first_step: int, peak: Peak, stream: Any = None):
        self._total_steps, self._peak = total_steps, peak
        self._stream = stream or sys.stdout
        self._silent = jax.process_index() != 0
        self._bar = None
        if self._stream.isatty() and not self._silent:
            layout = "{percentage:3.0f}% {bar:10} {desc}"
            self._bar = tqdm.tqdm(
                total=total_steps, initial=first_step, file=self._stream, bar_format=layout, dynamic_ncols=True
            )

    def log(self, step: int, metrics: dict[str, Any]) -> None:
        line = format_line(step, self._total_steps, metrics, self._peak)
        if self._bar is None:
            return self.say(line)
        self._bar.set_description_str(line, refresh=False)
        self._bar.n = step
        self._bar.refresh()

    def say(self, text: str) -> None:
        """Prints a line that stays, above the bar if there is one."""
        if not self._silent:
            tqdm.tqdm.write(text, file=self._stream)
            self._stream.flush()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


def format_line(step: int, total_steps: int, metrics: dict[str, Any], peak: Peak) -> str:
    """The numbers worth watching, most important first; what is not in `metrics` is left out."""
    parts = [f"step {step:>{len(str(total_steps))}}/{total_steps}"]

    def add(name, text):
        if name in metrics:
            parts.append(text(float(metrics[name])))

    add("train/loss", "loss {:.4f}".format)
    add("train/learning_rate", "lr {:.2e}".format)
    add("perf/tokens_per_second", lambda rate: f"{_si(rate)}tok/s")
    add("perf/flops_per_second", lambda rate: f"{rate / 1e12:.3g} TFLOP/s")
    star = "" if peak.published else "*"
    add("perf/mfu", lambda mfu: f"MFU {mfu:.1%}{star} of {peak.name}")
    if peak.flops is None and "perf/flops_per_second" in metrics:
        parts.append(f"MFU unknown ({peak.name})")
    add("perf/eta_seconds", lambda seconds: f"ETA {datetime.timedelta(seconds=round(seconds))}")
    fractions = _per_block(metrics, "topk_fraction")
    if fractions:
        parts.append(f"routed {np.mean(list(fractions.values())):.1%}")
    ratios = _per_block(metrics, "update_ratio")
    if ratios:
        block, ratio = max(ratios.items(), key=lambda item: _distance_from_health(item[1]))
        alarm = "" if HEALTHY_UPDATE_RATIO[0] <= ratio <= HEALTHY_UPDATE_RATIO[1] else " (!)"
        parts.append(f"update/residual {ratio:.2g} in {block}{alarm}")
    return "  ".join(parts)


def _per_block(metrics: dict[str, Any], name: str) -> dict[str, float]:
    pattern = re.compile(rf"routing/(block\d+)/{name}")
    return {match[1]: float(value) for key, value in metrics.items() if (match := pattern.fullmatch(key))}


def _distance_from_health(ratio: float) -> float:
    """How many e-folds the ratio lies from the middle of the healthy band; infinite for 0, NaN and infinity."""
    middle = math.log(math.prod(HEALTHY_UPDATE_RATIO)) / 2
    return abs(math.log(ratio) - middle) if 0 < ratio < math.inf else math.inf


def _si(number: float) -> str:
    for factor, prefix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= factor:
            return f"{number / factor:.3g} {prefix}"
    return f"{number:.3g} "
