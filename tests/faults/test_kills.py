"""A run that is killed, wherever it stands, and started again ends like one that was never disturbed."""

import functools
import os
import pathlib
import signal
import sys

import kills
import pytest
from harness import STEPPING, Run, assert_same_run, cpu_seconds, wait_until


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """By number of processes, (workdir, CPU seconds) of a run that nobody disturbed."""
    folder = tmp_path_factory.mktemp("undisturbed")
    return functools.cache(lambda processes: kills.undisturbed(folder, processes))


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "seed"), [(1, 1), (1, 2), (1, 3), (2, 4)])
def test_a_run_killed_at_any_moment_ends_like_one_that_was_not(undisturbed, tmp_path, processes, seed):
    """A sample; `kills.py` has the long form, and `kills.txt` what it last printed."""
    whole, life = undisturbed(processes)
    ends = kills.kill_until_done(tmp_path / "run", seed, life, processes=processes, kills=2)
    assert_same_run(tmp_path / "run", whole)
    print(ends)


def children(pid):
    """Of every thread of a process."""
    lists = [path.read_text() for path in pathlib.Path(f"/proc/{pid}/task").glob("*/children")]
    return [int(child) for child in " ".join(lists).split()]


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="finds the worker in /proc")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_worker_processes_end_with_the_run(tmp_path, number):
    """Killed, or stopped by a signal to every process of the job, as a batch system sends it."""
    with Run(tmp_path / "run", {"data.workers": 1, "train.steps": 10_000, "train.save_every": 0}) as run:
        run.wait_for(STEPPING)
        workers = children(run.processes[0].pid)
        assert workers
        for pid in workers if number != signal.SIGKILL else ():
            os.kill(pid, number)
        run.send(number)
        assert run.end() == [-number if number == signal.SIGKILL else 0]
        assert run.reached("^PREEMPTED at step") == (number != signal.SIGKILL)
        wait_until(
            lambda: not any(cpu_seconds(pid) for pid in workers), lambda: 0.0, "the workers' end", lambda: str(workers)
        )
