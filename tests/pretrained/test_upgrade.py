"""A pretrained model becomes an ordinary workdir, exactly; and nothing stands there unless all of it does."""

import importlib.util
import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sources

from mod_jax import trained
from mod_jax.config import from_config_dict
from mod_jax.data.corpus import prepare_corpus
from mod_jax.errors import CheckpointMismatch, ConfigError, ModJaxError
from mod_jax.evaluation import budget
from mod_jax.evaluation.finished import evaluate_run
from mod_jax.models.blocks import Choice
from mod_jax.models.model import make_model
from mod_jax.pretrained import choose, dense, table, upgrade
from mod_jax.pretrained import workdir as workdirs
from mod_jax.pretrained.request import Request, with_keys
from mod_jax.pretrained.source import open_source
from mod_jax.sampling import Sampler
from mod_jax.training import loop

KEYS = {"data.source": "synthetic", "data.seq_len": 32, "data.eval_windows": 16}


def request(source, workdir, **fields):
    fields.setdefault("changes", KEYS)
    return Request(source=source, workdir=workdir, **{"capacity": 0.5, "grid": (0.75, 0.25), **fields})


def quietly(line):
    """Says nothing."""


@pytest.fixture(scope="module")
def tiny():
    return sources.make("llama")


@pytest.fixture(scope="module")
def folder(tiny, tmp_path_factory):
    return sources.write_folder(tiny, tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def upgraded(folder, tmp_path_factory):
    """(workdir, what upgrade.json holds, what was said)."""
    workdir, said = tmp_path_factory.mktemp("up") / "run", []
    about = upgrade.upgrade(request(f"hf:{folder}", workdir), said.append)
    return workdir, about, said


# What is there


def test_the_workdir_is_whole_and_alone(upgraded):
    workdir, about, said = upgraded
    assert {path.name for path in workdir.parent.iterdir()} == {"run"}
    names = {"checkpoints", "config.json", "report", "result.json", "tokenizer", "tune.py", "upgrade.json"}
    assert {path.name for path in workdir.iterdir()} == names
    assert json.loads((workdir / "upgrade.json").read_text()) == about
    assert (workdir / "report" / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert any("logits equal those of transformers" in line for line in said)
    assert len(about["leave_one_out"]) == 4
    assert about["layout"] in ("FRFF", "FFRF")  # half of the two inner blocks


def test_with_every_token_selected_it_is_the_dense_model_bit_for_bit(upgraded, folder, tiny):
    workdir, _, _ = upgraded
    model = trained.restore(workdir)
    found = dense.read_dense(request(f"hf:{folder}", "unused"), quietly)
    ids_BT = np.random.default_rng(0).integers(0, sources.ROWS, (2, 32)).astype(np.int32)
    whole = jax.jit(make_model(found.config, sources.ROWS).run)(found.params, ids_BT).logits_BTV
    choice = Choice("threshold", jnp.full(model.config.num_routed, -jnp.inf))
    routed = jax.jit(model.model.run)(model.params, ids_BT, choice=choice)
    assert routed.routing.selected_BT.all()
    np.testing.assert_array_equal(routed.logits_BTV, whole)
    np.testing.assert_allclose(routed.logits_BTV, tiny.logits(ids_BT), atol=1e-4)
    with_cutoffs = jax.jit(model.model.run)(model.params, ids_BT, choice=Choice("threshold", model.cutoffs_L))
    assert 0 < with_cutoffs.routing.selected_BT.mean() < 1
    assert np.abs(with_cutoffs.logits_BTV - whole).max() > 1e-2


def test_evaluate_finds_what_the_upgrade_measured(upgraded):
    workdir, about, _ = upgraded
    stored = json.loads((workdir / "result.json").read_text())["evaluation"]
    again = evaluate_run(workdir)
    assert {name for name in stored if name not in again.metrics} == set()
    for name, value in stored.items():
        assert again.metrics[name] == pytest.approx(value, rel=1e-4, abs=1e-5), name
    assert any(line.startswith("paths agree: threshold") for line in again.lines)
    assert not any("never trained" in line for line in again.lines)
    (point,) = (point for point in about["routed"] if point["capacity"] == 0.5)
    assert point["loss"] == stored["eval/causal_loss/threshold"]
    assert point["flops"] == pytest.approx(stored["eval/forward_flops_per_token/threshold"])


def test_cutoffs_are_those_of_the_budget_calibration(upgraded):
    workdir, about, _ = upgraded
    model = trained.restore(workdir)
    corpus = prepare_corpus(model.config.data, model.tokenizer)
    calibration, _ = choose.batches_of(corpus, model.config, request("", ""))
    shifted = budget.calibrate(model, 0.25, [calibration])
    np.testing.assert_allclose(shifted.cutoffs_L, about["cutoffs"]["0.25"], atol=1e-4)


def test_it_samples_as_the_uncached_model_would(upgraded):
    workdir, _, _ = upgraded
    model = trained.restore(workdir)
    sampler = Sampler(model)
    assert sampler.selection == "threshold"
    assert "never trained" not in sampler.describe(1, 256)
    (completion,) = sampler.generate("the cat", temperature=0, max_new_tokens=8)
    prompt = model.tokenizer.encode("the cat")
    assert completion.num_prompt_tokens == prompt.size  # this tokenizer puts nothing before a prompt
    ids = np.array([*prompt, *completion.tokens], np.int32)
    logits_1TV = jax.jit(model.model.run)(
        model.params, ids[None], choice=Choice("threshold", model.cutoffs_L)
    ).logits_BTV
    chosen = np.argmax(logits_1TV[0, prompt.size - 1 : -1, : model.tokenizer.vocab_size], axis=-1)
    assert chosen.tolist() == completion.tokens


@pytest.mark.slow
def test_training_continues_from_it_and_its_own_command_has_nothing_to_do(upgraded, tmp_path, capsys):
    workdir, _, _ = upgraded
    spec = importlib.util.spec_from_file_location("tune", workdir / "tune.py")  # as --config does
    tune = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tune)
    config = tune.get_config()
    before = trained.restore(workdir)
    again = before.config
    assert loop.train(again, workdir) is loop.Outcome.DONE
    assert "nothing was prepared or computed" in capsys.readouterr().out
    config.train.steps, config.optimizer.learning_rate = 2, 1e-30
    loop.train(from_config_dict(config), tmp_path / "tuned", init_from=workdir)
    after = trained.restore(tmp_path / "tuned")
    assert after.step == 2
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-12), after.params, before.params)


@pytest.mark.slow
def test_it_is_tuned_if_asked_to(folder, tmp_path):
    """Towards the dense model's distribution, by default; the result is an ordinary run, of plain weights."""
    asked = request(f"hf:{folder}", tmp_path / "run", check=False, steps=2)
    said = []
    upgrade.upgrade(asked, said.append)
    assert "TUNING for 2 steps; if it is stopped, this goes on with it" in said[-1]
    before, after = trained.restore(tmp_path / "run"), trained.restore(tmp_path / "run" / "tuned")
    assert after.step == 2
    assert after.metadata["teacher"]["workdir"] == after.metadata["init_from"]["workdir"] == str(tmp_path / "run")
    assert (after.config.optimizer.train, after.config.train.teacher) == ("lora", str(tmp_path / "run"))
    assert jax.tree.structure(after.params) == jax.tree.structure(before.params)
    moved = jax.tree.map(lambda a, b: bool((a != b).any()), after.params, before.params)
    assert not any(jax.tree.leaves(moved["embedder"]))
    assert all(jax.tree.leaves([moved["units"], moved["final_norm"]]))
    (completion,) = Sampler(after).generate("the cat", temperature=0, max_new_tokens=2)
    assert len(completion.tokens) == 2


def test_a_model_may_stay_dense(folder, tiny, tmp_path):
    about = upgrade.upgrade(request(f"hf:{folder}", tmp_path / "run", layout="F", check=False), quietly)
    model = trained.restore(tmp_path / "run")
    assert (model.config.num_routed, model.config.model.layout, about["routed"]) == (0, "F", [])
    ids_BT = np.random.default_rng(0).integers(0, sources.ROWS, (2, 32)).astype(np.int32)
    logits_BTV = jax.jit(model.model.run)(model.params, ids_BT).logits_BTV
    np.testing.assert_allclose(logits_BTV, tiny.logits(ids_BT), atol=1e-4)
    assert model.evaluation["eval/topk_loss"] == about["dense"][0]["loss"]


# What is measured beside it


def test_the_table_puts_deletion_beside_routing_at_equal_flops():
    dense, one, two = (table.Point(loss, 0.0, share, share) for loss, share in ((2.0, 1.0), (2.1, 0.9), (2.4, 0.8)))
    assert table.deleted_at([dense, one, two], 0.95) == pytest.approx(2.05)
    assert table.deleted_at([dense, one, two], 0.8) == pytest.approx(2.4)
    assert table.deleted_at([dense, one, two], 0.7) is None
    routed = table.Point(2.2, 0.0, 0.85, 0.8, capacity=0.5, realised=0.5)
    lines = table.lines(dense, [routed], [one, two])
    assert "2.2500 (+0.2500)" in lines[2]


def test_flops_of_a_deleted_block_are_gone(folder):
    config = dense.read_dense(request(f"hf:{folder}", "unused"), quietly).config
    whole, less = (table.deleted_point(config, sources.ROWS, range(n), 0.0) for n in (0, 1))
    assert (whole.of_dense, whole.blocks_of_dense) == (1.0, 1.0)
    assert less.blocks_of_dense == pytest.approx(3 / 4)
    routed = with_keys(config, {"model.layout": "FRFF", "routing.capacity": 0.5})
    point = table.routed_point(routed, sources.ROWS, 0.5, [1.0], 0.0)
    assert point.of_dense > 1.0  # with all selected only the router is added
    (count,) = table.counts_to_delete(
        routed, sources.ROWS, [table.routed_point(routed, sources.ROWS, 0.5, [0.5], 0.0)], 4
    )
    assert count == 1


# Refused before anything is written


def files_of(folder):
    return sorted(path.name for path in folder.rglob("*"))


def test_an_error_or_an_interrupt_leaves_nothing(folder, tmp_path, monkeypatch):
    for error in (OSError(28, "No space left on device"), KeyboardInterrupt()):

        def fail(*args, error=error):
            raise error

        monkeypatch.setattr(workdirs.result, "write", fail)
        with pytest.raises(type(error)):
            upgrade.upgrade(request(f"hf:{folder}", tmp_path / "run", check=False), quietly)
        assert files_of(tmp_path) == []


REFUSED = [
    (dict(layout="FX"), "--layout = 'FX'"),
    (dict(layout=""), "must be auto, auto:N"),
    (dict(layout="FRFRF"), "up to 4 letters"),
    (dict(layout="auto:0"), "auto:N with N >= 1"),
    (dict(layout="auto:3"), "of 4 blocks at most 2"),
    (dict(capacity=0.0), r"--capacity = 0.0: must be in (0, 1]"),
    (dict(grid=(0.5, 1.5)), "--grid = 0.5, 1.5"),
    (dict(calibration_rows=0), "--calibration_rows = 0"),
    (dict(block_rows=17), "--block_rows = 17: must be in [1, 16]"),
    (dict(steps=-1), "--steps = -1: must be in [0, 2147483647]"),
    (dict(steps=2**31), "--steps = 2147483648: must be in [0, 2147483647]"),
    (dict(changes={"optimizer.train": "lora"}), "config.optimizer.train = 'lora': is given by --train here"),
    (dict(changes={"train.teacher": "/nowhere"}), "config.train.teacher = '/nowhere': is given by --loss here"),
    (dict(train="adapters"), "--train = 'adapters': must be one of lora, routing, all"),
    (dict(loss="mse"), "--loss = 'mse': must be one of kl, ce"),
    (dict(layout="F", train="routing"), "--train = 'routing': --layout = 'F' has no router to train"),
    (dict(block_rows=0), "--block_rows = 0: must be in [1, 16]"),
    (dict(changes={"model.width": 64}), "config.model.width = 64: is 32 of this model"),
    (dict(changes={"routing.capacity": 0.5}), "is given by --capacity"),
    (dict(changes={"routing.predictor": True}), "config.routing.predictor = True: is False of this model"),
    (dict(changes={"model.context": 512}), "this model allows 256"),
    (dict(changes={"model.widht": 3}), "did you mean"),
    (dict(tokenizer="/nowhere"), "/nowhere: has no tokenizer.json"),
]


@pytest.mark.parametrize(("fields", "fragment"), REFUSED, ids=[fragment for _, fragment in REFUSED])
def test_a_request_that_cannot_be_met_is_refused(folder, tmp_path, fields, fragment):
    with pytest.raises(ConfigError) as refusal:
        upgrade.upgrade(request(f"hf:{folder}", tmp_path / "run", **fields), quietly)
    assert fragment in str(refusal.value)
    assert "\n" not in str(refusal.value)
    assert files_of(tmp_path) == []


def test_a_tokenizer_of_another_model_is_refused(tiny, tmp_path):
    folder = sources.write_folder(tiny, tmp_path / "model")
    words = ("<|endoftext|>", *(f"<|{i}|>" for i in range(100)))
    (folder / "tokenizer.json").write_text(json.dumps(sources.tokenizer_json(words)))
    with pytest.raises(CheckpointMismatch, match=r"has \d+ ids, but the embedding .* 320 rows: it is another model's"):
        upgrade.upgrade(request(f"hf:{folder}", tmp_path / "run"), quietly)
    assert not (tmp_path / "run").exists()


def test_a_folder_that_holds_something_is_not_touched(folder, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="is not empty; an upgrade needs a new folder"):
        upgrade.upgrade(request(f"hf:{folder}", tmp_path / "run"), quietly)
    assert files_of(tmp_path) == ["notes.txt", "run"]


def test_a_damaged_file_ends_the_command_in_one_line(tiny, tmp_path):
    path = sources.write_gguf(tiny, tmp_path / "model.gguf")
    path.write_bytes(path.read_bytes()[:-100])
    command = [sys.executable, "-m", "mod_jax.upgrade", f"--from=gguf:{path}", f"--workdir={tmp_path / 'run'}"]
    done = subprocess.run(command, capture_output=True, text=True, env=dict(os.environ, JAX_PLATFORMS="cpu"))
    assert done.returncode == 4
    assert done.stderr.startswith(f"error: {path}: is damaged or truncated")
    assert done.stderr.count("\n") == 1
    assert files_of(tmp_path) == ["model.gguf"]


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--config.model.widht=3", "config.model.widht: unknown key; did you mean config.model.width?"),
        ("--config.data.seq_len=1", "config.data.seq_len = 1: must be an integer in [2, 16777216]"),
        ("--grid=half", "--grid = half: must be numbers in (0, 1], with commas"),
        ("--layout=FX", "--layout = 'FX': must be auto, auto:N, or up to 4 letters F and R"),
    ],
)
def test_a_mistyped_command_is_refused_in_one_line(folder, tmp_path, flag, message):
    command = [sys.executable, "-m", "mod_jax.upgrade", f"--from=hf:{folder}", f"--workdir={tmp_path / 'run'}", flag]
    done = subprocess.run(command, capture_output=True, text=True, env=dict(os.environ, JAX_PLATFORMS="cpu"))
    assert (done.returncode, done.stderr) == (2, f"error: {message}\n")
    assert files_of(tmp_path) == []


@pytest.mark.parametrize("library", ["gguf", "safetensors"])
def test_a_library_that_is_not_installed_is_named(library, tiny, folder, tmp_path, monkeypatch):
    path = sources.write_gguf(tiny, tmp_path / "model.gguf")
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ModJaxError, match=r"pip install -e '\.\[pretrained\]'"):
        open_source(f"gguf:{path}" if library == "gguf" else f"hf:{folder}")
