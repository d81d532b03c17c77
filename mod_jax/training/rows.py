"""metrics.jsonl: one JSON object a line, `{"step": 20, "train/loss": 2.4, ...}`, called a *row*.

Training and evaluation may each write one for the same step. Which steps have one: see `mod_jax.training.interval`.
Rows survive kills, and a resumed run repeats none.

Nothing can be appended to an object of a bucket. There the rows are written to a *spool*, a file on this host, which
goes up whole: before every checkpoint, at the end, and once a minute. A kill loses only rows that the resumed run
repeats.
"""

import contextlib
import json
import math
import os
import pathlib
import shutil
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import jax
from absl import logging

from mod_jax import buckets
from mod_jax.errors import ConfigError, StorageError
from mod_jax.outputs import NON_FINITE, plain, to_json
from mod_jax.paths import Folder, as_folder, make_folder, writing
from mod_jax.training.trackers import TRACKERS

UPLOAD_EVERY = 60.0  # seconds; a bucket takes about one write a second of one object
MEASURED = ("train/", "eval/", "routing/", "experts/", "perf/")


class MetricWriter:
    """Appends rows to `workdir/metrics.jsonl` and, if asked, to one tracker. Does nothing outside process 0."""

    def __init__(
        self,
        workdir: str | os.PathLike,
        tracker: str = "none",
        config: dict[str, Any] | None = None,
        run_name: str = "",
        resumed_at: int | None = None,
    ):
        """Opens the file, without a half-written last line.

        Args:
          tracker: as in train.tracker.
          config: the flat config, for the tracker.
          run_name: for the tracker; '' takes the workdir's.
          resumed_at: the step restored; rows after it, which the run is about to repeat, are dropped. None keeps all.

        Raises:
          ConfigError: the tracker's package is not installed.
          StorageError: rows cannot be written; so for every method. A run whose rows are lost ends: its checkpoints are
            good, and the same command goes on from the newest once there is room.
        """
        self._file = self._tracker = None
        if jax.process_index() != 0:
            return
        workdir = as_folder(workdir)
        self._path = self._local = workdir / "metrics.jsonl"
        self._spool = None
        with writing(self._path):
            make_folder(workdir)
            resumed = self._path.exists()
            if buckets.is_bucket(workdir):
                self._spool = pathlib.Path(tempfile.mkdtemp(prefix="mod_jax-rows-"))
                self._local = self._spool / "metrics.jsonl"
                if resumed:
                    self._local.write_bytes(self._path.read_bytes())
            self._open_after(math.inf if resumed_at is None else resumed_at)
        if tracker != "none":
            with self._tracking():
                self._tracker = TRACKERS[tracker](workdir, config or {}, run_name or workdir.name, resumed, resumed_at)

    def write(self, step: int, metrics: dict[str, Any]) -> None:
        """Adds a row. Values are scalars (Python, NumPy or JAX) or strings; a tracker gets the finite numbers."""
        if self._file is None:
            return
        row = plain(metrics)
        with writing(self._path):
            self._file.write(to_json({"step": int(step)} | row) + "\n")
            self._file.flush()
            if self._spool and time.monotonic() - self._uploaded > UPLOAD_EVERY:
                self._upload()
        with self._tracking():
            if self._tracker is not None:
                self._tracker.log({k: v for k, v in row.items() if not isinstance(v, str)}, step=int(step))

    def flush(self) -> None:
        """Makes every row written so far survive a power cut."""
        if self._file is not None:
            with writing(self._path):
                os.fsync(self._file.fileno())
                self._upload()

    def close(self) -> None:
        if self._file is None:
            return
        file, self._file = self._file, None
        with self._tracking():
            if self._tracker is not None:
                self._tracker.finish()
        self._tracker = None
        with writing(self._path), file:
            os.fsync(file.fileno())
            self._upload()
        if self._spool:
            shutil.rmtree(self._spool, ignore_errors=True)

    def _upload(self) -> None:
        if self._spool:
            self._path.write_bytes(self._local.read_bytes())
            self._uploaded = time.monotonic()

    def _open_after(self, step: float) -> None:
        """Rewrites the file without rows after `step` and without a half-written last line, then opens it to append."""
        if self._local.exists():
            partial = self._local.with_suffix(".partial")
            with partial.open("w", encoding="utf-8") as file:
                file.writelines(line for line, row in _parse(self._local) if row["step"] <= step)
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, self._local)
        self._file = self._local.open("a", encoding="utf-8")
        self._uploaded = time.monotonic()

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
    """The rows of a metrics.jsonl, in the order written; "NaN", "Infinity" and "-Infinity" become floats again.

    Raises:
      StorageError: it is not there, or cannot be read.
    """
    try:
        return [
            {name: NON_FINITE.get(value, value) if isinstance(value, str) else value for name, value in row.items()}
            for _, row in _parse(as_folder(path))
        ]
    except Exception as error:
        if not buckets.is_failure(error):
            raise
        raise StorageError(
            f"{path}: cannot be read ({getattr(error, 'strerror', None) or buckets.cause(error)})"
        ) from error


def _is_row(row: Any) -> bool:
    """Whether it names its step, and what was measured is numbers: a file edited by hand must not end a run."""
    return (
        isinstance(row, dict)
        and isinstance(row.get("step"), int)
        and all(
            isinstance(value, int | float) or (isinstance(value, str) and value in NON_FINITE)
            for name, value in row.items()
            if name.startswith(MEASURED)
        )
    )


def _parse(path: Folder) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields each line with its row. A half-written last line (a killed run) is passed over, others are announced."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            line = line.decode(errors="replace")
            if not line.endswith("\n"):
                return
            try:
                row = json.loads(line)
            except ValueError:
                row = None
            if _is_row(row):
                yield line, row
            else:
                logging.warning("%s:%d is not a row of metrics, passed over: %.60r", path, number, line)
