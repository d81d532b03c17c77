"""One run at a time in a workdir: `claim.json` says which, and whether it is alive.

Two runs in one workdir would mix their rows and delete each other's checkpoints. So a run holds a lock on the claim.
The kernel drops it however the run ends, kill -9 included, and whichever container it ran in: a dead run's workdir is
free at once on the same host.

Some shared disks lock for each host alone. Therefore a run also *beats*: it touches the claim every few seconds. A
claim of another host that has not ended is watched. If it beats, its run is alive. If it is silent for long enough, its
run is dead. The silence is measured from the first look by the clock of the host that looks, so clocks need not agree.
"""

import contextlib
import fcntl
import json
import os
import pathlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from absl import logging
from jax.experimental import multihost_utils

from mod_jax.errors import StorageError
from mod_jax.outputs import to_json
from mod_jax.paths import writing

BEAT = 10.0  # seconds between two signs of life
SILENCE = 150.0  # seconds without one after which a run on another host is dead; network disks may show one 60 s late
TAKEN = "another run is using this workdir"  # what a refusal says
LONG_AGO = 3600.0  # a last beat this many seconds old need not be watched; no two clocks are that far apart


@contextlib.contextmanager
def hold(workdir: pathlib.Path) -> Iterator[Callable[[], None]]:
    """Claims `workdir` for a run, on process 0 for all its processes.

    Yields:
      `Claim.check`, to be called before anything is written that another run might have written meanwhile.

    Raises:
      StorageError: on every process, if another run is using it, or if files cannot be written there.
    """
    claim, error = None, None
    if jax.process_index() == 0:
        try:
            claim = Claim(workdir)
        except StorageError as raised:
            error = raised
    failed = error is not None
    if jax.process_count() > 1:
        failed = bool(multihost_utils.broadcast_one_to_all(np.array(failed)))
    if failed:
        raise error or StorageError(f"{workdir}: process 0 cannot use this workdir, and says why")
    try:
        yield claim.check if claim else lambda: None
    finally:
        if claim:
            claim.close()


class Claim:
    """Holds a workdir from construction to `close`. Readers of a workdir need no claim.

    The file stays when the run ends: the lock must be on the same file for everybody.
    """

    def __init__(self, workdir: pathlib.Path, *, beat: float = BEAT, silence: float = SILENCE):
        """Claims `workdir`, which is created. Waits, up to `silence` seconds, where a run of another host may be alive.

        Raises:
          StorageError: another run is using it, which the message names; or files cannot be written there.
        """
        self._path = workdir / "claim.json"
        self._disk_locks = True
        with writing(workdir):
            workdir.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("a+", encoding="utf-8")  # creates, and truncates nothing
        try:
            self._wait_for(silence)
            self._mine = {"host": socket.gethostname(), "kernel": _kernel(), "pid": os.getpid(), "since": _now()}
            with writing(workdir):
                self._write(self._mine)
        except BaseException:
            self._file.close()
            raise
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._keep_beating, args=(beat,), name="claim", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raises StorageError if another run took the workdir, since this one gave no sign of life for too long."""
        other = self._read()
        if other and other != self._mine:
            raise StorageError(f"{self._path.parent}: while this run stood still, {_describe(other)} took this workdir")

    def close(self) -> None:
        """Ends the claim."""
        self._ended.set()
        self._thread.join()
        try:
            if self._read() == self._mine:
                self._write(self._mine | {"ended": _now()})
        except OSError as error:
            logging.warning("%s: cannot say that this run ended: %s", self._path, error)
        with contextlib.suppress(OSError):
            self._file.close()  # and drop the lock with it

    def _wait_for(self, silence: float) -> None:
        """Returns once no other run holds the claim; raises StorageError once it is known that one does."""
        locked, other = self._lock(), self._read()
        if locked and (not other or "ended" in other):
            return
        if locked and self._disk_locks and other["kernel"] == _kernel():
            return  # had that run been alive, its lock would have been there
        if not locked and other.get("kernel", _kernel()) == _kernel():
            raise self._refusal(other)
        beat, looked = self._last_beat(), time.monotonic()
        if locked and time.time() - beat > LONG_AGO:
            return
        logging.warning("%s: %s may be alive; watched for %.0f s", self._path, _describe(other), silence)
        while time.monotonic() < looked + silence:
            time.sleep(silence / 100)
            locked, now = locked or self._lock(), self._read()
            if locked and "ended" in now:
                return
            if now != other or self._last_beat() != beat:
                raise self._refusal(now)
        if not locked:
            raise self._refusal(
                other, f". It gives no sign of life, but the disk keeps its lock: if it is dead, delete {self._path}"
            )

    def _lock(self) -> bool:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            logging.warning("%s: this disk does not lock files (%s); signs of life decide", self._path, error.strerror)
            self._disk_locks = False
        return True

    def _refusal(self, other: dict[str, Any], remark: str = "") -> StorageError:
        return StorageError(f"{self._path.parent}: {TAKEN}: {_describe(other)}{remark}")

    def _keep_beating(self, beat: float) -> None:
        while not self._ended.wait(beat):
            with contextlib.suppress(OSError):  # if the disk is gone for good, the next save says so
                if self._read() == self._mine:
                    os.utime(self._path)

    def _last_beat(self) -> float:
        with contextlib.suppress(OSError), self._path.open("rb") as file:  # opened anew: asks the server, not a cache
            return os.fstat(file.fileno()).st_mtime
        return 0.0

    def _read(self) -> dict[str, Any]:
        """What the claim says; nothing if it is empty, half written or cannot be read."""
        try:
            claim = json.loads(self._path.read_text(encoding="utf-8"))
            return claim if {"host", "kernel", "pid", "since"} <= claim.keys() else {}
        except (OSError, ValueError, AttributeError):
            return {}

    def _write(self, claim: dict[str, Any]) -> None:
        self._file.seek(0)
        self._file.truncate()
        self._file.write(to_json(claim) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())


def _describe(claim: dict[str, Any]) -> str:
    if not claim or "ended" in claim:
        return "one that is just starting"
    return f"pid {claim['pid']} on {claim['host']}, since {claim['since']}"


def _kernel() -> str:
    """Tells apart two hosts, and a host before and after a restart; the same in all containers of a host."""
    try:
        return pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:  # not Linux
        return socket.gethostname()


def _now() -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
