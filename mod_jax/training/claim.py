"""One run at a time in a workdir: `claim.json` says which, and whether it is alive.

Two runs in one workdir would mix their rows and delete each other's checkpoints. So a run holds the claim, and *beats*:
it gives a sign of life every few seconds. A claim that has not ended is watched. If it beats, its run is alive. If it
is silent for long enough, its run is dead. The silence is measured from the first look by the clock of the host that
looks, so clocks need not agree. Where the claim lies, on a disk or in a bucket, and what proves at once that a run is
alive or dead, `claim_places` knows.
"""

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator

import jax
import numpy as np
from absl import logging
from jax.experimental import multihost_utils

from mod_jax import buckets
from mod_jax.errors import StorageError
from mod_jax.paths import Folder, make_folder, writing
from mod_jax.training.claim_places import Claimed, InBucket, OnDisk, kernel, lives_here, process_id

BEAT = 10.0  # seconds between two signs of life
TAKEN = "another run is using this workdir"  # what a refusal says


@contextlib.contextmanager
def hold(workdir: Folder) -> Iterator[Callable[[], None]]:
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

    def __init__(self, workdir: Folder, *, beat: float = BEAT, silence: float | None = None):
        """Claims `workdir`, which is created. Waits, up to `silence` seconds, where a run of another host may be alive.

        Args:
          silence: seconds without a sign of life after which a run is dead; None: what the place takes.

        Raises:
          StorageError: another run is using it, which the message names; or files cannot be written there.
        """
        self._workdir = workdir
        with writing(workdir):
            make_folder(workdir)
            self._place = (InBucket if buckets.is_bucket(workdir) else OnDisk)(workdir / "claim.json")
        try:
            self._mine = {"host": socket.gethostname(), "kernel": kernel(), "pid": os.getpid(), "since": _now()}
            self._mine |= process_id()
            with writing(workdir):
                self._wait_for(self._place.silence if silence is None else silence)
                if not self._place.write(self._mine):
                    raise self._refusal(self._place.read())
        except BaseException:
            self._place.close()
            raise
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._keep_beating, args=(beat,), name="claim", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raises StorageError if another run took the workdir, since this one gave no sign of life for too long."""
        with writing(self._workdir):
            other = self._place.read()
        if other and other != self._mine:
            raise StorageError(f"{self._workdir}: while this run stood still, {_describe(other)} took this workdir")

    def close(self) -> None:
        """Ends the claim."""
        self._ended.set()
        self._thread.join()
        try:
            if self._place.read() == self._mine:
                self._place.write(self._mine | {"ended": _now()})
        except Exception as error:
            if not buckets.is_failure(error):
                raise
            logging.warning("%s: cannot say that this run ended: %s", self._workdir, error)
        self._place.close()

    def _wait_for(self, silence: float) -> None:
        """Returns once no other run holds the claim; raises StorageError once it is known that one does."""
        place = self._place
        locked, other = place.lock(), place.read()
        if locked and (not other or "ended" in other or place.is_dead(other)):
            return
        if not locked and other.get("kernel", kernel()) == kernel():
            raise self._refusal(other)
        if other and other["pid"] != os.getpid() and lives_here(other):
            raise self._refusal(other)
        beat, looked = place.last_beat(), time.monotonic()
        if locked and place.seconds_silent() > place.long_silence:
            return
        logging.warning("%s: %s may be alive; watched for %.0f s", self._workdir, _describe(other), silence)
        while time.monotonic() < looked + silence:
            time.sleep(silence / place.looks)
            locked, now = locked or place.lock(), place.read()
            if locked and "ended" in now:
                return
            if now != other or place.last_beat() != beat:
                raise self._refusal(now)
        if not locked:
            raise self._refusal(
                other,
                f". It gives no sign of life, but the disk keeps its lock: if it is dead, delete {place.path}",
            )

    def _refusal(self, other: Claimed, remark: str = "") -> StorageError:
        return StorageError(f"{self._workdir}: {TAKEN}: {_describe(other)}{remark}")

    def _keep_beating(self, beat: float) -> None:
        while not self._ended.wait(beat):
            try:
                self._place.beat(self._mine)
            except Exception as error:  # if the disk is gone for good, the next save says so
                if not buckets.is_failure(error):
                    raise


def _describe(claim: Claimed) -> str:
    if not claim or "ended" in claim:
        return "one that is just starting"
    return f"pid {claim['pid']} on {claim['host']}, since {claim['since']}"


def _now() -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
