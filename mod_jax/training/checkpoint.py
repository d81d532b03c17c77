"""Checkpoints: saved in the background, verified on the way back, never lost in silence.

Orbax writes atomically but verifies nothing: a flipped bit restores without a word, and a damaged newest step ends the
run although an older one is good. This module adds what is missing; no other reads or writes through Orbax. On disk:

    <directory>/<step>/params/      the parameters, so that evaluation reads nothing else
                       rest/        every other leaf of the train state
                       record/      JSON: the caller's metadata, metrics, and shape, dtype and digest of every leaf
    <directory>/quarantine/         steps that were set aside: <step>-damaged, or <step>-superseded after a rollback

Vocabulary. A step is *damaged* if it cannot be read back bit for bit; it is set aside and an older one is used. A
*mismatch* is a good step of another model: an error for a person to solve, so nothing is moved.
"""

import contextlib
import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from absl import logging
from etils import epath
from jax.experimental import multihost_utils
from orbax.checkpoint.checkpoint_managers import preservation_policy

from mod_jax.errors import CheckpointMismatch, StorageError
from mod_jax.outputs import canonical, plain
from mod_jax.training.digest import compute_digests

# Failures that say nothing about the files: no reason to set a step aside.
_NOT_DAMAGE = (MemoryError, PermissionError, jax.errors.JaxRuntimeError)


class _DamageError(Exception):
    """A step cannot be read back as it was written."""


class Restored(NamedTuple):
    """What came back: `state` is the train state, or the parameters alone from `restore_params`; `metrics` as saved."""

    step: int
    state: Any
    metadata: dict[str, Any]
    metrics: dict[str, float] | None


class Checkpointer:
    """Saves and restores train states in one directory. Every process of a run constructs one and makes the same calls.

    Every method first waits for the save in flight, so that a save that failed in the background is reported by
    whichever call comes next, and so that a step is listed only once it is on disk.
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
        path = os.fspath(directory)
        self._directory = epath.Path(path if "://" in path else os.path.abspath(os.path.expanduser(path)))
        self._metric = metric
        self._read_only = read_only
        self._saving: int | None = None
        self._losses: dict[int, float] = {}
        if not read_only:
            self._check_writable()
        policies = [preservation_policy.LatestN(n=keep), _KeepBest(self._best_of)]
        options = ocp.CheckpointManagerOptions(
            create=not read_only,
            cleanup_tmp_directories=not read_only,
            # Not its own `read_only`, which only adds two warnings: it writes nothing but in `save`, refused below.
            preservation_policy=preservation_policy.AnyPreservationPolicy(policies),
        )
        self._manager = ocp.CheckpointManager(self._directory, options=options)
        for step in self._manager.all_steps():
            with contextlib.suppress(Exception):  # a damaged record is dealt with when its step is wanted
                self._note_loss(step, self._read_record(step)["metrics"])

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
        self.check_space(state)
        for newer in [s for s in self.all_steps() if s >= step]:
            moved_to = self._set_aside(newer, "superseded")
            logging.warning("CHECKPOINT step %d set aside before saving step %d: now in %s", newer, step, moved_to)

        leaves = _flatten(state)
        described, digests = _describe(leaves), compute_digests(leaves)
        record = plain(
            {
                "metadata": metadata,
                "metrics": metrics and {name: float(value) for name, value in metrics.items()},
                "leaves": {path: dict(described[path], digest=digests[path]) for path in leaves},
            }
        )
        items = {
            **{name: ocp.args.StandardSave(item) for name, item in _items(leaves).items()},
            "record": ocp.args.JsonSave(dict(record, sha256=_checksum(record))),
        }
        self._note_loss(step, metrics)
        self._saving = step
        with self._naming_the_failed_save():
            saved = self._manager.save(step, args=ocp.args.Composite(**items), force=True)
        if not saved:
            raise StorageError(f"{self._directory}: step {step} was not saved, and Orbax does not say why")

    def restore(self, abstract_state: Any, step: int | None = None) -> Restored | None:
        """Restores a step, or the newest good one, onto the shardings of `abstract_state`.

        Damaged steps are set aside on the way, each with one loud line in the log.

        Args:
          abstract_state: the train state with `jax.ShapeDtypeStruct` leaves, each with its sharding.
          step: the step wanted; None for the newest good one.

        Returns:
          The step, its state, equal bit for bit to what was saved, and its metadata. None if nothing was ever saved.

        Raises:
          CheckpointMismatch: if the step holds leaves of other names, shapes or dtypes.
          StorageError: if the requested step is missing or damaged, or if there were steps and none is good.
        """
        _check_abstract(abstract_state)
        return self._newest_good(step, lambda candidate: self._load(candidate, abstract_state))

    def restore_params(self, abstract_params: Any, step: int | None = None) -> Restored | None:
        """Like `restore`, for the parameters alone; nothing else is read."""
        restored = self.restore_fields({"params": abstract_params}, step)
        return restored and restored._replace(state=restored.state["params"])

    def restore_fields(self, abstract_fields: dict[str, Any], step: int | None = None) -> Restored | None:
        """Like `restore`, for some fields of the state, {"params": ..., "cutoffs_L": ...}; no other array is read."""
        _check_abstract(abstract_fields)
        return self._newest_good(step, lambda candidate: self._load(candidate, abstract_fields, tuple(abstract_fields)))

    def read_metadata(self, step: int | None = None) -> dict[str, Any] | None:
        """Returns the metadata of a step, or of the newest one whose record is good, without reading arrays."""
        return self._newest_good(step, lambda candidate: self._read_record(candidate)["metadata"])

    def all_steps(self) -> list[int]:
        """Steps on disk, oldest first."""
        self.wait()
        return sorted(self._manager.all_steps())

    def latest_step(self) -> int | None:
        """The newest step on disk."""
        return max(self.all_steps(), default=None)

    def best_step(self) -> int | None:
        """The step with the lowest finite metric; the newest of equals; None if no step has one."""
        return self._best_of(self.all_steps())

    def wait(self) -> None:
        """Blocks until the save in flight is on disk.

        Raises:
          StorageError: if it failed.
        """
        with self._naming_the_failed_save():
            self._manager.wait_until_finished()

    def close(self) -> None:
        """Waits like `wait`, then releases the background threads."""
        with self._naming_the_failed_save():
            self._manager.close()

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        self.close()

    def check_space(self, state: Any) -> None:
        """Raises StorageError unless one more copy of `state` (arrays or ShapeDtypeStructs) fits on the disk.

        `save` checks for itself; call this with the abstract state before a long run to hear of it before the run.
        """
        if "://" in os.fspath(self._directory):
            return  # a bucket has no size
        needed = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
        free = shutil.disk_usage(self._directory).free
        if free < needed:
            raise StorageError(f"{self._directory}: a checkpoint needs {needed:,} bytes, {free:,} are free")

    def _check_writable(self) -> None:
        probe = self._directory / f".probe-{jax.process_index()}"
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            probe.write_text("")
            probe.unlink()
        except OSError as error:
            raise StorageError(f"{self._directory}: cannot write checkpoints here: {_one_line(error)}") from error

    @contextlib.contextmanager
    def _naming_the_failed_save(self):
        try:
            yield
        except Exception as error:
            self._manager.reload()  # forget the step that never reached the disk
            raise StorageError(f"{self._directory}: saving step {self._saving} failed: {_one_line(error)}") from error

    def _newest_good(self, step: int | None, load: Callable[[int], Any]) -> Any:
        """Returns `load(step)`, or if step is None `load` of the newest step that is not damaged."""
        steps = self.all_steps()
        if step is not None:
            if step not in steps:
                raise StorageError(f"{self._directory}: no step {step}; available steps: {steps or 'none'}")
            value, cause = _attempt(load, step)
            if cause is None:
                return value
            others = [s for s in steps if s != step]
            raise StorageError(
                f"{self._directory}: step {step} is damaged: {_one_line(cause)}; other steps: {others or 'none'}"
            ) from cause

        for candidate in reversed(steps):
            value, cause = _attempt(load, candidate)
            if cause is None:
                return value
            moved_to = self._set_aside(candidate, "damaged")
            logging.error(
                "CHECKPOINT step %d IS DAMAGED, trying an older one. Cause: %s. Now in %s",
                candidate,
                _one_line(cause),
                moved_to,
            )
        if steps or self._quarantine.exists():
            raise StorageError(
                f"{self._directory}: there were checkpoints and none is usable; see {self._quarantine}. "
                "To start afresh, use another directory or remove this one"
            )
        return None

    def _load(self, step: int, abstract: Any, fields: tuple[str, ...] | None = None) -> Restored:
        record = self._read_record(step)
        wanted = _flatten(abstract)
        leaves = {path: leaf for path, leaf in record["leaves"].items() if not fields or path.split("/")[0] in fields}
        saved_digests = {path: leaf.pop("digest") for path, leaf in leaves.items()}
        _check_structure(step, leaves, _describe(wanted))

        def read():
            restored = {path: _empty(leaf) for path, leaf in wanted.items() if not leaf.size}
            for name, item in _items(wanted).items():
                directory = self._directory / str(step) / name
                if fields and name == "rest":
                    placed = ocp.checkpoint_utils.construct_restore_args(item)
                    args = ocp.args.PyTreeRestore(item, restore_args=placed, partial_restore=True)
                    restored |= ocp.PyTreeCheckpointHandler().restore(directory, args=args)
                else:
                    args = ocp.args.StandardRestore(item)
                    restored |= ocp.StandardCheckpointHandler().restore(directory, args=args)
            return restored

        restored = _together(read)
        digests = compute_digests(restored)
        changed = [path for path in wanted if digests[path] != saved_digests[path]]
        if changed:
            raise _DamageError(f"{len(changed)} of {len(wanted)} leaves changed on disk, first {changed[0]}")
        state = jax.tree.unflatten(jax.tree.structure(abstract), [restored[path] for path in wanted])
        return Restored(step, state, record["metadata"], record["metrics"])

    def _read_record(self, step: int) -> dict[str, Any]:
        directory = self._directory / str(step) / "record"
        record = _together(lambda: ocp.JsonCheckpointHandler().restore(directory, args=ocp.args.JsonRestore()))
        if record.pop("sha256") != _checksum(record):
            raise _DamageError("the record does not match its checksum")
        return record

    @property
    def _quarantine(self) -> epath.Path:
        return self._directory / "quarantine"

    def _set_aside(self, step: int, why: str) -> epath.Path:
        """Moves a step to quarantine, where nothing looks for steps. Returns where it is now."""
        source = self._directory / str(step)
        if self._read_only:
            return source
        target = self._quarantine / f"{step}-{why}"
        while target.exists():
            target = target.with_name(f"{target.name}-again")
        multihost_utils.sync_global_devices(f"before moving {source}")
        if jax.process_index() == 0:
            self._quarantine.mkdir(exist_ok=True)
            source.rename(target)
        multihost_utils.sync_global_devices(f"after moving {source}")
        self._manager.reload()
        return target

    def _note_loss(self, step: int, metrics: dict[str, float] | None) -> None:
        loss = float((metrics or {}).get(self._metric, math.nan))  # in a record it may be the string "NaN"
        self._losses[step] = loss if math.isfinite(loss) else math.inf

    def _best_of(self, steps: Sequence[int]) -> int | None:
        ranked = [step for step in steps if self._losses.get(step, math.inf) < math.inf]
        return min(ranked, key=lambda step: (self._losses[step], -step), default=None)


class _KeepBest:
    """Orbax preservation policy: keeps the best step.

    Not Orbax's own `BestN`: that keeps every step without metrics by default, sorts NaN anywhere, and needs metrics in
    a file which, damaged, prevents Orbax from opening the directory at all.
    """

    def __init__(self, best_of: Callable[[Sequence[int]], int | None]):
        self._best_of = best_of

    def should_preserve(self, checkpoints, *, context) -> list[bool]:
        del context
        best = self._best_of([info.step for info in checkpoints])
        return [info.step == best for info in checkpoints]


def _attempt(load: Callable[[int], Any], step: int) -> tuple[Any, Exception | None]:
    """Returns (load(step), None), or (None, cause) if the step is damaged."""
    try:
        return load(step), None
    except (CheckpointMismatch, *_NOT_DAMAGE):
        raise
    except Exception as error:
        return None, error


def _together(read: Callable[[], Any]) -> Any:
    """Returns `read()`, or raises on every process if it failed on any.

    A file may be damaged for the one process whose shard it holds. Were that process alone to stop, the others would
    wait for it forever in the next collective; for the same reason Orbax's handlers are called without its manager,
    which ends a restore with a barrier.
    """
    value, cause = None, None
    try:
        value = read()
    except Exception as error:
        cause = error
    if jax.process_count() > 1 and np.any(multihost_utils.process_allgather(np.array(cause is not None))):
        cause = cause or _DamageError("another process could not read it")
    if cause is not None:
        raise cause
    return value


def _flatten(tree: Any) -> dict[str, Any]:
    """Leaves by path, in tree order: {"params/embed/w": leaf}. Saved flat, a step is exactly what its record lists."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def _items(leaves: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """What goes into each item on disk. Orbax refuses what is empty: such leaves stand in the record alone."""
    items: dict[str, dict[str, Any]] = {}
    for path, leaf in leaves.items():
        if leaf.size:
            items.setdefault("params" if _is_param(path) else "rest", {})[path] = leaf
    return items


def _empty(leaf: jax.ShapeDtypeStruct) -> jax.Array:
    return jax.jit(lambda: jnp.zeros(leaf.shape, leaf.dtype), out_shardings=leaf.sharding)()


def _is_param(path: str) -> bool:
    return path.split("/")[0] == "params"


def _describe(leaves: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {path: {"shape": list(leaf.shape), "dtype": str(leaf.dtype)} for path, leaf in leaves.items()}


def _check_abstract(tree: Any) -> None:
    """Raises ValueError for a leaf without sharding, lest the caller's slip be taken for a damaged step."""
    for path, leaf in _flatten(tree).items():
        if getattr(leaf, "sharding", None) is None:
            raise ValueError(f"abstract leaf {path} must have a sharding; found {leaf}")


def _check_structure(step: int, saved: dict[str, dict], wanted: dict[str, dict], shown: int = 5) -> None:
    """Raises CheckpointMismatch unless both describe the same leaves."""
    differing = [path for path in {**wanted, **saved} if saved.get(path) != wanted.get(path)]
    if not differing:
        return

    def text(leaf):
        return f"{leaf['dtype']}{leaf['shape']}" if leaf else "absent"

    lines = [f"  {path}: {text(saved.get(path))} -> {text(wanted.get(path))}" for path in differing[:shown]]
    if len(differing) > shown:
        lines.append(f"  and {len(differing) - shown} more")
    raise CheckpointMismatch(f"step {step} is of another model (checkpoint -> model):\n" + "\n".join(lines))


def _checksum(record: dict[str, Any]) -> str:
    as_read = json.loads(canonical(record))
    return hashlib.sha256(canonical(as_read).encode()).hexdigest()


def _one_line(error: BaseException, ends: int = 200) -> str:
    """Type and message on one line, without the pages that TensorStore adds; its cause stands at either end."""
    text = str(error).split(" See full TensorStore details")[0]
    text = " ".join(f"{type(error).__name__}: {text}".split())
    return text if len(text) <= 2 * ends else f"{text[:ends]} ... {text[-ends:]}"
