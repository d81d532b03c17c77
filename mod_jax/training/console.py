"""What a person sees while a run goes on: one line per log interval, under a bar on a terminal."""

import datetime
import math
import os
import re
import sys
from typing import Any

import jax
import numpy as np
import tqdm

from mod_jax.analysis.expert_stats import DEAD_LOAD
from mod_jax.analysis.routing_stats import HEALTHY_UPDATE_RATIO
from mod_jax.tuning import Peak


class Console:
    """One line per log interval on stdout: plain lines in a log file, one line redrawn under a bar on a terminal."""

    def __init__(self, total_steps: int, first_step: int, peak: Peak, stream: Any = None):
        self._total_steps, self._peak = total_steps, peak
        self._stream = stream or sys.stdout
        self._silent = jax.process_index() != 0 or self._stream is None  # Python has none where it was closed
        self._bar = None
        if peak.flops is not None and not peak.published:
            self.say(f"* MFU is the share of the {peak.name} rate: a floor of the real peak, so an upper bound")
        if not self._silent and can_redraw(self._stream):
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


def can_redraw(stream: Any) -> bool:
    """Whether a bar can be drawn there: on a terminal that moves its cursor and says how wide it is."""
    if not stream.isatty() or os.environ.get("TERM") == "dumb" or os.environ.get("COLUMNS") == "0":
        return False
    try:
        return os.get_terminal_size(stream.fileno()).columns > 0
    except (OSError, ValueError):
        return False


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
    parts += _experts(metrics)
    return "  ".join(parts)


def _experts(metrics: dict[str, Any]) -> list[str]:
    """The means over blocks with experts, and the block whose least wanted expert is wanted least."""
    computed, dropped, smallest = (
        _per_block(metrics, name, "experts") for name in ("computed", "dropped", "smallest_load")
    )
    if not computed:
        return []
    block, load = min(smallest.items(), key=lambda item: item[1])
    alarm = " (!)" if load < DEAD_LOAD else ""
    mean = {"experts": computed, "dropped": dropped}
    return [f"{name} {np.mean(list(values.values())):.1%}" for name, values in mean.items()] + [
        f"smallest load {load:.2g} in {block}{alarm}"
    ]


def _per_block(metrics: dict[str, Any], name: str, group: str = "routing") -> dict[str, float]:
    pattern = re.compile(rf"{group}/(block\d+)/{name}")
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
