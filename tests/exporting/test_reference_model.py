"""What transformers computes from an exported folder is what we compute: logits, decisions, caches, generated text."""

import dataclasses
import importlib.util
import json
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from mod_jax.exporting.folder import export
from mod_jax.sampling import Sampler

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

DENSE = {"model.layout": "F", "routing.aux_weight": 0.0}
GATED = {"model.gated_mlp": True, "model.activation": "silu", "model.embed_scale": False, "model.norm_eps": 1e-5}
EXPERTS = {"experts.count": 3, "experts.chosen": 2, "experts.noop": 1}
MODELS = {
    "threshold": ({}, "threshold"),
    "kept keys": ({"routing.skipped_keys": "kept", "routing.gate": "one"}, "threshold"),
    "router, sigmoid gate, raw input": ({"routing.gate": "sigmoid", "routing.router_input": "raw"}, "router"),
    "predictor, tied, gelu": ({"model.tie_embedding": True, "model.activation": "gelu"}, "predictor"),
    "pretrained parts, tanh gate": (
        {**GATED, "routing.gate": "tanh", "model.qkv_bias": True, "model.rope_factors": (1.0, 3.0)},
        "threshold",
    ),
    "parts of a block routed apart": ({"model.layout": "Fam"}, "threshold"),
    "staged experts": ({"model.layout": "Ee", **EXPERTS}, "predictor"),
    "experts that choose": ({**DENSE, "model.layout": "E", "experts.choice": "expert"}, None),
    "dense": (DENSE, None),
    "llama": ({**DENSE, **GATED, "model.qk_norm": False}, None),
    "qwen2": ({**DENSE, **GATED, "model.qk_norm": False, "model.qkv_bias": True, "model.tie_embedding": True}, None),
    "qwen3": ({**DENSE, **GATED, "model.activation": "gelu"}, None),
}
FAMILIES = ("llama", "qwen2", "qwen3")


def exported(build, folder, name):
    """(our model, its selection, transformers' model), of one of MODELS."""
    changes, selection = MODELS[name]
    model = build(**changes)
    if not model.config.num_routed:
        model = dataclasses.replace(model, cutoffs_L=np.zeros(0, np.float32))
    made = export(model, folder, selection=selection)
    assert made.family == (name if name in FAMILIES else None)
    other, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, trust_remote_code=name not in FAMILIES, output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    return model, made.selection, other.eval()


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_ours(build, tools, tmp_path, name):
    model, selection, other = exported(build, tmp_path / "out", name)
    tokens_BT = tools.random_tokens(3, 32)
    ours, selected_LBT = tools.uncached(model, "topk" if selection == "none" else selection, tokens_BT)
    with torch.no_grad():
        theirs = other(torch.tensor(tokens_BT).long()).logits.numpy()
    np.testing.assert_allclose(theirs, ours, atol=1e-4)
    if model.config.num_routed:
        assert 0.02 < selected_LBT.mean() < 0.98


@pytest.mark.slow
@pytest.mark.parametrize("name", ["threshold", "kept keys", "llama"])
def test_what_it_generates_with_its_cache_is_ours_padded_or_not(build, tmp_path, name):
    model, selection, other = exported(build, tmp_path / "out", name)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out", trust_remote_code=True)
    sampler = Sampler(model, None if selection == "none" else selection)
    prompts = ["def f(x):", "x"]
    ours = sampler.generate(prompts, temperature=0, max_new_tokens=12)
    ids = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left")
    settings = dict(max_new_tokens=12, do_sample=False)
    batch = other.generate(**ids, **settings)
    for index, prompt in enumerate(prompts):
        alone = tokenizer(prompt, return_tensors="pt")
        new = alone["input_ids"].shape[1]
        assert alone["input_ids"][0].tolist() == [0, *model.tokenizer.encode(prompt)]
        for made in (
            batch[index, ids["input_ids"].shape[1] :],
            other.generate(**alone, **settings)[0, new:],
            other.generate(**alone, **settings, use_cache=False)[0, new:],
            other.generate(**alone, **settings, num_beams=1, num_return_sequences=1)[0, new:],
        ):
            assert made[: len(ours[index].tokens)].tolist() == ours[index].tokens


def test_its_cache_holds_selected_tokens_alone_and_beams_take_their_own(build, tmp_path):
    model, _, other = exported(build, tmp_path / "out", "threshold")
    ids = torch.tensor([[0, *model.tokenizer.encode("def f(x):\n    return")]])
    with torch.no_grad():
        whole = other(ids, use_cache=True)
        first = other(ids[:, :7], use_cache=True)
        rest = other(ids[:, 7:], attention_mask=torch.ones_like(ids), cache=first.cache)
    np.testing.assert_allclose(rest.logits, whole.logits[:, 7:], atol=1e-5)
    slots = [whole.cache.layers[depth][0].shape[2] for depth in range(4) if depth in whole.cache.layers]
    assert slots[0] == ids.shape[1]
    assert min(slots) < ids.shape[1]
    beams = other.generate(ids, num_beams=3, max_new_tokens=6, do_sample=False)
    uncached = other.generate(ids, num_beams=3, max_new_tokens=6, do_sample=False, use_cache=False)
    assert beams.tolist() == uncached.tolist()


def test_in_bfloat16_routing_stays_float32_and_close(build, tools, tmp_path):
    model, *_ = exported(build, tmp_path / "out", "threshold")
    settings = dict(trust_remote_code=True, dtype=torch.bfloat16)
    other = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", **settings)
    dtypes = {name: weight.dtype for name, weight in other.named_parameters()}
    assert {dtypes[name] for name in dtypes if "router" in name or "predictor" in name} == {torch.float32}
    assert dtypes["model.layers.1.mlp.up_proj.weight"] == torch.bfloat16
    tokens_BT = tools.random_tokens(2, 32)
    with torch.no_grad():
        theirs = other(torch.tensor(tokens_BT).long()).logits.numpy()
    far = np.abs(theirs - tools.uncached(model, "threshold", tokens_BT)[0])
    assert np.median(far) < 0.05  # a token near a cut-off may be decided otherwise


def test_ids_without_text_are_never_generated(build, tmp_path):
    model = build(**{"model.vocab_size": 4000})  # of which 257 stand for something
    export(model, tmp_path / "out", selection="threshold")
    other = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", trust_remote_code=True)
    ids = other.generate(torch.tensor([[0, 5, 6]]), max_new_tokens=20, do_sample=True)
    assert int(ids.max()) < 257


def test_it_learns_all_its_weights_but_those_of_the_predictor(build, tmp_path):
    _, _, other = exported(build, tmp_path / "out", "threshold")
    ids = torch.randint(1, 257, (2, 32))
    other(ids, labels=ids).loss.backward()
    without = {name for name, weight in other.named_parameters() if weight.grad is None}
    assert without == {name for name, _ in other.named_parameters() if ".predictor." in name}


def test_it_needs_neither_mod_jax_nor_jax(build, tmp_path):
    exported(build, tmp_path / "out", "threshold")
    script = f"""
import sys
for name in ("jax", "jaxlib", "flax", "mod_jax"):
    sys.modules[name] = None
import transformers
model = transformers.AutoModelForCausalLM.from_pretrained({str(tmp_path / "out")!r}, trust_remote_code=True)
tokenizer = transformers.AutoTokenizer.from_pretrained({str(tmp_path / "out")!r}, trust_remote_code=True)
ids = model.generate(**tokenizer("def ", return_tensors="pt"), max_new_tokens=4)
assert ids.shape[1] == 9 or ids[0, -1] == 0
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_reference_model_imports_nothing_but_torch_and_transformers():
    spec = importlib.util.find_spec("mod_jax.exporting.modeling_mod")
    lines = pathlib.Path(spec.origin).read_text().splitlines()
    found = {line.split()[1].split(".")[0] for line in lines if line.startswith(("import ", "from "))}
    assert found == {"dataclasses", "typing", "torch", "transformers"}


def test_another_selection_is_taken_when_it_is_loaded(build, tools, tmp_path):
    model, *_ = exported(build, tmp_path / "out", "threshold")
    settings = dict(trust_remote_code=True, selection="predictor")
    other = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", **settings)
    tokens_BT = tools.random_tokens(2, 32)
    with torch.no_grad():
        theirs = other(torch.tensor(tokens_BT).long()).logits.numpy()
    np.testing.assert_allclose(theirs, tools.uncached(model, "predictor", tokens_BT)[0], atol=1e-4)


def test_cut_offs_are_kept_to_the_last_bit(build, tmp_path):
    model, *_ = exported(build, tmp_path / "out", "threshold")
    layers = json.loads((tmp_path / "out" / "config.json").read_text())["layers"]
    cutoffs = [layer["cutoff"] for layer in layers if layer["routed"]]
    assert np.array_equal(np.float32(cutoffs), np.asarray(model.cutoffs_L))
