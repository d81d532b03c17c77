"""The real lm-evaluation-harness, offline, on tasks that lie here: its numbers are those of `log_likelihoods`."""

import json
import math
import subprocess
import sys

import numpy as np
import pytest
import untrained

from mod_jax.errors import ConfigError, RequestError
from mod_jax.evaluation.budget import budgeted_sampler
from mod_jax.evaluation.likelihoods import log_likelihoods, score_pairs
from mod_jax.exporting.folder import export
from mod_jax.trained import restore

evaluator = pytest.importorskip("lm_eval.evaluator")
harness = pytest.importorskip("mod_jax.evaluation.harness")

CHOICES = [
    dict(question="def f(x):\n    return", choices=[" x", " import"], answer=0),
    dict(question="for i in ", choices=["range(3)", "class", "x"], answer=2),
    dict(question="#" * 60, choices=["#", "abc"], answer=0),  # longer than the context of 32
]
TEXTS = ["def f(x):\n    return x\n" * 4, "import os\n"]
TASKS = {
    "choice": dict(
        output_type="multiple_choice",
        doc_to_text="{{question}}",
        doc_to_choice="{{choices}}",
        doc_to_target="{{answer}}",
        target_delimiter="",
        metric_list=[dict(metric="acc")],
    ),
    "text": dict(
        output_type="loglikelihood_rolling",
        doc_to_text="",
        doc_to_target="{{text}}",
        metric_list=[dict(metric="bits_per_byte")],
    ),
    "writing": dict(
        output_type="generate_until",
        doc_to_text="{{question}}",
        doc_to_target="x",
        generation_kwargs=dict(until=["e"], max_gen_toks=8, do_sample=False),
        metric_list=[dict(metric="exact_match")],
    ),
}


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("harness")
    untrained.save_run(untrained.build_model(**{"model.depth": 2, "data.eval_windows": 8}), folder / "run")
    (folder / "choices.jsonl").write_text("".join(json.dumps(line) + "\n" for line in CHOICES))
    (folder / "texts.jsonl").write_text("".join(json.dumps(dict(text=text)) + "\n" for text in TEXTS))
    return folder / "run"


def run_harness(folder, names, model="mod_jax", **arguments):
    """The harness's results and its log of every request. Data lies in `folder`."""
    from lm_eval.tasks import TaskManager

    for name in names:
        data = "texts" if name == "text" else "choices"
        task = dict(task=name, dataset_path="json", test_split="test", **TASKS[name])
        task["dataset_kwargs"] = dict(data_files=dict(test=str(folder / f"{data}.jsonl")))
        (folder / f"{name}.yaml").write_text(json.dumps(task))
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    return evaluator.simple_evaluate(
        model=model,
        model_args=arguments,
        device="cpu",
        tasks=list(names),
        task_manager=manager,
        log_samples=True,
        bootstrap_iters=0,
    )


@pytest.mark.slow
def test_the_harness_gets_our_numbers(workdir, capsys):
    """The harness's model lies over four devices, ours on one."""
    options = dict(selection="threshold", batch_tokens=128, data=2, tensor=2)
    results = run_harness(workdir.parent, TASKS, workdir=str(workdir), **options)
    assert "selection threshold" in capsys.readouterr().err
    sampler = budgeted_sampler(restore(workdir), "threshold", None)
    docs = [sample["doc"] for sample in results["samples"]["choice"]]
    pairs = [(doc["question"], choice) for doc in docs for choice in doc["choices"]]
    stripped = [question.rstrip() for question, _ in pairs]  # spaces at the end belong to the continuation
    rest = [question[len(start) :] + choice for start, (question, choice) in zip(stripped, pairs, strict=True)]
    ours = log_likelihoods(sampler, stripped, rest, batch_tokens=128)
    got = [response for sample in results["samples"]["choice"] for response in sample["filtered_resps"]]
    assert [log_p for log_p, _ in got] == pytest.approx([score.log_p for score in ours], abs=1e-4)
    assert [is_greedy for _, is_greedy in got] == [score.is_greedy for score in ours]

    ids = [sampler.tokenizer.encode(text).tolist() for text in TEXTS]
    assert len(ids[0]) == 92  # of the last 28 each has as much of the text before it as the context of 32 has room for
    windows = [([0], ids[0][:32]), (ids[0][31:32], ids[0][32:64]), (ids[0][59:64], ids[0][64:]), ([0], ids[1])]
    log_p = [score.log_p for _, score in sorted(score_pairs(sampler, windows))]
    got = [sample["filtered_resps"][0] for sample in results["samples"]["text"]]
    assert got == pytest.approx([sum(log_p[:3]), log_p[3]], abs=1e-3)
    total = -sum(got) / math.log(2) / sum(map(len, TEXTS))
    assert results["results"]["text"]["bits_per_byte,none"] == pytest.approx(total)

    samples = results["samples"]["writing"]
    options = dict(temperature=0, max_new_tokens=8, stop_strings=["e"], truncate=True)
    ours = sampler.generate([sample["doc"]["question"] for sample in samples], **options)
    assert [sample["filtered_resps"] for sample in samples] == [[completion.text] for completion in ours]


@pytest.mark.slow
def test_at_another_capacity_the_harness_gets_the_numbers_of_that_budget(workdir):
    results = run_harness(workdir.parent, ["choice"], workdir=str(workdir), capacity=0.9)
    sampler = budgeted_sampler(restore(workdir), None, 0.9)
    doc = CHOICES[0]
    ours, plain = (
        log_likelihoods(one, [doc["question"]] * 2, doc["choices"])
        for one in (sampler, budgeted_sampler(restore(workdir), "threshold", None))
    )
    sample = next(s for s in results["samples"]["choice"] if s["doc"]["question"] == doc["question"])
    assert [response[0] for response in sample["filtered_resps"]] == pytest.approx([s.log_p for s in ours], abs=1e-4)
    assert abs(plain[0].log_p - ours[0].log_p) > 1e-3


@pytest.mark.slow
def test_the_exported_model_gets_the_same_numbers_from_the_harnesss_own_backend(workdir, tmp_path):
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    export(restore(workdir), tmp_path / "out", selection="threshold")
    ours = run_harness(workdir.parent, TASKS, workdir=str(workdir), selection="threshold")["samples"]
    asked = dict(model="hf", pretrained=str(tmp_path / "out"), trust_remote_code=True)
    theirs = run_harness(workdir.parent, ["choice", "writing"], **asked)["samples"]
    # A text that is scored as a whole has the harness's prefix: one more from the tokenizer would be scored with it.
    theirs |= run_harness(workdir.parent, ["text"], **asked, add_bos_token=False)["samples"]

    def responses(samples, name):
        return [response for sample in samples[name] for response in sample["filtered_resps"]]

    scores, others = (np.array(responses(samples, "choice")) for samples in (ours, theirs))
    np.testing.assert_allclose(scores, others, atol=1e-3)  # log p, and whether it is greedy, as 0 or 1
    assert responses(ours, "text") == pytest.approx(responses(theirs, "text"), abs=1e-3)
    # A prompt that is too long keeps what it starts with; the harness's backend cuts that off first.
    fits = [index for index, sample in enumerate(ours["writing"]) if len(sample["doc"]["question"]) < 32 - 8]
    assert len(fits) == 2
    for index in fits:
        assert responses(ours, "writing")[index] == responses(theirs, "writing")[index]


def test_samples_of_one_context_differ_and_what_a_task_cannot_ask_for_is_named():
    asked = dict(until="\n", max_new_tokens=4, temperature=0.5, top_p=0.9)
    first, second = (harness.make_options(asked, seed=seed) for seed in (0, 1))
    assert (first.temperature, first.top_p, first.stop_strings, first.max_new_tokens) == (0.5, 0.9, ["\n"], 4)
    assert first.seed != second.seed
    assert harness.make_options(dict(do_sample=False, temperature=1.0), seed=0).temperature == 0
    assert harness.make_options(dict(do_sample=True), seed=0).temperature == 1
    with pytest.raises(RequestError, match="gen_kwargs: num_beams = 4: not supported"):
        harness.make_options(dict(num_beams=4), seed=0)


def test_wrong_arguments_are_refused_by_name(workdir):
    with pytest.raises(RequestError, match="model_args: capasity: no such argument; did you mean capacity"):
        harness.HarnessModel(str(workdir), capasity=0.5)
    with pytest.raises(RequestError, match="capacity shifts the cut-offs of selection 'threshold', not of 'predictor'"):
        harness.HarnessModel(str(workdir), capacity=0.5, selection="predictor")
    with pytest.raises(ConfigError, match=r"topk.*looks at the future"):
        harness.HarnessModel(str(workdir), selection="topk")


@pytest.mark.slow
def test_the_command_refuses_in_one_line(tmp_path):
    arguments = ["--model", "mod_jax", "--model_args", f"workdir={tmp_path}", "--tasks", "none", "--limit", "1"]
    folder = tmp_path / "tasks"
    folder.mkdir()
    task = dict(task="none", dataset_path="json", test_split="test", **TASKS["choice"])
    (folder / "none.yaml").write_text(json.dumps(task))
    command = [sys.executable, "-m", "mod_jax.lm_eval", *arguments, "--include_path", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 4
    assert done.stderr.splitlines()[-1].startswith(f"error: {tmp_path}/checkpoints: there is no such folder")
    assert "Traceback" not in done.stderr
