"""A run that is killed, wherever it stands, and started again ends like one that was never disturbed."""

import signal

import pytest
from harness import EVALUATED, SAVING, Run, assert_same_run, newest_step, train


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
