"""Tiny random models of other programs, written to disk by the libraries that own the formats."""

import dataclasses
import json
import pathlib
from typing import Any

import gguf
import numpy as np
import pytest

from mod_jax.data import tokenizers

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

ROWS = 320  # of the embedding: more than the tokenizer has ids
SHAPE = dict(
    vocab_size=ROWS,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    rms_norm_eps=1e-2,  # so large that another one would show
    rope_theta=500.0,
    initializer_range=0.2,
    bos_token_id=None,
    eos_token_id=None,
)
FAMILIES = {
    "llama": {},
    "llama, tied": {"tie_word_embeddings": True},
    "llama 3": {
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        }
    },
    "llama, linear": {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "mistral": {"sliding_window": None, "head_dim": 16},
    "qwen2": {},
    "qwen3": {"head_dim": 16, "tie_word_embeddings": True},
}
PERMUTED = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}


@dataclasses.dataclass(frozen=True)
class Tiny:
    """A model of transformers, and the tensors that it was given."""

    model: Any
    about: dict[str, Any]
    tensors: dict[str, np.ndarray]

    def logits(self, ids_BT: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            return self.model(torch.from_numpy(np.asarray(ids_BT, np.int64))).logits.numpy()


def make(family: str, **changes) -> Tiny:
    """A random model; norms and biases too are random, so that each of them shows."""
    kind = family.replace(" 3", "").split(",")[0]
    keys = {"tie_word_embeddings": False, **SHAPE, **FAMILIES[family], **changes}
    config = transformers.AutoConfig.for_model(kind, **keys)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval().float()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.copy_(torch.rand(weight.shape, generator=generator) + 0.5)
            elif "bias" in name:
                weight.copy_(0.3 * torch.randn(weight.shape, generator=generator))
    tensors = {name: weight.detach().numpy() for name, weight in model.state_dict().items()}
    if keys["tie_word_embeddings"]:
        tensors.pop("lm_head.weight")
    return Tiny(model, dict(keys, model_type=kind), tensors)


def tokenizer_json(words: tuple[str, ...] = ("<|endoftext|>", "<|im_end|>")) -> dict[str, Any]:
    """A byte-level BPE of 299 ids and these special tokens."""
    trained = tokenizers.make("bpe:300", [b"the cat sat on the mat; the cat\n" * 20])
    inner = trained._bpe
    inner.add_special_tokens(list(words))
    return json.loads(inner.to_str())


def write_folder(tiny: Tiny, folder: pathlib.Path, **save) -> pathlib.Path:
    """As `save_pretrained` leaves it, with a tokenizer."""
    tiny.model.save_pretrained(folder, **save)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer_json()))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    return folder


def permute(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """What llama.cpp's converter does to q and k: it turns neighbours, not halves."""
    return rows.reshape(num_heads, 2, -1, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def write_gguf(tiny: Tiny, path: pathlib.Path, kind: str = "F32", *, permuted: bool = True, **fields) -> pathlib.Path:
    """As llama.cpp's converter leaves it, matrices as `kind`. `fields` replace key-value pairs; None leaves one out."""
    about, arch = tiny.about, "llama" if tiny.about["model_type"] == "mistral" else tiny.about["model_type"]
    heads, kv_heads = about["num_attention_heads"], about["num_key_value_heads"]
    head_dim = about.get("head_dim") or about["hidden_size"] // heads
    values = {
        f"{arch}.block_count": about["num_hidden_layers"],
        f"{arch}.context_length": about["max_position_embeddings"],
        f"{arch}.embedding_length": about["hidden_size"],
        f"{arch}.feed_forward_length": about["intermediate_size"],
        f"{arch}.attention.head_count": heads,
        f"{arch}.attention.head_count_kv": kv_heads,
        f"{arch}.attention.key_length": head_dim,
        f"{arch}.attention.value_length": head_dim,
        f"{arch}.attention.layer_norm_rms_epsilon": float(about["rms_norm_eps"]),
        f"{arch}.rope.freq_base": float(about["rope_theta"]),
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        **fields,
    }
    writer = gguf.GGUFWriter(path, values.pop("general.architecture", arch))
    inner = tokenizer_json()
    vocab = sorted(inner["model"]["vocab"], key=inner["model"]["vocab"].get)
    specials = [token["content"] for token in inner["added_tokens"]]
    values.setdefault("tokenizer.ggml.eos_token_id", len(vocab) + specials.index("<|im_end|>"))
    for name, value in values.items():
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string, bool: writer.add_bool}
        if isinstance(value, list):
            writer.add_array(name, value)
        elif value is not None:
            add[type(value)](name, value)
    writer.add_token_list([*vocab, *specials])
    writer.add_token_types([1] * len(vocab) + [3] * len(specials))
    writer.add_token_merges([" ".join(pair) for pair in inner["model"]["merges"]])
    for name, tensor in tiny.tensors.items():
        part = name.split(".")[-2]
        if permuted and arch == "llama" and part in PERMUTED:
            tensor = permute(tensor, about[PERMUTED[part]])
        quantised = gguf.GGMLQuantizationType[kind if tensor.ndim > 1 else "F32"]
        raw = gguf.quants.quantize(np.ascontiguousarray(tensor, np.float32), quantised)
        writer.add_tensor(gguf_name(name), raw, raw_dtype=quantised)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_name(name: str) -> str:
    """What llama.cpp calls a tensor of transformers."""
    table = gguf.TensorNameMap(gguf.MODEL_ARCH.QWEN3, SHAPE["num_hidden_layers"])
    return table.get_name(name, try_suffixes=(".weight", ".bias")) or name
