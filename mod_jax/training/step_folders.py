"""The step folders of a checkpoint directory: which there are, which are kept, which are set aside.

One process calls this for all. Every change is one deed, so that no reader ever sees half of it: on a disk a rename, in
a bucket the writing or removing of the step's *mark*. Orbax writes the mark last. A step without is not listed.
"""

import math
import os
import shutil

from absl import logging

from mod_jax import buckets
from mod_jax.paths import Folder, make_folder
from mod_jax.training import damage
from mod_jax.training.damage import DamageError, one_line
from mod_jax.training.leaves import item

UNFINISHED = ".orbax-checkpoint-tmp"  # on a disk in the name of a step that Orbax has not finished
MARK = "commit_success.txt"  # in a bucket, in a step that it has finished


class StepFolders:
    """Arguments as for `Checkpointer`. Every method may raise OSError, or what a bucket raises."""

    def __init__(self, directory: Folder, keep: int, metric: str):
        self._directory, self._keep, self._metric = directory, keep, metric
        self._in_bucket = buckets.is_bucket(directory)
        self.quarantine = directory / "quarantine"
        self._pruned = directory / "pruned"
        self._losses: dict[int, float] = {}

    def prepare(self) -> None:
        """Creates the directory, tries whether it can be written, and removes what a killed process left half done."""
        make_folder(self._directory)
        probe = self._directory / ".probe"
        probe.write_text("")
        probe.unlink()
        self.remove_unfinished()
        if not self._in_bucket:
            shutil.rmtree(self._pruned, ignore_errors=True)

    def remove_unfinished(self) -> None:
        if self._in_bucket:
            finished = self.steps()
            for step in self._numbers():
                if step not in finished:
                    buckets.remove(self._directory / str(step), MARK)
            return
        for path in self._directory.glob(f"*{UNFINISHED}*"):
            shutil.rmtree(path, ignore_errors=True)

    def steps(self) -> list[int]:
        """Oldest first."""
        numbers = self._numbers()
        if self._in_bucket:
            numbers = [step for step in numbers if (self._directory / str(step) / MARK).exists()]
        return numbers

    def _numbers(self) -> list[int]:
        try:
            return sorted(int(path.name) for path in self._directory.iterdir() if path.name.isdecimal())
        except FileNotFoundError:
            if self._in_bucket:  # no folder is there before something lies in it
                return []
            raise

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
                    if self._in_bucket:
                        buckets.remove(self._directory / str(step), MARK)
                        continue
                    self._pruned.mkdir(exist_ok=True)
                    (self._directory / str(step)).rename(self._pruned / str(step))
                except Exception as error:  # it costs room, not the run
                    if not buckets.is_failure(error):
                        raise
                    logging.warning("%s: step %d could not be deleted: %s", self._directory, step, one_line(error))
        if not self._in_bucket:
            shutil.rmtree(self._pruned, ignore_errors=True)

    def set_aside(self, step: int, why: str) -> Folder:
        """Moves a step to quarantine, where nothing looks for steps. Returns where it is now."""
        source, target = self._directory / str(step), self.quarantine / f"{step}-{why}"
        while self._is_there(target):
            target = target.with_name(f"{target.name}-again")
        if self._in_bucket:
            buckets.move(source, target, MARK)
        else:
            self.quarantine.mkdir(exist_ok=True)
            source.rename(target)
        self._losses.pop(step, None)
        return target

    def _is_there(self, target: Folder) -> bool:
        """Whether a step was set aside there. In a bucket one without mark is what a kill left, and is written over."""
        return (target / MARK).exists() if self._in_bucket else os.path.lexists(target)

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
