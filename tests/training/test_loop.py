"""Whole runs on synthetic text: fresh, finished, preempted, killed, resumed, refused, extended and gone bad."""

import contextlib
import io
import json
import math
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
from tiny import TINY

from mod_jax import cli, tuning
from mod_jax import config as config_lib
from mod_jax.config import make_config
from mod_jax.errors import ConfigError, NumericsError, ResumeRefused
from mod_jax.models import flops
from mod_jax.training import dry_run as dry_run_module
from mod_jax.training import language, loop, prepare, result
from mod_jax.training.checkpoint import Checkpointer
from mod_jax.training.dry_run import dry_run
from mod_jax.training.language import Language
from mod_jax.training.loop import Outcome, train
from mod_jax.training.rows import MetricWriter, read_metrics
from mod_jax.training.watch import Watch

ROOT = pathlib.Path(__file__).resolve().parents[2]
CHANGES = {
    "model.depth": 2,
    "routing.predictor": False,
    "data.eval_windows": 8,
    "optimizer.eps": 1e-3,  # so that another order of summation, on other devices, stays a rounding error
    "train.steps": 6,
    "train.log_every": 1,
    "train.eval_every": 2,
    "train.save_every": 2,
    "train.keep": 3,
}


def make_run_config(**changes):
    return make_config(**{**TINY, **CHANGES, **changes})


def quietly(function, *args, **kwargs):
    """(result, what was printed)"""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        result = function(*args, **kwargs)
    return result, out.getvalue()


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """(workdir, output) of an uninterrupted run."""
    workdir = tmp_path_factory.mktemp("finished") / "run"
    outcome, output = quietly(train, make_run_config(), workdir)
    assert outcome is Outcome.DONE
    return workdir, output


@pytest.fixture
def copied(finished, tmp_path):
    return pathlib.Path(shutil.copytree(finished[0], tmp_path / "run"))


def learned(workdir):
    """Rows of metrics.jsonl without what depends on the clock."""
    rows = read_metrics(workdir / "metrics.jsonl")
    return [{name: value for name, value in row.items() if not name.startswith("perf/")} for row in rows]


def restored(workdir, config=None):
    """The newest state of a run, as NumPy arrays."""
    (run, _) = quietly(prepare.prepare_run, config or make_run_config(), workdir)
    with Checkpointer(run.workdir / "checkpoints", read_only=True) as checkpointer:
        return jax.device_get(checkpointer.restore(run.abstract_state).state)


def restored_metadata(workdir):
    with Checkpointer(workdir / "checkpoints", read_only=True) as checkpointer:
        return checkpointer.read_metadata()


def steps_on_disk(workdir):
    return sorted(int(path.name) for path in (workdir / "checkpoints").iterdir() if path.name.isdigit())


def assert_same_bits(actual, expected):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    pairs = zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True)
    assert all(np.asarray(a).tobytes() == np.asarray(e).tobytes() for a, e in pairs)


def contents(workdir):
    """All that a run leaves but its plots, and but the claim, which says when this process used the workdir."""
    paths = (path for path in workdir.rglob("*") if path.is_file() and path.name != "claim.json")
    return {path: path.read_bytes() for path in paths if "report" not in path.parts}


@pytest.fixture
def signal_at(monkeypatch):
    """signal_at(3): this process gets a SIGTERM while its third batch from now is put on the devices."""
    put_batch = loop.put_batch

    def arm(count):
        calls = []

        def put(*args):
            calls.append(None)
            if len(calls) == count:
                os.kill(os.getpid(), signal.SIGTERM)
            return put_batch(*args)

        monkeypatch.setattr(loop, "put_batch", put)

    return arm


def test_a_fresh_run_leaves_everything_behind(finished):
    workdir, output = finished
    assert f"FRESH RUN: no checkpoint in {workdir / 'checkpoints'}" in output  # T5
    assert output.splitlines()[-1] == "DONE at step 6"
    assert steps_on_disk(workdir) == [2, 4, 6]
    assert {path.stem for path in (workdir / "report").glob("*.png")} == {
        *("loss", "scores", "block_health", "positions", "routed_tokens_topk", "routed_tokens_threshold")
    }
    known = json.loads((workdir / "config.json").read_text())
    assert config_lib.from_flat_dict(known["config"]) == make_run_config()
    assert known["changed_from_default"]["train.steps"] == 6

    rows = read_metrics(workdir / "metrics.jsonl")
    train_rows = [row for row in rows if "train/loss" in row]
    assert [row["step"] for row in train_rows] == [1, 2, 3, 4, 5, 6]
    assert [row["step"] for row in rows if "eval/topk_loss" in row] == [2, 4, 6]
    assert {row["data/digest"] for row in rows} == {known["corpus_digest"][:12]}  # T22
    assert train_rows[-1]["train/loss"] < train_rows[0]["train/loss"]
    assert [row["train/tokens"] for row in train_rows] == [128 * step for step in range(1, 7)]


def test_rerunning_a_finished_run_only_reports_again(copied, monkeypatch):
    before = contents(copied)
    shutil.rmtree(copied / "report")

    def refuse(*args):
        raise AssertionError("nothing is left to train")

    monkeypatch.setattr(loop, "compile_step", refuse)
    outcome, output = quietly(train, make_run_config(), copied)
    assert outcome is Outcome.DONE
    assert "RESUMED step 6 of 6" in output
    assert (copied / "report" / "loss.png").exists()
    after = contents(copied)
    assert after.keys() == before.keys()
    assert {path.name for path in before if after[path] != before[path]} <= {"config.json"}


def test_a_finished_run_prints_its_stored_result_and_computes_nothing(copied, finished, monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("nothing is left to do")

    before = contents(copied)
    with monkeypatch.context() as patch:
        for module, name in (
            *((prepare, name) for name in ("prepare_corpus", "make_model")),
            *((loop, name) for name in ("Checkpointer", "compile_step")),
            (language, "Evaluator"),
        ):
            patch.setattr(module, name, refuse)
        outcome, output = quietly(train, make_run_config(), copied)
        assert outcome is Outcome.DONE
        _, said_of_free_keys = quietly(train, make_run_config(**{"data.eval_windows": 4}), copied)
    assert "eval_windows" not in output
    assert "data.eval_windows=4 (then 8)" in said_of_free_keys
    table, first_table = (text[text.index("held out under") :] for text in (output, finished[1]))
    assert table == first_table
    assert table.splitlines()[-1] == "DONE at step 6"
    assert contents(copied) == before

    with monkeypatch.context() as patch:  # what was finished is this run alone, and all of it
        patch.setattr(prepare, "prepare_corpus", refuse)
        shutil.rmtree(copied / "checkpoints" / "6")
        for changes, error in (({}, AssertionError), ({"seed": 1}, AssertionError)):
            with pytest.raises(error):
                quietly(train, make_run_config(**changes), copied)


@pytest.mark.parametrize(
    "edit",
    [
        lambda stored: [],
        lambda stored: {"evaluation": {}},
        lambda stored: {name: value for name, value in stored.items() if name != "fingerprint"},
        lambda stored: stored | {"config": []},
        lambda stored: stored | {"tokens": "many"},
        lambda stored: stored | {"step": None},
        lambda stored: stored | {"evaluation": stored["evaluation"] | {"eval/topk_loss": "low"}},
    ],
)
def test_a_result_that_was_edited_until_it_says_nothing_counts_as_none(copied, edit):
    stored = json.loads((copied / "result.json").read_text())
    assert result.stored_lines(make_run_config(), copied)
    (copied / "result.json").write_text(json.dumps(edit(stored)))
    assert result.read(copied) is None or result.stored_lines(make_run_config(), copied) == []


def test_the_result_is_written_last_and_says_what_the_run_was(finished, copied):
    stored = json.loads((copied / "result.json").read_text())
    config = make_run_config()
    assert stored["step"] == 6
    assert stored["tokens"] == 6 * 8 * 16
    assert stored["flops"] == pytest.approx(6 * 8 * flops.train_flops(config, 257))
    assert stored["fingerprint"] == config_lib.fingerprint(config)
    assert stored["wall_seconds"] > 0
    evaluation = read_metrics(copied / "metrics.jsonl")[-1]
    assert stored["evaluation"]["eval/topk_loss"] == evaluation["eval/topk_loss"]
    assert {"commit", "corpus_digest", "device", "finished"} <= stored.keys()
    files = [path for path in copied.rglob("*") if path.is_file() and path.name != "claim.json"]
    assert max(files, key=lambda path: path.stat().st_mtime_ns).name == "result.json"


def test_the_mark_of_the_end_is_taken_away_before_a_run_goes_on(copied, signal_at):
    signal_at(1)
    outcome, _ = quietly(train, make_run_config(**{"train.steps": 9}), copied, extend=True)
    assert outcome is Outcome.PREEMPTED
    assert not (copied / "result.json").exists()
    seconds = restored_metadata(copied)["wall_seconds"]
    signal_at(99)
    quietly(train, make_run_config(**{"train.steps": 9}), copied)
    stored = json.loads((copied / "result.json").read_text())
    assert stored["step"] == 9
    assert stored["wall_seconds"] > seconds  # those of the processes before are in it


def test_a_tracker_that_is_missing_is_said_before_the_corpus_is_prepared(tmp_path, monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("too late")

    monkeypatch.setattr(prepare, "prepare_corpus", refuse)
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match=r"train\.tracker = 'wandb'"):
        quietly(train, make_run_config(**{"train.tracker": "wandb"}), tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


def test_a_state_beyond_the_memory_is_refused_before_any_of_it_is_allocated(tmp_path, monkeypatch):
    monkeypatch.setattr(tuning, "memory_bytes", lambda device: 2**24)
    quietly(prepare.prepare_run, make_run_config(), tmp_path / "run")
    with pytest.raises(ConfigError, match=r"config\.model: parameters and moments take [\d,.]+ GiB of each device"):
        quietly(train, make_run_config(**{"model.width": 2**20, "model.depth": 64}), tmp_path / "run")


def test_a_preempted_run_equals_an_uninterrupted_one(finished, tmp_path, monkeypatch, signal_at):
    """Preempted at an evaluation step, in between, and at the end; in a relative folder. Bit for bit, row for row."""
    monkeypatch.chdir(tmp_path)
    config = make_run_config()
    for count, step in ((2, 2), (1, 3), (3, 6)):
        signal_at(count)
        outcome, output = quietly(train, config, "run")
        assert outcome is Outcome.PREEMPTED
        assert output.splitlines()[-1] == f"PREEMPTED at step {step} of 6: saved; the same command resumes"
        assert max(steps_on_disk(tmp_path / "run")) == step
    assert [row["step"] for row in learned(tmp_path / "run") if "eval/topk_loss" in row] == [2, 4]
    signal_at(99)
    outcome, output = quietly(train, config, "run")
    assert outcome is Outcome.DONE
    assert f"RESUMED step 6 of 6 from {tmp_path / 'run' / 'checkpoints'}" in output  # T5
    assert_same_bits(restored(tmp_path / "run"), restored(finished[0]))
    assert learned(tmp_path / "run") == learned(finished[0])


def test_rows_do_not_tell_where_a_run_was_stopped(tmp_path, signal_at):
    """Intervals of four steps end at 1, 4, 8, 12 and at the evaluation of step 10; stopped at 3, 7, 10 and 11."""
    changes = {"train.steps": 12, "train.log_every": 4, "train.save_every": 6, "train.eval_every": 10}
    config = make_run_config(**changes)
    assert quietly(train, config, tmp_path / "whole")[0] is Outcome.DONE
    for count in (3, 4, 3, 1):
        signal_at(count)
        assert quietly(train, config, tmp_path / "run")[0] is Outcome.PREEMPTED
    signal_at(99)
    assert quietly(train, config, tmp_path / "run")[0] is Outcome.DONE
    rows = learned(tmp_path / "run")
    assert [row["step"] for row in rows if "train/loss" in row] == [1, 4, 8, 10, 12]
    assert rows == learned(tmp_path / "whole")
    assert_same_bits(restored(tmp_path / "run", config), restored(tmp_path / "whole", config))


def test_an_error_closes_the_tracker_and_the_rows(tmp_path, monkeypatch):
    closed, put_batch, calls = [], loop.put_batch, []
    monkeypatch.setattr(MetricWriter, "close", lambda writer: closed.append(writer))

    def crash(*args):
        calls.append(None)
        if len(calls) == 3:
            raise RuntimeError("power cut")
        return put_batch(*args)

    monkeypatch.setattr(loop, "put_batch", crash)
    with pytest.raises(RuntimeError, match="power cut"):
        quietly(train, make_run_config(), tmp_path / "run")
    assert len(closed) == 1


def test_a_crash_between_saves_repeats_the_lost_steps(finished, tmp_path, monkeypatch):
    put_batch, calls = loop.put_batch, []

    def crash(*args):
        calls.append(None)
        if len(calls) == 6:
            raise RuntimeError("power cut")
        return put_batch(*args)

    monkeypatch.setattr(loop, "put_batch", crash)
    with pytest.raises(RuntimeError, match="power cut"):
        quietly(train, make_run_config(), tmp_path / "run")
    assert max(row["step"] for row in learned(tmp_path / "run")) >= 4
    outcome, output = quietly(train, make_run_config(), tmp_path / "run")
    assert outcome is Outcome.DONE
    assert "RESUMED step 4 of 6" in output
    assert_same_bits(restored(tmp_path / "run"), restored(finished[0]))
    assert learned(tmp_path / "run") == learned(finished[0])


def test_a_signal_before_the_first_step_still_saves(tmp_path, monkeypatch):
    compile_step = loop.compile_step

    def interrupted(run):
        os.kill(os.getpid(), signal.SIGTERM)
        return compile_step(run)

    monkeypatch.setattr(loop, "compile_step", interrupted)
    outcome, _ = quietly(train, make_run_config(), tmp_path / "run")
    assert outcome is Outcome.PREEMPTED
    assert steps_on_disk(tmp_path / "run") == [1]


def test_another_run_is_refused_with_every_difference(copied, capsys):
    before = contents(copied)
    changes = {"model.width": 32, "optimizer.learning_rate": 0.5, "routing.capacity": 0.5, "seed": 1}
    with pytest.raises(ResumeRefused) as refused:
        quietly(train, make_run_config(**changes), copied)
    for line in ("model.width: 16 -> 32", "optimizer.learning_rate: 0.003 -> 0.5", "routing.capacity: 0.25 -> 0.5"):
        assert line in str(refused.value)
    assert "seed: 0 -> 1" in str(refused.value)
    assert "train.log_every" not in str(refused.value)
    assert cli.exit_code(lambda: train(make_run_config(seed=1), copied)) == 7
    assert "seed: 0 -> 1" in capsys.readouterr().err
    assert contents(copied) == before  # nothing was touched


def test_free_keys_may_change_and_an_extension_is_asked_for(copied):
    free = {"train.log_every": 3, "train.eval_every": 0, "train.max_bad_steps": 2, "train.keep": 1}
    free |= {"data.eval_windows": 4, "model.context": 32, "train.accumulation": 2, "mesh.data": 4}
    longer = make_run_config(**free, **{"train.steps": 8})
    with pytest.raises(ResumeRefused, match=r"train.steps: 6 -> 8 .*extend"):
        quietly(train, longer, copied)
    outcome, output = quietly(train, longer, copied, extend=True)
    assert outcome is Outcome.DONE
    assert "RESUMED step 6 of 8" in output
    assert "EXTENDED from 6 to 8 steps: the learning rate was 1.50e-04 at step 6" in output
    assert learned(copied)[-1]["step"] == 8
    assert steps_on_disk(copied)[-1] == 8
    assert quietly(train, longer, copied)[0] is Outcome.DONE  # now it is a run of 8 steps


def test_a_length_that_the_run_has_passed_is_refused_before_anything_is_written(copied):
    before = contents(copied)
    with pytest.raises(ResumeRefused, match="has done 6 of 6 steps, and is now asked for 5"):
        quietly(train, make_run_config(**{"train.steps": 5}), copied, extend=True)
    assert contents(copied) == before


def test_the_same_text_and_length_in_other_words_are_resumed_and_said(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "corpus").mkdir()
    for i in range(12):
        (tmp_path / "corpus" / f"{i}.txt").write_text(f"text number {i} " * 200)
    still = {"train.steps": 2, "model.layout": "F", "train.eval_every": 0, "data.eval_windows": 1}
    quietly(train, make_run_config(**{**still, "data.source": "text:corpus"}), "run")
    tokens = {"train.steps": 0, "train.tokens": 2 * 8 * 16, "data.source": f"text:{tmp_path / 'corpus'}"}
    outcome, output = quietly(train, make_run_config(**{**still, **tokens}), "run")
    assert outcome is Outcome.DONE
    assert f"data.source: 'text:corpus' -> 'text:{tmp_path / 'corpus'}': the same text, corpus digest" in output
    assert "train.tokens: 0 -> 256: the same 2 steps" in output
    (tmp_path / "corpus" / "12.txt").write_text("more text")
    with pytest.raises(ResumeRefused, match=r"\n  corpus digest: "):
        quietly(train, make_run_config(**{**still, "data.source": "text:corpus"}), "run")


def test_numerics_end_the_run_and_leave_the_newest_good_checkpoint(tmp_path, monkeypatch, signal_at, capsys):
    """From step 3 on every loss is NaN; saving after each of these steps would push the good one out."""
    workdir = tmp_path / "run"
    config = make_run_config(**{"train.save_every": 1, "train.keep": 1, "train.max_bad_steps": 3, "train.steps": 8})
    signal_at(2)
    assert quietly(train, config, workdir)[0] is Outcome.PREEMPTED
    signal_at(99)
    good = restored(workdir, config)
    restore_or_init = loop.restore_or_init

    def poisoned(*args):
        state, interval = restore_or_init(*args)
        spoiled = dict(state.params, final_norm=jax.tree.map(lambda x: x * math.nan, state.params["final_norm"]))
        return state._replace(params=spoiled), interval

    with monkeypatch.context() as patch:
        patch.setattr(loop, "restore_or_init", poisoned)
        patch.setattr(Watch, "evaluate", lambda *args: {"eval/topk_loss": math.nan})
        with pytest.raises(NumericsError, match="3 consecutive steps up to step 5"):
            quietly(train, config, workdir)
        assert cli.exit_code(lambda: train(config, workdir)) == 3
        assert "error: 3 consecutive steps" in capsys.readouterr().err
    assert steps_on_disk(workdir) == [2]
    assert_same_bits(restored(workdir, config), good)
    outcome, output = quietly(train, config, workdir)  # without the poison it goes on
    assert outcome is Outcome.DONE
    assert "RESUMED step 2 of 8" in output


def test_training_compiles_nothing_after_the_first_step(tmp_path, monkeypatch):
    compilations, after_step = [], Watch.after_step

    def note(event, seconds, **kwargs):
        if "backend_compile" in event:
            compilations.append(event)

    jax.monitoring.register_event_duration_secs_listener(note)
    counts = []
    monkeypatch.setattr(
        Watch, "after_step", lambda self, *args: (counts.append(len(compilations)), after_step(self, *args))
    )
    quietly(train, make_run_config(**{"train.eval_every": 0, "train.save_every": 0}), tmp_path / "run")
    assert len(counts) == 6
    assert counts[0] > 0
    assert set(counts[1:]) == {counts[0]}


def test_a_workdir_is_absolute_from_the_start(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert quietly(prepare.prepare_run, make_run_config(), "runs/a")[0].workdir == tmp_path / "runs" / "a"
    assert quietly(prepare.prepare_run, make_run_config(), "~/a")[0].workdir == tmp_path / "home" / "a"


def test_a_dry_run_writes_nothing(tmp_path):
    _, output = quietly(dry_run, make_run_config(), tmp_path / "run")
    assert re.search(r"FR, [\d,]+ parameters \(8,224 in embeddings of 257 ids\)", output)
    assert re.search(r"6 steps, 768 tokens, .* training FLOPs", output)
    assert re.search(r"memory [\d,]+ MiB per device", output)
    assert re.search(r"time +about \d+ (s|min) here: .* s a step, measured on random tokens|a second", output)
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_without_data_says_size_and_time_and_then_what_is_missing(tmp_path, monkeypatch):
    lines = []
    monkeypatch.setattr(dry_run_module, "say", lines.append)
    config = make_run_config(**{"data.tokenizer": "sentencepiece:no.model", "model.vocab_size": 300})
    with pytest.raises(ConfigError, match=r"no\.model is not a file"):
        dry_run(config, tmp_path / "run")
    named = [line.split()[0] for line in lines]
    assert named == ["model", "MISSING", "time", "DRY"]
    assert "embeddings of 300 ids" in lines[0]
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_of_more_than_fits_here_runs_no_step(tmp_path, monkeypatch):
    monkeypatch.setattr(tuning, "memory_bytes", lambda device: 2**10)
    monkeypatch.setattr(dry_run_module, "measure", None)
    _, output = quietly(dry_run, make_run_config(), tmp_path / "run")
    assert re.search(r"time +at least .* none was run: a step takes [\d.]+ GiB, and here are 0\.0 GiB", output)


@pytest.mark.slow
def test_a_run_moves_from_eight_devices_to_four_to_one(tmp_path, signal_at):
    """Every token is kept: so no two scores that tie but for rounding can be told apart by one mesh and not another."""
    still = make_run_config(**{"routing.capacity": 1.0})
    assert quietly(train, still, tmp_path / "still")[0] is Outcome.DONE
    for count, shape in ((2, (2, 2, 2)), (2, (4, 1, 1)), (99, (1, 1, 1))):
        signal_at(count)
        mesh = {f"mesh.{name}": size for name, size in zip(("data", "fsdp", "tensor"), shape, strict=True)}
        outcome, _ = quietly(train, make_run_config(**{"routing.capacity": 1.0}, **mesh), tmp_path / "run")
    assert outcome is Outcome.DONE
    for row, expected in zip(learned(tmp_path / "run"), learned(tmp_path / "still"), strict=True):
        for name in {"train/loss", "eval/topk_loss"} & expected.keys():
            assert row[name] == pytest.approx(expected[name], abs=1e-5)
    actual, expected = restored(tmp_path / "run", still), restored(tmp_path / "still", still)
    np.testing.assert_allclose(actual.cutoffs_L, expected.cutoffs_L, atol=1e-5)


# Real processes.

LONG = {"train.steps": 400, "train.eval_every": 100, "train.save_every": 50, "data.eval_windows": 8}


def start(workdir, config_path):
    command = [sys.executable, "-m", "mod_jax.train", f"--config={config_path}", f"--workdir={workdir}"]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish(process):
    output, _ = process.communicate(timeout=300)
    return process.returncode, output


def signal_after(process, text, number):
    """Sends a signal once the process has printed `text`; returns (exit code, output)."""
    lines, deadline = [], time.monotonic() + 300
    while not lines or text not in lines[-1]:
        lines.append(process.stdout.readline())
        assert lines[-1], "".join(lines)
        assert time.monotonic() < deadline
    process.send_signal(number)
    code, rest = finish(process)
    return code, "".join(lines) + rest


@pytest.mark.slow
def test_a_real_sigterm_and_a_kill_change_nothing(tmp_path):
    changes = {**TINY, **CHANGES, **LONG}
    config_path = tmp_path / "config.py"
    config_path.write_text(
        "from mod_jax.config import default_config\n\ndef get_config():\n    config = default_config()\n"
        f"    config.update_from_flattened_dict({changes!r})\n    return config\n"
    )
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    code, output = finish(start(whole, config_path))
    assert code == 0, output

    code, output = signal_after(start(broken, config_path), "step  60/400", signal.SIGTERM)
    assert code == 0, output
    assert re.fullmatch(r"PREEMPTED at step \d+ of 400: saved; the same command resumes", output.splitlines()[-1])
    code, output = signal_after(start(broken, config_path), "step 180/400", signal.SIGKILL)
    assert code == -signal.SIGKILL
    assert "RESUMED step" in output
    code, output = finish(start(broken, config_path))
    assert code == 0, output
    resumed = re.search(r"RESUMED step (\d+) of 400", output)  # the newest step whose save had ended when it was killed
    assert resumed
    assert 0 < int(resumed[1]) < 400
    assert output.splitlines()[-1] == "DONE at step 400"

    config = make_config(**changes)
    assert_same_bits(restored(broken, config), restored(whole, config))
    assert learned(broken) == learned(whole)


@pytest.mark.parametrize(
    ("changes", "metric"),
    [
        ({}, "eval/causal_loss/predictor"),
        ({"routing.predictor": False, "routing.aux_weight": 0.1}, "eval/causal_loss/router"),
        ({"routing.predictor": False}, "eval/causal_loss/threshold"),
        ({"routing.gate": "softmax"}, "eval/topk_loss"),
        ({"routing.score": "stochastic", "routing.predictor": False}, "eval/topk_loss"),
        ({"model.layout": "F"}, "eval/topk_loss"),
    ],
)
def test_checkpoints_are_ranked_by_a_loss_of_a_language_model_where_there_is_one(tiny_config, changes, metric):
    assert Language(tiny_config(**changes), None).ranking_metric == metric
