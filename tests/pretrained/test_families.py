"""Weights of other programs give their logits, whatever the family and the file. What does not fit is refused."""

import json

import gguf
import jax
import numpy as np
import pytest
import sources
from safetensors.numpy import load_file, save_file

from mod_jax.config import make_config
from mod_jax.errors import CheckpointMismatch, ConfigError, ModJaxError, StorageError
from mod_jax.models.model import make_model
from mod_jax.pretrained import families, gguf_file, source
from mod_jax.pretrained.source import open_source

IDS_BT = np.random.default_rng(0).integers(0, sources.ROWS, (2, 64)).astype(np.int32)


def converted(spec, **changes):
    """(config, parameters) of a model on disk; `changes` replace what it says of itself."""
    found = open_source(str(spec))
    keys = {name: value for name, value in families.model_keys(found).items() if name != "model.context"}
    config = make_config(**{**keys, "train.steps": 1, **changes})
    return config, families.read_params(found, config)


def logits(config, params):
    return np.asarray(jax.jit(make_model(config, sources.ROWS).run)(params, IDS_BT).logits_BTV)


@pytest.fixture(scope="module")
def llama():
    return sources.make("llama")


# Equal


@pytest.mark.parametrize("family", sources.FAMILIES)
def test_a_folder_of_transformers_gives_its_logits(family, tmp_path):
    tiny = sources.make(family)
    config, params = converted(f"hf:{sources.write_folder(tiny, tmp_path)}")
    assert jax.tree.structure(params) == jax.tree.structure(make_model(config, sources.ROWS).abstract_params)
    np.testing.assert_allclose(logits(config, params), tiny.logits(IDS_BT), atol=1e-4)


@pytest.mark.parametrize("family", ["llama", "llama, tied", "mistral", "qwen2", "qwen3"])
def test_a_gguf_file_gives_the_same_weights_as_the_folder(family, tmp_path):
    tiny = sources.make(family)
    config, params = converted(f"gguf:{sources.write_gguf(tiny, tmp_path / 'model.gguf')}")
    other_config, other = converted(f"hf:{sources.write_folder(tiny, tmp_path / 'folder')}")
    assert config == other_config
    jax.tree.map(np.testing.assert_array_equal, params, other)


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_1"])
def test_a_quantised_tensor_is_read_as_the_library_has_it(llama, kind, tmp_path):
    found = open_source(f"gguf:{sources.write_gguf(llama, tmp_path / 'model.gguf', kind)}")
    own = gguf.GGMLQuantizationType[kind]
    for name in ("model.layers.1.mlp.up_proj.weight", "model.layers.2.self_attn.k_proj.weight"):
        tensor, is_k = llama.tensors[name], "k_proj" in name
        stored = sources.permute(tensor, 2) if is_k else tensor
        expected = gguf.quants.dequantize(gguf.quants.quantize(stored, own), own)
        np.testing.assert_array_equal(found.read(name), source.unpermute(expected, 2) if is_k else expected)
    assert found.read("model.norm.weight").dtype == np.float32


def test_weights_in_bfloat16_and_in_several_files_are_read(llama, tmp_path):
    folder = sources.write_folder(llama, tmp_path, max_shard_size="20KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    config, params = converted(f"hf:{folder}")
    np.testing.assert_allclose(logits(config, params), llama.logits(IDS_BT), atol=1e-4)


def test_rotary_factors_come_out_of_a_gguf_file_too(tmp_path):
    tiny = sources.make("llama 3")
    _, factors = families.rotary(tiny.about, 8, "")
    assert factors[0] == 1.0
    assert factors[-1] == pytest.approx(8.0)
    tiny.tensors["rope_freqs.weight"] = np.array(factors, np.float32)
    config, params = converted(f"gguf:{sources.write_gguf(tiny, tmp_path / 'model.gguf')}")
    np.testing.assert_allclose(logits(config, params), tiny.logits(IDS_BT), atol=1e-4)


# Each of these is wrong without an error of its own, and only logits show it


@pytest.mark.parametrize(
    "changes",
    [
        {"model.norm_eps": 1e-6},
        {"model.rope_base": 10_000.0},
        {"model.embed_scale": True},
        {"model.rope_factors": (2.0,) * 4},
        {"model.activation": "gelu"},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_a_wrong_key_shows_in_the_logits(llama, changes, tmp_path):
    config, params = converted(f"hf:{sources.write_folder(llama, tmp_path)}", **changes)
    assert np.abs(logits(config, params) - llama.logits(IDS_BT)).max() > 1e-2


def test_the_wrong_order_of_rotated_pairs_shows_in_the_logits(llama, tmp_path):
    config, params = converted(f"gguf:{sources.write_gguf(llama, tmp_path / 'model.gguf', permuted=False)}")
    assert np.abs(logits(config, params) - llama.logits(IDS_BT)).max() > 1e-2


# Refused, by the name of what does not fit


ABOUT = [
    ({"model_type": "gemma2"}, "model_type = 'gemma2'", "llama, mistral, qwen2, qwen3"),
    ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}}, "rope_scaling of type 'yarn'"),
    ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}, "rope_scaling", "factor"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
    ({"quantization_config": {"bits": 4}}, "quantization_config"),
    ({"layer_types": ["sliding_attention"] * 4}, "layer_types"),
    ({"hidden_act": "relu"}, "hidden_act = 'relu'", "silu"),
    ({"rms_norm_eps": None}, "rms_norm_eps = None"),
    ({"hidden_size": "32"}, "hidden_size = '32'"),
    ({"num_hidden_layers": 5}, "lacks tensor model.layers.4."),
    ({"num_hidden_layers": 3}, "tensor model.layers.3.", "has no place here, and 8 more"),
    ({"intermediate_size": 96}, "is [64, 32], must be [96, 32]"),
    ({"tie_word_embeddings": True}, "tensor lm_head.weight has no place here"),
]


@pytest.mark.parametrize(("changes", "fragments"), [(c, f) for c, *f in ABOUT], ids=[next(iter(c[0])) for c in ABOUT])
def test_a_folder_that_says_something_else_is_refused(llama, changes, fragments, tmp_path):
    folder = sources.write_folder(llama, tmp_path)
    about = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(about | changes))
    with pytest.raises(CheckpointMismatch) as refusal:
        converted(f"hf:{folder}")
    assert str(folder) in str(refusal.value)
    for fragment in fragments:
        assert fragment in str(refusal.value)


def test_a_tensor_without_a_place_is_never_skipped(llama, tmp_path):
    folder = sources.write_folder(llama, tmp_path)
    tensors = load_file(folder / "model.safetensors")
    save_file(
        tensors | {"model.layers.0.self_attn.o_proj.bias": np.zeros(32, np.float32)}, folder / "model.safetensors"
    )
    with pytest.raises(CheckpointMismatch, match=r"tensor model\.layers\.0\.self_attn\.o_proj\.bias has no place here"):
        converted(f"hf:{folder}")
    frequencies = 500.0 ** (-np.arange(4, dtype=np.float32) / 4)  # of head size 8: what the config says already
    old = {"model.layers.0.self_attn.rotary_emb.inv_freq": frequencies}
    save_file(tensors | old, folder / "model.safetensors")
    converted(f"hf:{folder}")
    save_file(tensors | {name: 2 * values for name, values in old.items()}, folder / "model.safetensors")
    with pytest.raises(CheckpointMismatch, match=r"inv_freq has no place here"):
        converted(f"hf:{folder}")
    bad = tensors | {"model.norm.weight": np.full(32, np.nan, np.float32)}
    save_file(bad, folder / "model.safetensors")
    with pytest.raises(CheckpointMismatch, match=r"model\.norm\.weight holds numbers that are not finite"):
        converted(f"hf:{folder}")


GGUF_SAYS = [
    ({"general.architecture": "gemma3"}, "general.architecture = 'gemma3'"),
    ({"llama.expert_count": 8}, "llama.expert_count = 8"),
    ({"llama.rope.scaling.type": "yarn"}, "rope_scaling of type 'yarn'"),
    ({"llama.attention.head_count_kv": [2, 2, 1, 2]}, "head_count_kv differs from block to block"),
    ({"llama.rope.dimension_count": 4}, "llama.rope.dimension_count = 4"),
    ({"llama.block_count": None}, "lacks llama.block_count"),
    ({"llama.attention.sliding_window": 64}, "llama.attention.sliding_window = 64"),
]


@pytest.mark.parametrize(("fields", "fragment"), GGUF_SAYS, ids=[next(iter(f[0])) for f in GGUF_SAYS])
def test_a_gguf_file_that_says_something_else_is_refused(llama, fields, fragment, tmp_path):
    path = sources.write_gguf(llama, tmp_path / "model.gguf", **fields)
    with pytest.raises(CheckpointMismatch) as refusal:
        converted(f"gguf:{path}")
    assert fragment in str(refusal.value)


# Damaged, misnamed, or not to be opened


def test_a_truncated_gguf_file_is_refused_wherever_it_ends(llama, tmp_path):
    whole = sources.write_gguf(llama, tmp_path / "whole.gguf").read_bytes()
    path = tmp_path / "cut.gguf"
    for size in [*range(0, 64, 7), *np.linspace(64, len(whole) - 1, 40).astype(int)]:
        path.write_bytes(whole[:size])
        with pytest.raises(StorageError) as refusal:
            gguf_file.open_gguf(path)
        assert str(path) in str(refusal.value)
        assert "\n" not in str(refusal.value)


def test_damaged_safetensors_are_refused(llama, tmp_path):
    folder = sources.write_folder(llama, tmp_path)
    whole = (folder / "model.safetensors").read_bytes()
    for content in (b"", whole[:7], whole[:100], whole[:-1], b"\xff" * 64 + whole[64:]):
        (folder / "model.safetensors").write_bytes(content)
        with pytest.raises(StorageError, match=r"model\.safetensors: is damaged or truncated"):
            open_source(f"hf:{folder}")


def test_pickled_weights_are_never_opened(llama, tmp_path):
    folder = sources.write_folder(llama, tmp_path)
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"cos\nsystem\n")  # what pickle would run
    with pytest.raises(ConfigError, match=r"only pickled weights \(pytorch_model\.bin\), which can run code"):
        open_source(f"hf:{folder}")
    with pytest.raises(ConfigError, match="holds pickled weights"):
        open_source(f"hf:{folder / 'pytorch_model.bin'}")


def test_what_is_not_there_or_misnamed_is_refused_in_one_line(llama, tmp_path):
    (tmp_path / "text.gguf").write_text("not a model, but longer than four letters")
    folder = sources.write_folder(llama, tmp_path / "folder")
    index = {"weight_map": {"model.norm.weight": "../elsewhere.safetensors"}}
    (tmp_path / "strange").mkdir()
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / "strange" / name).write_bytes((folder / name).read_bytes())
    (tmp_path / "strange" / "model.safetensors.index.json").write_text(json.dumps(index))
    for spec, fragment in [
        ("hf:", "must be hf:FOLDER or gguf:FILE"),
        ("onnx:model", "must be hf:FOLDER or gguf:FILE"),
        (f"gguf:{tmp_path / 'none.gguf'}", "is not a file"),
        (f"gguf:{tmp_path}", "is not a file"),
        (f"gguf:{tmp_path / 'text.gguf'}", "is no GGUF file"),
        (f"hf:{tmp_path / 'none'}", "is not a folder"),
        (f"hf:{tmp_path}", "config.json: there is no such file"),
        (f"hf:{tmp_path / 'strange'}", "which is not in this folder"),
    ]:
        with pytest.raises(ModJaxError) as refusal:
            open_source(spec)
        assert fragment in str(refusal.value)
        assert "\n" not in str(refusal.value)
