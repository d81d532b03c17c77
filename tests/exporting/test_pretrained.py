"""A model that another program trained goes out as it came in, and routed ones as transformers computes them."""

import json
import pathlib
import sys

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from mod_jax.config import make_config
from mod_jax.data import tokenizers
from mod_jax.exporting.folder import export
from mod_jax.models.model import make_model
from mod_jax.pretrained.families import model_keys, read_params
from mod_jax.pretrained.source import open_source
from mod_jax.pretrained.upgrade import Request, upgrade
from mod_jax.trained import TrainedModel, restore

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
sys.path.append(str(pathlib.Path(__file__).parents[1] / "pretrained"))
import sources  # noqa: E402

TEXTS = ["the cat sat on the mat", "it's 1999\n", "naïve \N{FOX FACE}"]


def taken_in(folder):
    """The dense model of a folder, as a trained model."""
    source = open_source(f"hf:{folder}")
    keys = {**model_keys(source), "data.seq_len": 32, "data.source": "synthetic", "train.steps": 1}
    config = make_config(**keys, **{"data.tokenizer": f"hf:{folder}", "routing.aux_weight": 0.0})
    model, tokenizer = make_model(config, config.model.vocab_size), tokenizers.pretrained(f"hf:{folder}")
    return TrainedModel(config, model, read_params(source, config), jnp.zeros(0), tokenizer, step=1, metadata={})


@pytest.mark.parametrize("family", sources.FAMILIES)
def test_in_and_out_is_bitwise_the_same(tmp_path, family):
    tiny = sources.make(family)
    sources.write_folder(tiny, tmp_path / "in")
    model = taken_in(tmp_path / "in")
    made = export(model, tmp_path / "out")
    assert made.family == family.replace(" 3", "").split(",")[0].replace("mistral", "llama")
    arrays = load_file(tmp_path / "out" / "model.safetensors")
    assert arrays.keys() == tiny.tensors.keys()
    for name, tensor in tiny.tensors.items():
        np.testing.assert_array_equal(arrays[name], tensor)
    other = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    ids = torch.arange(64).reshape(2, 32)
    with torch.no_grad():
        np.testing.assert_array_equal(other(ids).logits, tiny.model(ids).logits)

    before, after = (transformers.AutoTokenizer.from_pretrained(tmp_path / name) for name in ("in", "out"))
    for text in TEXTS:
        assert after(text)["input_ids"] == before(text)["input_ids"] == model.tokenizer.encode(text).tolist()
    ends = json.loads((tmp_path / "out" / "generation_config.json").read_text())["eos_token_id"]
    assert sorted(ends) == sorted(model.tokenizer.stop_ids)


@pytest.mark.slow
def test_an_upgraded_model_is_what_transformers_computes(tools, tmp_path):
    folder = sources.write_folder(sources.make("llama"), tmp_path / "in")
    keys = {"data.source": "synthetic", "data.seq_len": 32, "data.eval_windows": 16}
    upgrade(Request(f"hf:{folder}", tmp_path / "run", capacity=0.5, grid=(0.75,), changes=keys), lambda line: None)
    model = restore(tmp_path / "run")
    assert export(model, tmp_path / "out").family is None
    other = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", trust_remote_code=True)
    tokens_BT = tools.random_tokens(3, 32)
    ours, selected_LBT = tools.uncached(model, "threshold", tokens_BT)
    with torch.no_grad():
        theirs = other(torch.tensor(tokens_BT).long()).logits.numpy()
    np.testing.assert_allclose(theirs, ours, atol=2e-4)
    assert 0.1 < selected_LBT.mean() < 0.9
