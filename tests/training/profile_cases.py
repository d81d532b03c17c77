"""Cases of --profile: a real trace of the right steps, whatever ends the run, and the same training as without it.

Run by test_profile.py in a process of their own.
"""

import os
import signal

import jax
import numpy as np
import pytest
from tiny import TINY

from mod_jax.config import make_config
from mod_jax.training import loop
from mod_jax.training.loop import Outcome, train
from mod_jax.training.profile import SKIP, STEPS, window
from mod_jax.training.rows import read_metrics

CONFIG = make_config(
    **{**TINY, "model.depth": 2, "data.eval_windows": 8, "train.steps": 12, "train.log_every": 1, "train.eval_every": 8}
)


@pytest.mark.parametrize(
    ("first", "last", "expected"),
    [
        (1, 1000, range(6, 11)),
        (501, 1000, range(506, 511)),
        (1, 10, range(6, 11)),
        (1, 9, range(5, 10)),  # less warm-up first
        (1, 4, range(2, 5)),  # then fewer steps
        (7, 8, range(8, 9)),
        (1, 1, range(0)),
    ],
)
def test_the_window(first, last, expected):
    assert (SKIP, STEPS) == (5, 5)
    assert list(window(first, last)) == list(expected)


def traced_steps(workdir):
    """The step numbers of the markers in the only trace of a workdir."""
    (file,) = (workdir / "profile").glob("plugins/profile/*/*.xplane.pb")
    planes = jax.profiler.ProfileData.from_file(str(file)).planes
    events = [event for plane in planes for line in plane.lines for event in line.events]
    assert len(events) > 1000  # what ran inside the steps, too
    return sorted(dict(event.stats)["step_num"] for event in events if event.name == "train")


def learned(workdir):
    rows = read_metrics(workdir / "metrics.jsonl")
    return [{name: value for name, value in row.items() if not name.startswith("perf/")} for row in rows]


@pytest.fixture(scope="module")
def unprofiled(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("unprofiled") / "run"
    assert train(CONFIG, workdir) is Outcome.DONE
    return workdir


def test_a_trace_has_the_steps_of_the_window_and_changes_nothing(unprofiled, tmp_path, capsys):
    workdir = tmp_path / "run"
    assert train(CONFIG, workdir, profile=True) is Outcome.DONE
    assert traced_steps(workdir) == [6, 7, 8, 9, 10]
    lines = [line for line in capsys.readouterr().out.splitlines() if "profile" in line]
    folder = workdir / "profile"
    assert lines == [f"profile of steps 6 to 10 in {folder}; to see it: pip install xprof; xprof --logdir={folder}"]

    assert learned(workdir) == learned(unprofiled)
    identities = [(run / "config.json").read_text() for run in (workdir, unprofiled)]
    assert identities[0] == identities[1]
    assert not (unprofiled / "profile").exists()


def test_a_preempted_run_keeps_the_steps_so_far(tmp_path, capsys, monkeypatch):
    put_batch, batches = loop.put_batch, []

    def put(run, batch):
        batches.append(batch)
        if len(batches) == 8:
            os.kill(os.getpid(), signal.SIGTERM)
        return put_batch(run, batch)

    monkeypatch.setattr(loop, "put_batch", put)
    assert train(CONFIG, tmp_path / "run", profile=True) is Outcome.PREEMPTED
    assert traced_steps(tmp_path / "run") == [6, 7, 8]
    assert "profile of steps 6 to 8 in" in capsys.readouterr().out


def test_an_error_ends_the_trace(tmp_path, capsys, monkeypatch):
    put_batch, batches = loop.put_batch, []

    def put(run, batch):
        batches.append(batch)
        if len(batches) == 7:
            raise ZeroDivisionError
        return put_batch(run, batch)

    monkeypatch.setattr(loop, "put_batch", put)
    with pytest.raises(ZeroDivisionError):
        train(CONFIG, tmp_path / "run", profile=True)
    assert traced_steps(tmp_path / "run") == [6, 7]
    with jax.profiler.trace(tmp_path / "other"):  # nothing is open any more
        jax.block_until_ready(jax.numpy.ones(3))


def test_nothing_to_trace_is_said(unprofiled, capsys):
    (unprofiled / "result.json").unlink()  # else it would print its result and go no further
    assert train(CONFIG, unprofiled, profile=True) is Outcome.DONE  # it was finished already
    assert "profile: nothing traced, for this process trained no step after its first" in capsys.readouterr().out
    assert not (unprofiled / "profile").exists()


def test_a_trace_that_cannot_be_written_costs_a_warning(unprofiled, tmp_path, capsys):
    workdir = tmp_path / "run"
    workdir.mkdir()
    (workdir / "profile").write_text("a file, where a folder should go")
    assert train(CONFIG, workdir, profile=True) is Outcome.DONE
    assert f"WARNING profile: not written to {workdir / 'profile'}: " in capsys.readouterr().out
    np.testing.assert_equal(learned(workdir), learned(unprofiled))
