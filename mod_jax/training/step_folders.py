"""The step folders of a checkpoint directory: which there are, which are kept, which are set aside.

One process calls this for all. Every change is one rename, so that no reader ever sees half of it.
"""

import math
import os
import pathlib
import shutil

from absl import logging

from mod_jax.training import damage
from mod_jax.training.damage import DamageError, one_line
from mod_jax.training.leaves import item

UNFINISHED = ".orbax-checkpoint-tmp"  # in the name of a step that Orbax has not finished


class StepFolders:
    """Arguments as for `Checkpointer`. Every method may raise OSError."""

    def __init__(self, directory: pathlib.Path, keep: int, metric: str):
        self._directory, self._keep, self._metric = directory, keep, metric
        self.quarantine = directory / "quarantine"
        self._pruned = directory / "pruned"
        self._losses: dict[int, float] = {}

    def prepare(self) -> None:
        """Creates the directory, tries whether it can be written, and removes what a killed process left half done."""
        self._directory.mkdir(parents=True, exist_ok=True)
        probe = self._directory / ".probe"
        probe.write_text("")
        probe.unlink()
        self.remove_unfinished()
        shutil.rmtree(self._pruned, ignore_errors=True)

    def remove_unfinished(self) -> None:
        for path in self._directory.glob(f"*{UNFINISHED}*"):
            shutil.rmtree(path, ignore_errors=True)

    def steps(self) -> list[int]:
        """Oldest first."""
        return sorted(int(path.name) for path in self._directory.iterdir() if path.name.isdecimal())

    def check(self, step: int) -> None:
        """Makes sure that a step that was just saved can be opened: Orbax may write what it does not find again.

        Reads its record and the index of its arrays, no array.

        Raises:
          DamageError or ValueError: it cannot.
        """
        folder = self._directory / str(step)
        damage.check_files(folder)
        leaves = damage.read_record(folder)["leaves"]
        stored = {path: leaf for path, leaf in leaves.items() if math.prod(leaf["shape"])}
        for name in {item(path) for path in stored}:
            damage.check_arrays(folder / name, {path: leaf for path, leaf in stored.items() if item(path) == name})

    def prune(self) -> None:
        """Deletes the steps that are neither among the newest nor the best."""
        steps = self.steps()
        kept = {*steps[-self._keep :], self.best_step()}
        for step in steps:
            if step not in kept:
                try:
                    self._pruned.mkdir(exist_ok=True)
                    (self._directory / str(step)).rename(self._pruned / str(step))
                except OSError as error:  # it costs room, not the run
                    logging.warning("%s: step %d could not be deleted: %s", self._directory, step, one_line(error))
        shutil.rmtree(self._pruned, ignore_errors=True)

    def set_aside(self, step: int, why: str) -> pathlib.Path:
        """Moves a step to quarantine, where nothing looks for steps. Returns where it is now."""
        target = self.quarantine / f"{step}-{why}"
        while os.path.lexists(target):
            target = target.with_name(f"{target.name}-again")
        self.quarantine.mkdir(exist_ok=True)
        (self._directory / str(step)).rename(target)
        self._losses.pop(step, None)
        return target

    def best_step(self) -> int | None:
        """The step with the lowest finite metric; the newest of equals; None if no step has one."""
        ranked = {step: loss for step in self.steps() if math.isfinite(loss := self._loss(step))}
        return min(ranked, key=lambda step: (ranked[step], -step), default=None)

    def _loss(self, step: int) -> float:
        """What ranks a step, from its record. A damaged record is dealt with when its step is wanted."""
        if step not in self._losses:
            folder = self._directory / str(step)
            try:
                damage.check_files(folder)
                loss = (damage.read_record(folder)["metrics"] or {}).get(self._metric, math.inf)
                self._losses[step] = float(loss)  # it may be the string "NaN"
            except (DamageError, OSError, ValueError):
                return math.inf
        return self._losses[step]
