"""From a trained run's workdir to text and to a report: what is read, what is printed, which exit code."""

import contextlib
import dataclasses
import io
import os
import subprocess
import sys

import jax
import numpy as np
import pytest

from mod_jax import sampling
from mod_jax.config import make_config
from mod_jax.data.corpus import prepare_corpus
from mod_jax.errors import (
    CausalityError,
    CheckpointMismatch,
    ConfigError,
    PathMismatchError,
    RequestError,
    StorageError,
)
from mod_jax.evaluation import finished, tables
from mod_jax.training import loop, prepare

RUN = {
    "model.width": 16,
    "model.depth": 2,
    "model.num_heads": 2,
    "model.context": 32,
    "data.source": "synthetic",
    "data.seq_len": 32,
    "data.eval_windows": 32,
    "routing.capacity": 0.25,
    "train.batch_size": 8,
    "train.steps": 30,
}


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    """A run of thirty steps; what it said is in `said.txt`."""
    directory = tmp_path_factory.mktemp("run")
    with contextlib.redirect_stdout(io.StringIO()) as said:
        loop.train(make_config(**RUN), directory)
    (directory / "said.txt").write_text(said.getvalue())
    return directory


def command(module, *arguments, stdin=b""):
    result = subprocess.run([sys.executable, "-m", module, *arguments], input=stdin, capture_output=True, timeout=300)
    return result.returncode, result.stdout.decode(errors="replace"), result.stderr.decode(errors="replace")


def test_restore_reads_parameters_cutoffs_and_config_alone(workdir):
    model = sampling.restore(workdir)
    assert (model.step, model.config) == (30, make_config(**RUN))
    assert model.cutoffs_L.shape == (1,)
    assert float(model.cutoffs_L[0]) != 0.0
    assert {leaf.devices() == {jax.devices()[0]} for leaf in jax.tree.leaves(model.params)} == {True}
    assert model.tokenizer.name == "bytes"
    with pytest.raises(StorageError, match="no step 7"):
        sampling.restore(workdir, step=7)
    with pytest.raises(StorageError, match="nothing was trained"):
        sampling.restore(workdir / "elsewhere")


@pytest.mark.slow
def test_over_several_devices_an_evaluation_finds_the_same(workdir):
    one, _ = finished.evaluate_run(workdir, capacity=0.2)
    several, lines = finished.evaluate_run(workdir, capacity=0.2, mesh=dict(data=2, tensor=2))
    assert several.keys() == one.keys()
    for name, value in one.items():
        is_text = isinstance(value, str)
        assert several[name] == (value if is_text else pytest.approx(value, rel=1e-4, abs=1e-5, nan_ok=True)), name
    assert any(line.startswith("paths agree: threshold") for line in lines)


def test_an_evaluation_needs_rows_for_every_device(workdir):
    for options in (dict(), dict(capacity=0.2)):
        with pytest.raises(
            ConfigError, match=r"has 8 rows, which mesh.data \* mesh.fsdp \* mesh.expert = 3 must divide"
        ):
            finished.evaluate_run(workdir, mesh=dict(data=3), **options)


def test_generate_from_a_workdir(workdir):
    completion = sampling.generate(workdir, "a", temperature=0, max_new_tokens=8)[0]
    assert len(completion.tokens) == 8
    assert 0 <= completion.routed_fraction <= 1


def test_the_evaluation_shows_both_losses_the_gap_and_what_was_spent(workdir):
    metrics, lines = finished.evaluate_run(workdir)
    text = "\n".join(lines)
    for selection in ("predictor", "threshold"):
        gap = metrics[f"eval/causal_loss/{selection}"] - metrics["eval/topk_loss"]
        assert metrics[f"eval/gap/{selection}"] == pytest.approx(gap)
        assert f"causality gate: {selection} passed" in text
        assert f"paths agree: {selection}" in text
        row = next(line for line in lines if line.startswith(f"{selection} "))
        assert f"{gap:+.4f}" in row
        assert f"{metrics[f'eval/realised_capacity/{selection}']:.1%}" in row
    assert any(line.startswith("top-k ") for line in lines)
    assert "causality gate: topk fails, as it must" in text
    assert "block01" in text
    assert f"digest {metrics['data/digest']}" in text


def test_the_gate_runs_before_any_causal_loss_and_stops_the_evaluation(workdir, monkeypatch):
    monkeypatch.setattr(finished.Evaluator, "prefix_movement", lambda self, weights, selection: 0.1)
    monkeypatch.setattr(finished.Evaluator, "evaluate", lambda self, weights: pytest.fail("a loss before the gate"))
    with pytest.raises(CausalityError, match="predictor"):
        finished.evaluate_run(workdir)


def test_paths_that_disagree_stop_the_evaluation(workdir, monkeypatch):
    model = sampling.restore(workdir)
    ids_T = finished.first_document(finished.make_evaluator(model, prepare_corpus(model.config.data)).batches[0], model)
    assert "paths agree" in finished.check_paths(model, "threshold", ids_T)
    true_path = sampling.Sampler.log_likelihoods

    def off_by_a_little(self, prompts, stepwise=False):
        return [log_p - 0.01 * stepwise for log_p in true_path(self, prompts, stepwise=stepwise)]

    monkeypatch.setattr(sampling.Sampler, "log_likelihoods", off_by_a_little)
    with pytest.raises(PathMismatchError, match="DISAGREE"):
        finished.check_paths(model, "threshold", ids_T)


def test_a_budget_is_calibrated_on_other_windows_than_it_is_judged_on(workdir):
    metrics, lines = finished.evaluate_run(workdir, capacity=0.5)
    assert metrics["eval/realised_capacity/threshold"] == pytest.approx(0.5, abs=0.1)
    assert any("shifted to capacity 0.5 on 2 other batches" in line for line in lines)
    assert any(line.startswith("16 held-out windows") for line in lines)


def test_sample_streams_text_to_stdout_and_tells_the_rest_on_stderr(workdir):
    code, out, err = command(
        "mod_jax.sample", f"--workdir={workdir}", "--temperature=0", "--max_new_tokens=8", stdin="a🦊".encode()
    )
    assert code == 0, err
    expected = sampling.generate(workdir, "a🦊", temperature=0, max_new_tokens=8)[0]
    assert out == expected.text + "\n"
    # After thirty steps the predictor says yes to nobody.
    assert "selection threshold (trained: predictor, threshold), calibrated best when step 30 was evaluated: " in err
    assert "routed predictor 0.0%, threshold" in err
    assert "of a dense model's" in err
    assert "8 tokens in 7 steps, ended by length" in err


def test_sample_takes_several_prompts_files_and_a_budget(workdir, tmp_path):
    (tmp_path / "prompt.txt").write_text("from a file")
    code, out, err = command(
        "mod_jax.sample",
        f"--workdir={workdir}",
        "--prompt=first",
        f"--prompt_file={tmp_path / 'prompt.txt'}",
        "--max_new_tokens=4",
        "--capacity=0.5",
    )
    assert code == 0, err
    assert out.index("=== 'first'") < out.index("=== 'from a file'")
    assert "cut-offs for capacity 0.5" in err
    assert "selection threshold" in err


@pytest.mark.parametrize(
    ("module", "arguments", "code", "message"),
    [
        ("mod_jax.sample", ["--temperature=-1"], 2, "temperature = -1.0: must be a finite number >= 0"),
        ("mod_jax.sample", ["--selection=router"], 2, "selection = 'router': was not trained"),
        ("mod_jax.sample", ["--context=31"], 2, "context = 31: must be an integer in [32, 131072]"),
        ("mod_jax.evaluate", ["--step=7"], 4, "no step 7; available steps: [30]"),
    ],
)
def test_what_is_refused_is_one_line_and_an_exit_code(workdir, module, arguments, code, message):
    actual, out, err = command(module, f"--workdir={workdir}", *arguments)
    assert (actual, out) == (code, "")
    assert err.count("\n") == 1, err
    assert message in err


def test_cutoffs_are_those_of_the_train_state(workdir):
    run = prepare.prepare_run(make_config(**RUN), workdir)
    with loop.Checkpointer(workdir / "checkpoints", read_only=True) as checkpointer:
        state = checkpointer.restore(run.abstract_state).state
        wrong = {"cutoffs_L": jax.ShapeDtypeStruct((2,), np.float32, sharding=state.cutoffs_L.sharding)}
        with pytest.raises(CheckpointMismatch, match=r"cutoffs_L: float32\[1\] -> float32\[2\]"):
            checkpointer.restore_fields(wrong)
    model = sampling.restore(workdir)
    assert np.array_equal(model.cutoffs_L, state.cutoffs_L)
    for ours, theirs in zip(jax.tree.leaves(model.params), jax.tree.leaves(state.params), strict=True):
        assert np.array_equal(ours, theirs)


def test_the_end_of_a_run_shows_the_evaluation_and_what_is_out_of_order_in_it(workdir):
    metrics = sampling.restore(workdir).evaluation
    said = (workdir / "said.txt").read_text()
    assert tables.log_line(metrics) in said
    assert "\n".join([*tables.loss_table(metrics), *tables.warnings(metrics), "DONE at step 30"]) in said
    assert "WARNING predictor routes far from what the model was trained with (block01 0.0% of 25.0%)" in said


def test_what_was_never_evaluated_or_badly_calibrated_is_said(workdir):
    model = sampling.restore(workdir)
    assert model.evaluation["eval/realised_capacity/predictor"] < 0.01
    assert sampling.Sampler(model).selection == "threshold"
    unknown = sampling.Sampler(dataclasses.replace(model, evaluation=None))
    assert unknown.selection == "predictor"
    assert "the default: no evaluation stands with this checkpoint" in unknown.describe(1)
    asked = sampling.Sampler(model, "predictor")
    assert asked.selection == "predictor"
    assert "calibrated" not in asked.describe(1)
    assert any(line.startswith("WARNING predictor routes far") for line in tables.warnings(model.evaluation))


def test_a_longer_context_than_trained_samples_scores_and_evaluates(workdir):
    """Positions are rotary: the first ones see the same, whatever may follow."""
    model, longer = sampling.restore(workdir), sampling.restore(workdir, context=100)
    short = sampling.generate(model, "a", temperature=0, selection="threshold")[0]
    sampler = sampling.Sampler(longer, "threshold")
    long = sampler.generate("a", temperature=0)[0]
    assert long.tokens[: len(short.tokens)] == short.tokens
    assert (long.num_prompt_tokens + len(long.tokens), len(short.tokens)) == (100, 30)
    assert "cache for 1 x 100 positions" in sampler.describe(1)
    assert "positions from 32 on were never trained" in sampler.describe(1)
    text = "x" * 80
    by_step = sampler.log_likelihoods(text, stepwise=True)[0].sum()
    assert sampler.log_likelihoods(text)[0].sum() == pytest.approx(by_step, abs=1e-3)
    metrics, lines = finished.evaluate_run(workdir, context=64)
    assert any("held-out windows of 64 tokens" in line for line in lines)
    assert "positions from 32 on were never trained" in lines
    assert metrics["eval/topk_loss"] != model.evaluation["eval/topk_loss"]
    for bad in (31, 2**17 + 1, 64.0, True):
        with pytest.raises(RequestError, match="context = "):
            sampling.restore(workdir, context=bad)


def test_restoring_from_python_is_quiet(workdir):
    """In a process of its own: Orbax speaks through absl's logger, which pytest holds."""
    code = f"from mod_jax import sampling; sampling.restore({os.fspath(workdir)!r})"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


COMBINATIONS = [
    {"model.layout": "F"},
    {"model.layout": "E"},
    {"model.layout": "E", "experts.choice": "expert"},
    {"routing.gate": "softmax", "routing.aux_weight": 0.1},
    {"routing.score": "stochastic", "routing.predictor": False},
    {"routing.score": "position", "routing.gate": "tanh", "routing.predictor": False},
    {"model.layout": "R", "routing.gate": "sigmoid", "routing.topk_per": "document", "model.vocab_size": 300},
    {"routing.capacity": 1.0, "routing.predictor": False, "routing.aux_weight": 0.1},
]


@pytest.mark.parametrize("changes", COMBINATIONS, ids=lambda changes: " ".join(map(str, changes.values())))
def test_every_kind_of_run_evaluates_its_top_k_loss_at_least(build, changes):
    sizes = {
        "model.depth": 2,
        "experts.count": 2,
        "data.eval_windows": 8,
        "train.batch_size": 4,
        "routing.aux_weight": 0.0,
    }
    model = build(**{**sizes, **changes})
    metrics, lines = finished.evaluate_run(model)
    text = "\n".join(lines)
    assert np.isfinite(metrics["eval/topk_loss"])
    assert {key.split("/")[-1] for key in metrics if "causal_loss" in key} == set(model.config.causal_selections)
    sampled = changes.get("routing.gate") != "softmax" and changes.get("routing.score") != "stochastic"
    assert ("paths agree" in text) == sampled
    assert ("no cached path to compare with: routing." in text) == (not sampled)
    if changes.get("experts.choice") == "expert":
        assert "threshold passed" in text
        assert "topk fails, as it must" in text
    elif changes.get("model.layout") == "E":
        assert "all passed" in text
        assert "who is dropped depends on what came before alone" in text
    elif not model.config.num_routed:
        assert "gate" not in text
    elif changes.get("routing.capacity") == 1.0:
        assert "topk did NOT fail, " in text
        assert "at capacity 1 every token is selected" in text
    elif changes.get("routing.score") in ("stochastic", "position"):
        assert "do not depend on the text" in text
    else:
        assert "topk fails, as it must" in text
    if not sampled or not model.config.num_routed:
        with pytest.raises(ConfigError, match=r"capacity = 0\.5: this model has no cut-offs to shift"):
            finished.evaluate_run(model, capacity=0.5)
