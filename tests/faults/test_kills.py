"""A run that is killed, wherever it stands, and started again ends like one that was never disturbed."""

import os
import pathlib
import signal
import sys

import pytest
from harness import EVALUATED, SAVING, STEPPING, Run, assert_same_run, cpu_seconds, newest_step, train, wait_until


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("uninterrupted") / "run"
    train(workdir)
    return workdir


@pytest.mark.slow
def test_killed_while_saving(uninterrupted, tmp_path):
    workdir = tmp_path / "run"
    for moment in (SAVING, EVALUATED):
        with Run(workdir) as run:
            run.wait_for(moment)
            run.send(signal.SIGKILL)
            assert run.end() == [-signal.SIGKILL]
    train(workdir)
    assert newest_step(workdir) == 14
    assert_same_run(workdir, uninterrupted)


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
