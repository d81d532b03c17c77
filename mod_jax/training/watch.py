"""What a person sees of a run: log lines, metric rows, evaluations, warnings, the closing summary and the report."""

from typing import Any

import jax
import numpy as np

from mod_jax.analysis.alarms import alarm_metrics, find_alarms, is_early
from mod_jax.analysis.report import write_report
from mod_jax.config import Config
from mod_jax.errors import NumericsError
from mod_jax.evaluation import tables
from mod_jax.evaluation.evaluator import Evaluator
from mod_jax.paths import Folder, writing
from mod_jax.training.console import Console
from mod_jax.training.finite import BadSteps
from mod_jax.training.interval import Interval
from mod_jax.training.rates import Throughput, peak_of_devices
from mod_jax.training.rows import MetricWriter, read_metrics
from mod_jax.training.step import TrainState


class Watch:
    """Collects step metrics on the device and reads them one step late, so that logging never stalls the device.

    As a context manager it closes itself, also after an error: trackers then get what they have not sent yet.
    """

    def __init__(
        self,
        config: Config,
        writer: MetricWriter,
        *,
        first_step: int,
        num_steps: int,
        tokens_per_step: int,
        flops_per_step: float,
        devices: list[jax.Device],
        digest: str,
        interval: Interval,
        part_names: list[str],
        commit: str,
    ):
        """`first_step`: the step restored, 0 in a fresh run. `interval`: the unfinished one, restored with it.

        `part_names`: of the entries of `train/finite_parts`.
        """
        peak = peak_of_devices(devices)
        self._config, self._writer, self._num_steps = config, writer, num_steps
        self._tokens_per_step, self._flops_per_step, self._digest = tokens_per_step, flops_per_step, digest
        self._console = Console(num_steps, first_step, peak)
        pauses = {"evaluation": config.train.eval_every, "save": config.train.save_every}
        self._throughput = Throughput(num_steps, tokens_per_step, flops_per_step, peak, pauses)
        self._first_step = first_step
        self._commit = commit
        self._on_device: list[tuple[int, np.ndarray, dict[str, Any]]] = []  # steps whose metrics were not read yet
        self._interval = interval
        self._step = first_step
        self._warned: set[tuple[str, int]] = set()
        self._bad = BadSteps(part_names, config.data.seq_len)
        self.say = self._console.say
        self.pause = self._throughput.pause

    @property
    def bad_steps(self) -> int:
        """Consecutive bad steps up to the last that was read."""
        return self._bad.count

    def after_step(self, step: int, metrics: dict[str, Any], example_ids_B: np.ndarray) -> None:
        """Takes the metrics of a step that was just dispatched; logs the interval that ended with the step before."""
        if self._row_is_due():
            self.flush()
        elif self._step == self._first_step + 1:  # the clock starts when the first step of this process has finished
            self._read()
            self._throughput.measure(self._step)
        self._on_device.append((step, example_ids_B, metrics))
        self._step = step

    def flush(self) -> None:
        """Ends the interval: writes its row and its line.

        Raises:
          NumericsError: if too many consecutive steps were bad.
        """
        self._read()
        if not self._interval.steps:
            return
        metrics = self._interval.means(self._config)
        self._interval = Interval()
        if self._step > self._first_step:
            metrics |= self._throughput.measure(self._step)
        metrics["train/tokens"] = self._step * self._tokens_per_step
        metrics["train/flops"] = self._step * self._flops_per_step
        self._console.log(self._step, metrics)
        self._write(metrics | self._alarms(metrics))
        if self._too_many_bad_steps():
            raise NumericsError(
                f"{self._bad.longest} consecutive steps up to step {self._step} were not finite and changed nothing, "
                f"the first {self._bad.first}. No checkpoint holds what they computed. Lower optimizer.learning_rate "
                "or clip_norm, or look at these examples"
            )

    def unfinished(self) -> dict[str, Any]:
        """What the interval has added up so far, for a checkpoint. Rows of earlier steps are on disk afterwards.

        Raises:
          NumericsError: if too many consecutive steps were bad.
        """
        self._read()
        if self._row_is_due() or self._too_many_bad_steps():
            self.flush()
        self._writer.flush()
        return self._interval.to_json()

    def evaluate(self, step: int, evaluator: Evaluator, state: TrainState) -> dict[str, float]:
        """Evaluates, writes the row and says the result."""
        self.flush()
        with self.pause("evaluation"):
            metrics = evaluator.evaluate(state.weights)
        self.say(f"step {step}/{self._num_steps}  {tables.log_line(metrics)}")
        self._write(metrics | self._alarms(metrics))
        return metrics

    def finish(self, evaluator: Evaluator, state: TrainState, workdir: Folder) -> dict[str, Any]:
        """Draws the report. Returns the row of the last evaluation; {} outside process 0, which alone has the rows."""
        self.flush()
        self._writer.flush()
        seen = evaluator.records(state.weights)
        rows = []
        if jax.process_index() == 0:
            rows = read_metrics(workdir / "metrics.jsonl")
            caption = (
                f"{workdir.name}, seed {self._config.seed}, step {self._step}, corpus {self._digest}, "
                f"mod_jax {self._commit}"
            )
            cutoffs_L = jax.device_get(state.cutoffs_L)
            with writing(workdir / "report"):
                write_report(workdir / "report", rows, seen, cutoffs_L, self._config, caption)
        self._console.close()
        return next((row for row in reversed(rows) if "eval/topk_loss" in row), {})

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        self._console.close()
        self._writer.close()

    def _row_is_due(self) -> bool:
        return self._step in (1, self._num_steps) or self._step % self._config.train.log_every == 0

    def _read(self) -> None:
        """Moves metrics from the device into the interval; waits for the last step."""
        steps, self._on_device = jax.device_get(self._on_device), []
        for step, example_ids_B, metrics in steps:
            parts = metrics.pop("train/finite_parts")
            if self._bad.add(step, parts, int(metrics["train/bad_steps"]), example_ids_B):
                self.say(f"WARNING skipped a step that was not finite, {self._bad.first}")
            self._interval.add(metrics)

    def _too_many_bad_steps(self) -> bool:
        return self._bad.longest >= self._config.train.max_bad_steps

    def _write(self, metrics: dict[str, Any]) -> None:
        self._writer.write(self._step, {**metrics, "data/digest": self._digest})

    def _alarms(self, metrics: dict[str, Any]) -> dict[str, Any]:
        """Says what is wrong with a block, once per kind and block; returns their number, as metrics."""
        if is_early(self._step, self._num_steps):
            return {}
        alarms = find_alarms(metrics, self._config)
        for alarm in alarms:
            if (alarm.kind, alarm.depth) not in self._warned:
                self._warned.add((alarm.kind, alarm.depth))
                self.say(f"WARNING {alarm.text}; said once")
        return alarm_metrics(alarms, self._config)
