"""Checkpoints: saved in the background, checked once they are there, verified on the way back, never lost in silence.

Orbax writes atomically but verifies nothing: a flipped bit restores without a word, and a damaged newest step ends the
run although an older one is good. This module adds what is missing; no other reads or writes through Orbax. On disk:

    <directory>/<step>/params/      the parameters, so that evaluation reads nothing else
                       rest/        every other leaf of the train state
                       record/      JSON: the caller's metadata, metrics, and shape, dtype and digest of every leaf
    <directory>/quarantine/         steps that were set aside: <step>-damaged, or <step>-superseded after a rollback
    <directory>/pruned/             older steps while they are deleted

Vocabulary. A step is *damaged* if its own files prove that it cannot be read back bit for bit (`damage.py`). It is set
aside once an older one was read by the same code. A *mismatch* is a good step of another model: an error for a person
to solve. Whatever else fails is a StorageError. Neither moves a file.
"""

import contextlib
import math
import os
import shutil
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp
from absl import logging
from etils import epath
from jax.experimental import multihost_utils

from mod_jax import buckets
from mod_jax.errors import StorageError
from mod_jax.outputs import plain
from mod_jax.paths import Folder, as_folder
from mod_jax.training import damage
from mod_jax.training.damage import DamageError, VanishedError, one_line
from mod_jax.training.digest import compute_digests
from mod_jax.training.leaves import check_abstract, check_structure, describe, empty, flatten, items
from mod_jax.training.step_folders import StepFolders


class Restored(NamedTuple):
    """What came back: `state` is the train state, or the parameters alone from `restore_params`."""

    step: int
    state: Any
    metadata: dict[str, Any]
    metrics: dict[str, float] | None


class Checkpointer:
    """Saves and restores train states in one directory. Every process of a run constructs one and makes the same calls.

    Every method first waits for the save in flight, so that a save that failed in the background is reported by
    whichever call comes next, and so that a step is listed only once it is on disk. Process 0 lists, moves and deletes
    for all: two hosts may see a shared disk differently for a while.
    """

    def __init__(
        self, directory: str | os.PathLike, keep: int = 2, *, metric: str = "eval/topk_loss", read_only: bool = False
    ):
        """Opens `directory`; creates it, and removes what killed saves left there, unless `read_only`.

        Args:
          directory: where the steps live; a relative path is taken from the current directory, once and for all.
          keep: number of newest steps that are kept, beside the best one.
          metric: name of the metric that ranks steps; the lowest finite value is best.
          read_only: move and delete nothing. Right for evaluation beside a training run in progress.

        Raises:
          StorageError: if files cannot be written here.
        """
        self._directory = as_folder(directory)
        self._metric = metric
        self._folders = StepFolders(self._directory, keep, metric)
        self._read_only = read_only
        self._saving: int | None = None
        self._saver = ocp.AsyncCheckpointer(ocp.CompositeCheckpointHandler())
        if not read_only:
            self._on_process_0(self._folders.prepare, "cannot write checkpoints here")

    def save(self, step: int, state: Any, metadata: dict[str, Any], metrics: dict[str, float] | None = None) -> None:
        """Starts saving `state`; returns once it has left the device, so that its buffers may be donated.

        Steps >= `step`, left from before a rollback, are set aside first: they belong to another history.

        Args:
          step: number of the update that produced `state`.
          state: a pytree of arrays with a field `params`; in a multi-process run, of global arrays.
          metadata: JSON, given back by `restore` and `read_metadata`.
          metrics: numbers that belong to this step, among them the one that ranks steps; None if not evaluated.

        Raises:
          StorageError: if this save cannot start, or the previous one failed.
        """
        if self._read_only:
            raise StorageError(f"{self._directory} was opened read-only; step {step} was not saved")
        if metrics is not None and self._metric not in metrics:
            raise ValueError(f"metrics lack {self._metric!r}, which ranks checkpoints; found {sorted(metrics)}")
        newer = [other for other in self.all_steps() if other >= step]
        self.check_space(state)
        for other in newer:
            self._set_aside(other, "superseded", f"set aside before saving step {step}")

        leaves = flatten(state)
        described, digests = describe(leaves), compute_digests(leaves)
        record = plain(
            {
                "step": step,
                "metadata": metadata,
                "metrics": metrics and {name: float(value) for name, value in metrics.items()},
                "leaves": {path: dict(described[path], digest=digests[path]) for path in leaves},
            }
        )
        to_save = {
            **{name: ocp.args.StandardSave(item) for name, item in items(leaves).items()},
            "record": ocp.args.JsonSave(dict(record, sha256=damage.record_checksum(record))),
        }
        self._saving = step
        with self._naming_the_failed_save():
            self._saver.save(self._directory / str(step), args=ocp.args.Composite(**to_save))

    def restore(self, wanted: Any, step: int | None = None) -> Restored | None:
        """Restores a step, or the newest good one, onto the shardings of `wanted`.

        Damaged steps are set aside on the way, each with one loud line in the log.

        Args:
          wanted: the train state with `jax.ShapeDtypeStruct` leaves, each with its sharding. Or a function that gives
            it from the metadata of the very step that is about to be read; it may refuse the step by raising.
          step: the step wanted; None for the newest good one.

        Returns:
          The step, its state, equal bit for bit to what was saved, and its metadata. None if nothing was ever saved.

        Raises:
          CheckpointMismatch: if the step holds leaves of other names, shapes or dtypes.
          StorageError: if the requested step is missing or damaged, if there were steps and none is good, or if the
            disk cannot be read.
        """
        return self._newest_good(step, lambda candidate: self._load(candidate, wanted))

    def restore_params(self, wanted: Any, step: int | None = None) -> Restored | None:
        """Like `restore`, for the parameters alone; nothing else is read."""
        restored = self.restore_fields({"params": wanted}, step)
        return restored and restored._replace(state=restored.state["params"])

    def restore_fields(self, wanted: Any, step: int | None = None) -> Restored | None:
        """Like `restore`, for some fields of the state, {"params": ..., "cutoffs_L": ...}; no other array is read."""
        return self._newest_good(step, lambda candidate: self._load(candidate, wanted, some_fields=True))

    def read_metadata(self, step: int | None = None) -> dict[str, Any] | None:
        """Returns the metadata of a step, or of the newest one whose record is good, without reading arrays."""
        return self._newest_good(step, lambda candidate: self._read_record(candidate)["metadata"])

    def all_steps(self) -> list[int]:
        """Steps on disk, oldest first."""
        self.wait()
        steps = self._on_process_0(self._folders.steps, "cannot be read")
        if jax.process_count() > 1:
            count = int(multihost_utils.broadcast_one_to_all(np.array(len(steps or ()))))
            padded = np.array(steps or [0] * count, np.int64)
            steps = [int(step) for step in multihost_utils.broadcast_one_to_all(padded)] if count else []
        return steps

    def latest_step(self) -> int | None:
        """The newest step on disk."""
        return max(self.all_steps(), default=None)

    def best_step(self) -> int | None:
        """The step with the lowest finite metric; the newest of equals; None if no step has one."""
        self.wait()
        return self._on_process_0(self._folders.best_step, "cannot be read")

    def wait(self) -> None:
        """Blocks until the save in flight is on disk and complete, then deletes the steps that are no longer kept.

        Raises:
          StorageError: if the save failed, or cannot be opened. Then no older step is deleted.
        """
        with self._naming_the_failed_save():
            self._saver.wait_until_finished()
        if self._saving is not None:
            saved, self._saving = self._saving, None
            self._on_process_0(lambda: self._folders.check(saved), f"step {saved} was saved and cannot be read back")
            self._on_process_0(self._folders.prune, "cannot be read")

    def close(self) -> None:
        """Waits like `wait`, then releases the background threads."""
        try:
            self.wait()
        finally:
            self._saver.close()

    def __enter__(self):
        return self

    def __exit__(self, error_type, error, traceback):
        if error is None:
            self.close()
            return
        try:  # the error that ends the run is the one to be shown; other processes may be gone
            self._saver.close()
        except Exception as failed:
            logging.error("%s: saving step %s failed: %s", self._directory, self._saving, one_line(failed))

    def check_space(self, state: Any) -> None:
        """Raises StorageError unless one more copy of `state` (arrays or ShapeDtypeStructs) fits on the disk.

        `save` checks for itself; call this with the abstract state before a long run to hear of it before the run. Of a
        bucket nothing is asked.
        """
        if buckets.is_bucket(self._directory):
            return
        needed = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
        try:
            free = shutil.disk_usage(self._directory).free
        except OSError as error:
            raise StorageError(f"{self._directory}: cannot write checkpoints here: {one_line(error)}") from error
        if free < needed:
            raise StorageError(f"{self._directory}: a checkpoint needs {needed:,} bytes, {free:,} are free")

    # Reading.

    def _newest_good(self, step: int | None, load: Callable[[int], Any]) -> Any:
        """Returns `load(step)`, or if step is None `load` of the newest step that is not damaged."""
        for _ in range(20):  # a run with train.keep = 1 may remove what is being read, and has a newer step then
            try:
                return self._search(load) if step is None else self._one(step, load)
            except VanishedError as error:
                vanished = error
        raise StorageError(f"{self._directory}: steps vanish faster than they can be read: {vanished}")

    def _one(self, step: int, load: Callable[[int], Any]) -> Any:
        steps = self.all_steps()
        if step not in steps:
            raise StorageError(f"{self._directory}: no step {step}; available steps: {steps or 'none'}")
        try:
            return load(step)
        except DamageError as cause:
            others = [other for other in steps if other != step]
            raise StorageError(
                f"{self._directory}: step {step} is damaged: {one_line(cause)}; other steps: {others or 'none'}"
            ) from cause

    def _search(self, load: Callable[[int], Any]) -> Any:
        damaged: dict[int, DamageError] = {}
        for candidate in reversed(self.all_steps()):
            try:
                value = load(candidate)
            except DamageError as cause:
                damaged[candidate] = cause
                continue
            # Only now: had no step been read, then not the steps but what reads them might be at fault.
            for step, cause in damaged.items():
                self._set_aside(step, "damaged", f"IS DAMAGED, step {candidate} is used. Cause: {one_line(cause)}")
            return value
        if damaged:
            causes = "; ".join(f"step {step}: {one_line(cause)}" for step, cause in damaged.items())
            raise StorageError(f"{self._directory}: no checkpoint can be read, and none was moved. {causes}")
        if self._on_process_0(self._folders.quarantine.exists, "cannot be read"):
            raise StorageError(
                f"{self._directory}: there were checkpoints and all were set aside; see {self._folders.quarantine}. "
                "To start afresh, use another workdir"
            )
        return None

    def _load(self, step: int, wanted: Any, some_fields: bool = False) -> Restored:
        record = self._read_record(step)
        abstract = wanted(record["metadata"]) if callable(wanted) else wanted
        check_abstract(abstract)
        leaves = flatten(abstract)
        fields = {path.split("/")[0] for path in leaves}
        saved = {
            path: leaf for path, leaf in record["leaves"].items() if not some_fields or path.split("/")[0] in fields
        }
        digests = {path: leaf.pop("digest") for path, leaf in saved.items()}
        check_structure(step, saved, describe(leaves))
        folder = self._directory / str(step)

        def read():
            restored = {path: empty(leaf) for path, leaf in leaves.items() if not leaf.size}
            for name, item in items(leaves).items():
                damage.check_arrays(folder / name, {path: saved[path] for path in item})
                if some_fields and name == "rest":
                    placed = ocp.checkpoint_utils.construct_restore_args(item)
                    args = ocp.args.PyTreeRestore(item, restore_args=placed, partial_restore=True)
                    restored |= ocp.PyTreeCheckpointHandler().restore(epath.Path(folder / name), args=args)
                else:
                    args = ocp.args.StandardRestore(item)
                    restored |= ocp.StandardCheckpointHandler().restore(epath.Path(folder / name), args=args)
            return restored

        restored = _together(read, folder)
        found = compute_digests(restored)
        changed = [path for path in leaves if found[path] != digests[path]]
        if changed:
            raise DamageError(f"{len(changed)} of {len(leaves)} leaves changed on disk, first {changed[0]}")
        state = jax.tree.unflatten(jax.tree.structure(abstract), [restored[path] for path in leaves])
        return Restored(step, state, record["metadata"], record["metrics"])

    def _read_record(self, step: int) -> dict[str, Any]:
        folder = self._directory / str(step)

        def read():
            damage.check_files(folder)
            return damage.read_record(folder)

        return _together(read, folder)

    def _set_aside(self, step: int, why: str, message: str) -> None:
        """Says loudly what becomes of a step, and moves it to quarantine."""

        def move() -> None:
            place = self._directory / str(step) if self._read_only else self._folders.set_aside(step, why)
            level = logging.ERROR if why == "damaged" else logging.WARNING
            logging.log(level, "CHECKPOINT step %d %s. Now in %s", step, message, place)

        self._on_process_0(move, f"step {step} cannot be set aside")

    # Several processes.

    def _on_process_0(self, action: Callable[[], Any], what: str) -> Any:
        """Runs `action` on process 0 and waits for it on all. Returns what it gives there, None elsewhere.

        Raises:
          StorageError: on every process, if it failed.
        """
        value, error = None, None
        if jax.process_index() == 0:
            try:
                value = action()
            except Exception as raised:
                error = raised
        failed = error is not None
        if jax.process_count() > 1:
            failed = bool(multihost_utils.broadcast_one_to_all(np.array(failed)))
        if failed:
            cause = one_line(error) if error else "see process 0"
            raise StorageError(f"{self._directory}: {what}: {cause}") from error
        return value

    @contextlib.contextmanager
    def _naming_the_failed_save(self):
        try:
            yield
        except Exception as error:
            if jax.process_count() > 1 and isinstance(error, jax.errors.JaxRuntimeError):
                raise  # another process is lost, which the command line explains
            step, self._saving = self._saving, None
            if jax.process_index() == 0:  # what is half written takes room
                self._folders.remove_unfinished()
            raise StorageError(f"{self._directory}: saving step {step} failed: {one_line(error)}") from error


_GOOD, _DAMAGED, _UNREADABLE = range(3)


def _together(read: Callable[[], Any], folder: Folder) -> Any:
    """Returns `read()`, or raises on every process if it failed on any: the worst of their errors decides.

    A file may be damaged for the one process whose shard it holds. Were that process alone to stop, the others would
    wait for it forever in the next collective. For the same reason Orbax's handlers are called without its
    checkpointer, which ends a restore with a barrier.
    """
    value, error, verdict = None, None, _GOOD
    try:
        value = read()
    except Exception as raised:
        error = damage.judge(raised, folder)
        verdict = _DAMAGED if isinstance(error, DamageError) else _UNREADABLE
    if jax.process_count() > 1:
        worst = int(np.max(multihost_utils.process_allgather(np.array(verdict))))
        if worst > verdict:
            other = {_DAMAGED: DamageError, _UNREADABLE: StorageError}[worst]
            error = other(f"{folder}: another process could not read it, see there")
    if error is not None:
        raise error
    return value
