"""Where the claim of a workdir lies, and what there proves that its run is alive or dead.

On a disk a run holds a lock on the claim. The kernel drops it however the run ends, kill -9 included, and whichever
container it ran in: a dead run's workdir is free at once on the same host. Some shared disks lock for each host alone.

In a bucket there are no locks. There every version of an object has a number, its *generation*, and a write can be
conditional on it: of two runs that take one claim, one succeeds. A beat is a new generation of the same text.

Both have the same methods, by duck typing; `Claim` says when each is called. Errors are those of the disk or bucket.
"""

import contextlib
import fcntl
import json
import os
import pathlib
import socket
import threading
import time
import uuid
from typing import Any

from absl import logging
from etils import epath

from mod_jax import buckets
from mod_jax.outputs import to_json

Claimed = dict[str, Any]  # what a claim says; nothing if it is empty, half written or cannot be read


class OnDisk:
    """A claim in a file."""

    silence = 150.0  # seconds; network disks may show a beat 60 s late
    long_silence = 3600.0  # seconds since the last beat by another host's clock; no two clocks are that far apart
    looks = 100  # while the claim is watched

    def __init__(self, path: pathlib.Path):
        self.path = path
        self._disk_locks = True
        self._file = path.open("a+", encoding="utf-8")  # creates, and truncates nothing

    def lock(self) -> bool:
        """Whether no other process holds the lock; then this one does."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            logging.warning("%s: this disk does not lock files (%s); signs of life decide", self.path, error.strerror)
            self._disk_locks = False
        return True

    def is_dead(self, other: Claimed) -> bool:
        """Whether the run of a claim whose lock is free is known to have ended."""
        return (self._disk_locks and other["kernel"] == kernel()) or lives_here(other) is False

    def last_beat(self) -> float:
        with contextlib.suppress(OSError), self.path.open("rb") as file:  # opened anew: asks the server, not a cache
            return os.fstat(file.fileno()).st_mtime
        return 0.0

    def seconds_silent(self) -> float:
        return time.time() - self.last_beat()

    def read(self) -> Claimed:
        try:
            return _parse(self.path.read_bytes())
        except OSError:
            return {}

    def write(self, claim: Claimed) -> bool:
        """Whether it could be written, and not another run was first."""
        self._file.seek(0)
        self._file.truncate()
        self._file.write(to_json(claim) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        return True

    def beat(self, mine: Claimed) -> None:
        if self.read() == mine:
            os.utime(self.path)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._file.close()  # and drop the lock with it


class InBucket:
    """A claim in an object."""

    silence = 60.0  # seconds; what is written to a bucket is seen by everybody at once
    long_silence = 60.0  # by the clock of the bucket itself
    looks = 20

    def __init__(self, path: epath.Path):
        self.path = path
        self._generation = 0  # of what was read or written last; 0: there is no object
        self._updated = 0.0
        self._one_at_a_time = threading.RLock()  # beats come from another thread

    def lock(self) -> bool:
        return True

    def is_dead(self, other: Claimed) -> bool:
        return lives_here(other) is False

    def last_beat(self) -> int:
        return self._generation

    def seconds_silent(self) -> float:
        """By the clock of the bucket, which says when a new object was written."""
        probe = buckets.blob(self.path.with_name(f".claim-{uuid.uuid4().hex[:12]}"))
        probe.upload_from_string(b"", timeout=buckets.TIMEOUT)
        now = probe.updated.timestamp()
        probe.delete(timeout=buckets.TIMEOUT)
        return now - self._updated

    def read(self) -> Claimed:
        from google.api_core.exceptions import NotFound, PreconditionFailed

        with self._one_at_a_time:
            while True:
                blob = buckets.blob(self.path)
                try:
                    blob.reload(timeout=buckets.TIMEOUT)
                except NotFound:
                    self._generation, self._updated = 0, 0.0
                    return {}
                try:
                    text = blob.download_as_bytes(if_generation_match=blob.generation, timeout=buckets.TIMEOUT)
                except (NotFound, PreconditionFailed):  # another generation came between
                    continue
                self._generation, self._updated = blob.generation, blob.updated.timestamp()
                return _parse(text)

    def write(self, claim: Claimed) -> bool:
        """Whether nobody has written since this one read or wrote last."""
        from google.api_core.exceptions import PreconditionFailed

        with self._one_at_a_time:
            blob = buckets.blob(self.path)
            try:
                text = to_json(claim) + "\n"
                blob.upload_from_string(text, if_generation_match=self._generation, timeout=buckets.TIMEOUT)
            except PreconditionFailed:
                return False
            self._generation = blob.generation
            return True

    def beat(self, mine: Claimed) -> None:
        with self._one_at_a_time:
            if self.read() == mine:
                self.write(mine)

    def close(self) -> None:
        pass


def lives_here(other: Claimed) -> bool | None:
    """Whether a claim is of a process that this one sees; None if it may live where this one cannot see it.

    A number of a process is used again after a while, but not with the same time of its start.
    """
    here = process_id()
    if not here or other["kernel"] != kernel() or other.get("processes") != here["processes"]:
        return None
    return _start_of(other["pid"]) == other.get("started")


def process_id() -> dict[str, Any]:
    """What tells this process from every other beside its number; nothing where the system does not say."""
    try:
        return {"processes": os.readlink("/proc/self/ns/pid"), "started": _start_of(os.getpid())}
    except OSError:
        return {}


def kernel() -> str:
    """Tells apart two hosts, and a host before and after a restart; the same in all containers of a host."""
    try:
        return pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:  # not Linux
        return socket.gethostname()


def _start_of(pid: int) -> str:
    """When a process started, in the kernel's ticks; '' if there is none."""
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


def _parse(text: bytes) -> Claimed:
    try:
        claim = json.loads(text)
        return claim if {"host", "kernel", "pid", "since"} <= claim.keys() else {}
    except (ValueError, AttributeError):
        return {}
