"""One run at a time in a workdir: who is refused, and when a dead run's workdir is free again."""

import errno
import json
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

import pytest

from mod_jax.errors import StorageError
from mod_jax.training import claim_places
from mod_jax.training.claim import Claim
from mod_jax.training.claim_places import OnDisk

HOLD = """
import pathlib, sys, time
from mod_jax.training.claim import Claim
held = Claim(pathlib.Path(sys.argv[1]))
print("held", flush=True)
time.sleep(600)
"""


def written(workdir: pathlib.Path) -> dict:
    return json.loads((workdir / "claim.json").read_text())


def leave_claim_of(workdir: pathlib.Path, *, seconds_ago: float = 0.0, **changes) -> pathlib.Path:
    """What a run on another host left, whose lock this host cannot see."""
    workdir.mkdir(exist_ok=True)
    other = {"host": "elsewhere", "kernel": "another", "pid": 7, "since": "2026-01-01 00:00:00 UTC"} | changes
    path = workdir / "claim.json"
    path.write_text(json.dumps(other))
    os.utime(path, (time.time() - seconds_ago,) * 2)
    return path


def test_a_second_run_is_refused_while_the_first_lives_and_free_when_it_is_killed(tmp_path):
    with subprocess.Popen([sys.executable, "-c", HOLD, tmp_path], stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout.readline() == "held\n"
        with pytest.raises(StorageError, match=rf"another run is using this workdir: pid {first.pid} on .*, since 20"):
            Claim(tmp_path)
        assert written(tmp_path)["pid"] == first.pid  # a refused run changes nothing
        first.send_signal(signal.SIGKILL)
    start = time.monotonic()
    Claim(tmp_path).close()
    assert time.monotonic() - start < OnDisk.silence / 10
    assert written(tmp_path)["pid"] == os.getpid()
    assert "ended" in written(tmp_path)


def test_two_threads_are_two_runs_and_a_finished_run_leaves_the_workdir_free(tmp_path):
    first = Claim(tmp_path / "new" / "run")
    with pytest.raises(StorageError, match=f"pid {os.getpid()} on"):
        Claim(tmp_path / "new" / "run")
    first.close()
    second = Claim(tmp_path / "new" / "run")
    second.check()
    second.close()


def test_a_run_on_another_host_that_beats_is_alive(tmp_path):
    path, done = leave_claim_of(tmp_path), threading.Event()

    def beat():
        while not done.wait(0.1):
            os.utime(path)

    beating = threading.Thread(target=beat)
    beating.start()
    try:
        with pytest.raises(StorageError, match="pid 7 on elsewhere, since 2026-01-01 00:00:00 UTC"):
            Claim(tmp_path, silence=60.0)
    finally:
        done.set()
        beating.join()
    assert written(tmp_path)["pid"] == 7


@pytest.mark.parametrize("clock", [-300.0, 0.0, 300.0])
def test_a_run_on_another_host_is_dead_once_it_is_silent_whatever_its_clock(tmp_path, clock):
    leave_claim_of(tmp_path, seconds_ago=clock)
    start = time.monotonic()
    Claim(tmp_path, silence=0.5).close()
    assert time.monotonic() - start >= 0.5


def test_a_run_on_another_host_that_ended_or_was_silent_for_hours_is_not_waited_for(tmp_path):
    for changes in ({"ended": "2026-01-01 00:01:00 UTC"}, {"seconds_ago": 7200.0}):
        leave_claim_of(tmp_path, **changes)
        Claim(tmp_path, silence=1e6).close()


def test_a_claim_that_nobody_can_read_holds_nobody_off(tmp_path):
    for content in ("", "{", "[1]", '{"host": "x"}'):
        (tmp_path / "claim.json").write_text(content)
        Claim(tmp_path, silence=1e6).close()


def test_where_the_disk_does_not_lock_signs_of_life_decide(tmp_path, monkeypatch):
    def no_locks(file, operation):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(claim_places.fcntl, "flock", no_locks)
    first = Claim(tmp_path, beat=0.1)
    with pytest.raises(StorageError, match=f"pid {os.getpid()} on"):
        Claim(tmp_path, silence=60.0)
    first.close()
    Claim(tmp_path, silence=1e6).close()


def test_it_beats(tmp_path):
    held = Claim(tmp_path, beat=0.05)
    os.utime(tmp_path / "claim.json", (0, 0))
    while (tmp_path / "claim.json").stat().st_mtime == 0:
        time.sleep(0.02)
    held.close()


def test_a_run_that_stood_still_and_lost_its_workdir_writes_no_more(tmp_path):
    held = Claim(tmp_path)
    held.check()
    leave_claim_of(tmp_path)
    with pytest.raises(StorageError, match=r"while this run stood still, pid 7 on elsewhere, .* took this workdir"):
        held.check()
    held.close()
    assert written(tmp_path)["pid"] == 7


def test_where_nothing_can_be_written_the_folder_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=r"file: cannot be written: File exists"):
        Claim(tmp_path / "file")
