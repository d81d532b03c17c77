"""A run that is told to stop, wherever it stands, saves within one step, exits with 0, and owes nothing afterwards."""

import re
import signal

import pytest
from harness import (
    COMPILED,
    DONE,
    EVALUATED,
    PREPARED,
    REPORTING,
    RESTORED,
    SAVING,
    STEPPING,
    Run,
    assert_same_run,
    newest_step,
    train,
)

CHANGES = {"train.steps": 9, "train.log_every": 1, "train.eval_every": 3, "train.save_every": 4}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("undisturbed") / "run"
    train(workdir, CHANGES)
    return workdir


def last_step(run):
    """The newest step that this life has logged, or began with: 0 if none. A step is logged when the next one runs."""
    return max(map(int, re.findall(r"^(?:step +|RESUMED step )(\d+)", run.output(), re.MULTILINE)), default=0)


def stop(run, moment, number):
    """Sends a signal at this moment of a life; returns (the newest step logged by then, the step saved)."""
    run.wait_for(moment)
    run.send(signal.SIGSTOP)  # so that it makes no step while its output is read
    step = last_step(run)
    run.send(number)
    run.send(signal.SIGCONT)
    assert run.end() == [0] * len(run.processes), run.outputs()
    (saved,) = re.findall(
        r"^PREEMPTED at step (\d+) of 9: saved; the same command resumes$", run.output(), re.MULTILINE
    )
    assert newest_step(run.workdir) == int(saved)
    return step, int(saved)


@pytest.mark.slow
@pytest.mark.parametrize(
    "stops",
    [
        [(PREPARED, signal.SIGHUP), (STEPPING, signal.SIGTERM), (COMPILED, signal.SIGINT)],
        [(EVALUATED, signal.SIGUSR1), (RESTORED, signal.SIGTERM), (SAVING, signal.SIGHUP)],
    ],
    ids=["before a step", "after one"],
)
def test_stopped_in_every_phase_it_ends_like_a_run_that_was_not(undisturbed, tmp_path, stops):
    """Each life makes a step at least, and the evaluation that is due where it stops is made once, by the next life."""
    workdir, output = tmp_path / "run", ""
    for moment, number in stops:
        with Run(workdir, CHANGES) as run:
            step, saved = stop(run, moment, number)
            assert step < saved <= step + 2  # the next step runs when a step is logged
            assert f"{number.name} received: will save and stop after the step in progress" in run.output()
            output += run.output()
    output += train(workdir, CHANGES).output()
    assert_same_run(workdir, undisturbed)  # every evaluation is there once
    assert len(re.findall(DONE, output, re.MULTILINE)) == 1


@pytest.mark.slow
def test_told_to_stop_during_the_report_it_ends_as_done(undisturbed, tmp_path):
    with Run(tmp_path / "run", CHANGES) as run:
        run.wait_for(REPORTING)
        run.send(signal.SIGTERM)
        assert run.end() == [0]
        assert run.reached(DONE)
    assert_same_run(tmp_path / "run", undisturbed)


@pytest.mark.slow
def test_a_signal_to_one_of_two_processes_stops_both(tmp_path):
    with Run(tmp_path / "run", CHANGES | {"train.steps": 100_000}, processes=2) as run:
        run.wait_for(STEPPING)
        run.send(signal.SIGUSR1, 1)
        assert run.end() == [0, 0], run.outputs()
        (saved,) = re.findall(r"^PREEMPTED at step (\d+)", run.output(), re.MULTILINE)
        assert newest_step(run.workdir) == int(saved)
