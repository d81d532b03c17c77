"""The steps since the last row of metrics, and what they add up to.

A row stands for an *interval* of steps. Intervals end at fixed steps: the first, every multiple of train.log_every,
every evaluation and the last. A save or a resume ends none: an unfinished interval goes with the checkpoint and comes
back. So the rows of a run are the same however often it was stopped.
"""

from typing import Any

import jax
import numpy as np

from mod_jax.analysis.expert_stats import load_statistics
from mod_jax.analysis.routing_stats import block_name
from mod_jax.config import Config

_NOT_AVERAGED = ("train/finite", "train/bad_steps", "train/learning_rate")


class Interval:
    """Sums over steps, in float64. Steps whose loss or gradient was not finite count only if there are no others."""

    def __init__(self, saved: dict[str, Any] | None = None):
        """`saved`: what `to_json` gave."""
        saved = saved or {"steps": 0, "skipped": 0, "learning_rate": 0.0, "sums": {}}
        self.steps, self._skipped = saved["steps"], saved["skipped"]
        self._learning_rate = saved["learning_rate"]
        self._sums = {name: np.asarray(value, np.float64) for name, value in saved["sums"].items()}

    def to_json(self) -> dict[str, Any]:
        sums = {name: value.tolist() for name, value in self._sums.items()}
        learning_rate = self._learning_rate
        return {"steps": self.steps, "skipped": self._skipped, "learning_rate": learning_rate, "sums": sums}

    def add(self, metrics: dict[str, Any]) -> None:
        """Takes the metrics of one step: scalars; [L] arrays per routed block, or per block with experts; and the loads
        of the latter, [L, N]."""
        finite, none_so_far = bool(metrics["train/finite"]), self._skipped == self.steps
        values = {name: np.asarray(value, np.float64) for name, value in metrics.items() if name not in _NOT_AVERAGED}
        if finite and none_so_far:
            self._sums = values
        elif finite or none_so_far:
            self._sums = jax.tree.map(np.add, self._sums, values) if self._sums else values
        self.steps += 1
        self._skipped += not finite
        self._learning_rate = float(metrics["train/learning_rate"])

    def means(self, config: Config) -> dict[str, float]:
        """The row: means over the steps, per-block arrays by block name; of loads, what their means say; the learning
        rate of the last step."""
        metrics = {"train/skipped_steps": self._skipped, "train/learning_rate": self._learning_rate}
        for name, total in self._sums.items():
            mean = total / (self.steps - self._skipped or self.steps)
            if not mean.ndim:
                metrics[name] = float(mean)
                continue
            group, leaf = name.split("/")
            depths = config.expert_depths if group == "experts" else config.routed_depths
            for depth, value in zip(depths, mean, strict=True):
                values = {leaf: float(value)} if not value.ndim else load_statistics(value, config.experts.count)
                metrics |= {f"{group}/{block_name(depth)}/{leaf}": number for leaf, number in values.items()}
        return metrics
