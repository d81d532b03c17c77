"""The exported folder: whole or not there, what it says of itself, and the way back in."""

import dataclasses
import io
import json
import subprocess
import sys

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from mod_jax import errors
from mod_jax.data import tokenizers
from mod_jax.data.tokenizers import SentencePieceTokenizer
from mod_jax.errors import ConfigError
from mod_jax.evaluation import budget
from mod_jax.exporting import weights
from mod_jax.exporting.folder import export
from mod_jax.exporting.tokenizer import SEPARATOR
from mod_jax.models.decoder import by_depth, from_depth
from mod_jax.pretrained.families import model_keys, read_params, rotary
from mod_jax.pretrained.source import open_source

DENSE = {"model.layout": "F", "routing.aux_weight": 0.0}
LLAMA = {
    **DENSE,
    "model.gated_mlp": True,
    "model.activation": "silu",
    "model.embed_scale": False,
    "model.qk_norm": False,
    "model.norm_eps": 1e-5,
    "model.rope_base": 5e5,
}
LLAMA_3 = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
LLAMA_3["original_max_position_embeddings"] = 8192


def build_dense(build, **changes):
    return dataclasses.replace(build(**{**LLAMA, **changes}), cutoffs_L=np.zeros(0, np.float32))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"model.qkv_bias": True, "model.tie_embedding": True},
        {"model.qk_norm": True, "model.rope_factors": (4.0, 4.0)},
        {"model.rope_factors": rotary(dict(rope_parameters=LLAMA_3, rope_theta=5e5), 4, "")[1]},
    ],
    ids=["llama", "qwen2, tied", "qwen3, linear rotation", "llama 3's rotation"],
)
def test_out_and_in_again_is_bitwise_the_same_model(build, tmp_path, changes):
    model = build_dense(build, **changes)
    export(model, tmp_path / "out")
    source = open_source(f"hf:{tmp_path / 'out'}")
    keys = model_keys(source)
    ours = model.config.model
    assert {name: getattr(ours, name.removeprefix("model.")) for name in keys} == keys | {"model.vocab_size": 0}
    again = read_params(source, dataclasses.replace(model.config, model=dataclasses.replace(ours, vocab_size=257)))
    jax.tree.map(np.testing.assert_array_equal, again, model.params)


def test_in_and_out_again_is_bitwise_the_same_file(build, tmp_path):
    export(build_dense(build), tmp_path / "first")
    source = open_source(f"hf:{tmp_path / 'first'}")
    model = build_dense(build)
    config = dataclasses.replace(model.config, model=dataclasses.replace(model.config.model, vocab_size=257))
    export(dataclasses.replace(model, params=read_params(source, config)), tmp_path / "second")
    first, second = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("first", "second"))
    assert first == second


def test_every_parameter_goes_out_once_whatever_unit_it_is_stored_in(build, tmp_path):
    model = build(**{"model.depth": 3})  # a unit of two blocks, and a tail
    export(model, tmp_path / "out")
    arrays = load_file(tmp_path / "out" / "model.safetensors")
    assert sum(array.size for array in arrays.values()) == sum(leaf.size for leaf in jax.tree.leaves(model.params))
    depths = {name.split(".")[2] for name in arrays if name.startswith("model.layers.")}
    assert depths == {"0", "1", "2"}
    third = by_depth(model.params, model.config)[2]
    np.testing.assert_array_equal(arrays["model.layers.2.mlp.up_proj.weight"], np.asarray(third["mlp"]["up_DF"]).T)


def test_a_parameter_without_a_name_there_is_refused(build, tmp_path):
    model = build()
    blocks = by_depth(model.params, model.config)
    blocks = [{**block, "block" if "block" in block else "new": {"new": np.ones(2, np.float32)}} for block in blocks]
    params = from_depth(blocks, model.params, model.config)
    with pytest.raises(ConfigError, match=r"parameter new.*: has no form in the exported model"):
        export(dataclasses.replace(model, params=params), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_large_weights_are_divided_into_files_of_the_same_digest(build, tmp_path):
    transformers = pytest.importorskip("transformers")
    model = build_dense(build)
    whole = export(model, tmp_path / "out").digest
    for path in (tmp_path / "out").glob("*.safetensors"):
        path.unlink()
    assert weights.save(weights.tensors(model.params, model.config), tmp_path / "out", shard_bytes=20_000) == whole
    files = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 2
    assert files[-1].endswith(f"-of-{len(files):05}.safetensors")
    other = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    for name, array in weights.tensors(model.params, model.config):
        np.testing.assert_array_equal(other[name].numpy(), array)
    changed = [(name, array + 1e-7 * (name == "model.norm.weight")) for name, array in other.items()]
    (tmp_path / "changed").mkdir()
    assert weights.save(((n, np.asarray(a)) for n, a in changed), tmp_path / "changed") != whole


@pytest.mark.parametrize("spec", ["bytes", "bpe:300"])
def test_the_tokenizer_gives_the_same_ids_for_every_text(build, tmp_path, spec):
    transformers = pytest.importorskip("transformers")
    texts = ["the cat sat on the mat; " * 3, "naïve \N{FOX FACE}\r\n\t x  y", f"a{SEPARATOR}b", "", " ", "it's 1999"]
    ours = tokenizers.make(spec, [texts[0].encode() * 20])
    model = build(**{"model.vocab_size": max(257, ours.vocab_size)})
    export(dataclasses.replace(model, tokenizer=ours), tmp_path / "out")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out", trust_remote_code=True)
    for text in texts:
        assert theirs(text)["input_ids"] == [0, *ours.encode(text)]
        assert theirs.decode(theirs(text)["input_ids"], skip_special_tokens=True) == text
    assert (theirs.bos_token_id, theirs.eos_token_id, theirs.pad_token_id) == (0, 0, 0)


def test_the_card_names_selection_digests_and_losses(build, tmp_path):
    losses = {"eval/topk_loss": 2.5, "eval/topk_bits_per_byte": 3.6}
    losses |= {"eval/causal_loss/threshold": 2.51, "eval/causal_bits_per_byte/threshold": 3.61}
    losses |= {"eval/gap/threshold": 0.01, "eval/realised_capacity/threshold": 0.24}
    model = dataclasses.replace(build(), evaluation=losses, metadata={"corpus_digest": "c" * 64, "mod_jax": "0.1.0"})
    made = export(model, tmp_path / "out", selection="threshold")
    card = (tmp_path / "out" / "README.md").read_text()
    for said in ("`threshold`", "cccccccccccc", made.digest, model.tokenizer.digest[:12], "2.5100", "1 (0.3)"):
        assert said in card
    modes = {path.stat().st_mode for path in (tmp_path / "out").iterdir()}
    assert len(modes) == 1  # who may read one file may read all
    assert made.num_bytes == sum(path.stat().st_size for path in (tmp_path / "out").iterdir())


def test_at_another_capacity_it_has_the_cut_offs_of_that_budget(build, tmp_path):
    model = build(**{"data.eval_windows": 8})
    made = export(model, tmp_path / "out", capacity=0.6)
    wanted = budget.calibrate(model, 0.6, budget.held_out_batches(model)).cutoffs_L
    layers = json.loads((tmp_path / "out" / "config.json").read_text())["layers"]
    assert made.selection == "threshold"
    assert [layer["cutoff"] for layer in layers if layer["routed"]] == wanted.tolist()


def test_what_cannot_be_exported_is_named_and_nothing_is_written(build, tmp_path):
    library = pytest.importorskip("sentencepiece")
    trained = io.BytesIO()
    library.SentencePieceTrainer.train(
        sentence_iterator=iter(["the cat sat"] * 20), model_writer=trained, vocab_size=12, minloglevel=2
    )
    pieces = SentencePieceTokenizer("sentencepiece:cat.model", trained.getvalue())
    stochastic = {"routing.score": "stochastic", "routing.predictor": False, "routing.aux_weight": 0.0}
    for model, asked, message in (
        (build(**stochastic), {}, "routing.score = 'stochastic': a control"),
        (build(**{"routing.score": "position"}), {}, "routing.score = 'position': a control"),
        (build(**{"routing.gate": "softmax"}), {}, "routing.gate = 'softmax'"),
        (build(), dict(selection="topk"), "selection = 'topk': looks at the future"),
        (build(), dict(selection="router", capacity=0.5), "capacity shifts the cut-offs"),
        (build(), dict(capacity=2.0), "capacity = 2.0"),
        (dataclasses.replace(build(), tokenizer=pieces), {}, "sentencepiece:cat.model.*--notokenizer leaves it out"),
    ):
        with pytest.raises(ConfigError, match=message):
            export(model, tmp_path / "out", **asked)
    assert list(tmp_path.iterdir()) == []
    export(dataclasses.replace(build(), tokenizer=pieces), tmp_path / "out", with_tokenizer=False)
    assert not (tmp_path / "out" / "tokenizer.json").exists()


def test_nothing_is_overwritten_and_nothing_half_written(build, tmp_path, monkeypatch):
    model = build()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "precious").touch()
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    for out, message in (
        ("full", "is there already, and not empty"),
        ("full/precious", "is there already, and is not a folder"),
        ("full/precious/below", "cannot be written"),
        ("link", "is there already, and is not a folder"),
        ("", "must name a folder"),
        ("s3://bucket/out", "must be a folder of a file system"),
    ):
        with pytest.raises(ConfigError, match=message):
            export(model, tmp_path / out if out.startswith(("full", "link")) else out)
    (tmp_path / "out").mkdir()

    def interrupted(*args, **facts):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("mod_jax.exporting.card.write", interrupted)  # all else is written by then
        with pytest.raises(KeyboardInterrupt):
            export(model, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["full", "link", "out"]
    assert list((tmp_path / "out").iterdir()) == []
    export(model, tmp_path / "out")  # an empty folder is taken
    assert (tmp_path / "out" / "config.json").is_file()


def test_the_command_exports_once_and_says_what(tools, build, tmp_path):
    workdir = tools.save_run(build(**{"model.depth": 2}), tmp_path / "run")
    (tmp_path / "unfinished").mkdir()
    command = [sys.executable, "-m", "mod_jax.export"]
    out = ["--out", str(tmp_path / "a b" / "out")]
    for folder, code, message in (
        (tmp_path / "unfinished", errors.StorageError.exit_code, "no such folder, so nothing"),
        (workdir, 0, ""),
        (workdir, errors.ConfigError.exit_code, "is there already, and not empty"),
    ):
        done = subprocess.run([*command, f"--workdir={folder}", *out], capture_output=True, text=True, check=False)
        assert done.returncode == code, done.stderr
        assert message in done.stderr
        assert done.stderr.count("\n") == bool(code)
        if not code:
            assert "exported to" in done.stdout
            assert "selection" in done.stdout
    assert [path.name for path in (tmp_path / "a b").iterdir()] == ["out"]
