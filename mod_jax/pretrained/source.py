"""A pretrained model as its files have it, in the names and layouts of Hugging Face, whatever wrote the files.

`hf:FOLDER` is what `save_pretrained` of transformers leaves: config.json and *.safetensors. `gguf:FILE` is a file of
llama.cpp. Pickled weights are never opened: to open them is to run what they say.
"""

import dataclasses
import hashlib
import json
import pathlib
import re
from collections.abc import Callable
from typing import Any

import numpy as np

from mod_jax import paths
from mod_jax.errors import CheckpointMismatch, ConfigError, StorageError
from mod_jax.pretrained.gguf_file import GGUF, open_gguf

PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
FLOATS = ("F64", "F32", "F16", "BF16")


@dataclasses.dataclass(frozen=True)
class Source:
    """A model on disk.

    Attributes:
      name: as it was asked for, hf:FOLDER or gguf:FILE, with an absolute path.
      about: its hyperparameters, spelt as in config.json.
      shapes: of every tensor, by name, the outer dimension first.
      read: gives a tensor as float32.
      files: those that hold weights.
    """

    name: str
    about: dict[str, Any]
    shapes: dict[str, tuple[int, ...]]
    read: Callable[[str], np.ndarray]
    files: tuple[pathlib.Path, ...]

    def digest(self) -> str:
        """sha256 of the files' bytes, one file after the other."""
        digest = hashlib.sha256()
        for path in self.files:
            with path.open("rb") as file:
                while block := file.read(2**22):
                    digest.update(block)
        return digest.hexdigest()


def open_source(spec: str) -> Source:
    """Opens a model; its tensors are read one by one, later.

    Raises:
      ConfigError: the spec is malformed, or nothing of that kind is there.
      StorageError: a file is damaged.
      CheckpointMismatch: it is of a kind that has no place here; names what does not fit.
    """
    kind, _, argument = spec.partition(":")
    if kind not in ("hf", "gguf") or not argument:
        raise ConfigError(f"--from = {spec!r}: must be hf:FOLDER or gguf:FILE")
    path = paths.local_folder("--from", argument)
    name = f"{kind}:{path}"
    if kind == "gguf":
        file = open_gguf(path)
        if "general.architecture" not in file.fields:
            raise CheckpointMismatch(f"{path}: says nothing of its general.architecture")
        arch = file.fields["general.architecture"]
        shapes, read = _as_hf_names(file, arch, path)
        return Source(name, _as_hf_config(file, arch, path), shapes, read, (path,))
    if path.suffix in PICKLED:
        raise ConfigError(f"--from = {spec!r}: holds pickled weights, which can run code; convert them to safetensors")
    if not path.is_dir():
        raise ConfigError(f"--from = {spec!r}: is not a folder (nothing is downloaded: give the one that it lies in)")
    return _open_folder(name, path)


# A folder of transformers.


def _open_folder(name: str, folder: pathlib.Path) -> Source:
    about = read_json(folder / "config.json")
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        files = sorted({folder / str(file) for file in read_json(index).get("weight_map", {}).values()})
    else:
        files = sorted(folder.glob("*.safetensors"))
    if not files:
        pickled = sorted(path.name for path in folder.iterdir() if path.suffix in PICKLED)
        why = f"only pickled weights ({pickled[0]}), which can run code; convert them" if pickled else "no weights"
        raise ConfigError(f"{name}: has {why}; weights are read from *.safetensors")
    library = _import_safetensors()
    opened: dict[str, Any] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for path in files:
        if path.resolve().parent != folder.resolve() and path.parent != folder:
            raise ConfigError(f"{index}: names {path}, which is not in this folder")
        try:
            file = library.safe_open(path, framework="flax")
            for key in file.keys():  # noqa: SIM118 (the file itself cannot be iterated)
                part = file.get_slice(key)
                if part.get_dtype() not in FLOATS:
                    raise CheckpointMismatch(
                        f"{path}: tensor {key} is {part.get_dtype()}, not one of {', '.join(FLOATS)}"
                    )
                shapes[key], opened[key] = tuple(part.get_shape()), file
        except OSError as error:
            raise StorageError(f"{path}: cannot be read ({error.strerror or error})") from None
        except library.SafetensorError as error:
            raise StorageError(f"{path}: is damaged or truncated ({error})") from None
    if index.is_file() and (missing := read_json(index)["weight_map"].keys() - shapes):
        raise StorageError(f"{index}: tensor {min(missing)} is in no file")
    return Source(name, about, shapes, lambda key: np.asarray(opened[key].get_tensor(key), np.float32), tuple(files))


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
      ConfigError, StorageError: it is not there, or not one.
    """
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ConfigError(f"{path}: there is no such file") from None
    except (OSError, ValueError, RecursionError) as error:
        raise StorageError(f"{path}: cannot be read as JSON ({error})") from None
    if not isinstance(found, dict):
        raise StorageError(f"{path}: must hold a JSON object")
    return found


# A GGUF file.

GGUF_FAMILIES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
GGUF_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
GGUF_FACTORS = "rope_freqs.weight"  # what rotary frequencies are divided by
# Keys that say how a model differs from the plain family, and the value of each that changes nothing.
GGUF_PLAIN = {"expert_count": 0, "expert_used_count": 0, "attention.sliding_window": 0, "logit_scale": 1.0}


def _as_hf_config(file: GGUF, arch: str, path: pathlib.Path) -> dict[str, Any]:
    if arch not in GGUF_FAMILIES:
        known = ", ".join(GGUF_FAMILIES)
        raise CheckpointMismatch(f"{path}: general.architecture = {arch!r} has no place here, only {known}")

    def get(key: str, default: Any = None) -> Any:
        value = file.fields.get(f"{arch}.{key}", default)
        if value is None:
            raise CheckpointMismatch(f"{path}: lacks {arch}.{key}")
        if isinstance(value, list):
            raise CheckpointMismatch(f"{path}: {arch}.{key} differs from block to block, which has no place here")
        return float(str(np.float32(value))) if isinstance(value, float) else value  # 1e-5, not 9.999999747e-06

    for key, plain in GGUF_PLAIN.items():
        if get(key, plain) != plain:
            raise CheckpointMismatch(f"{path}: {arch}.{key} = {get(key)}: has no place here")
    heads, width = get("attention.head_count"), get("embedding_length")
    head_dim = get("attention.key_length", width // heads)
    for key in ("rope.dimension_count", "attention.value_length"):
        if get(key, head_dim) != head_dim:
            raise CheckpointMismatch(f"{path}: {arch}.{key} = {get(key)}: must be the head's size, {head_dim}")
    scaling = None
    if GGUF_FACTORS in file.shapes:
        scaling = {"rope_type": "factors", "factors": [float(f) for f in file.read(GGUF_FACTORS)]}
    elif (kind := get("rope.scaling.type", "none")) != "none":
        scaling = {"rope_type": kind, "factor": get("rope.scaling.factor", 1.0)}
    return {
        "model_type": GGUF_FAMILIES[arch],
        "hidden_size": width,
        "num_hidden_layers": get("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": get("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "intermediate_size": get("feed_forward_length"),
        "vocab_size": file.shapes.get("token_embd.weight", (0,))[0],
        "rms_norm_eps": get("attention.layer_norm_rms_epsilon"),
        "rope_theta": get("rope.freq_base", 10_000.0),
        "rope_scaling": scaling,
        "hidden_act": "silu",
        "max_position_embeddings": get("context_length"),
        "tie_word_embeddings": "output.weight" not in file.shapes,
    }


def _as_hf_names(file: GGUF, arch: str, path: pathlib.Path):
    """(shapes, read) by the names of Hugging Face. A name that has none stays as it is, to be refused as unknown."""
    names = {}
    for name in file.shapes:
        parts = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
        if name != GGUF_FACTORS:
            inner = GGUF_NAMES.get(parts[2]) if parts else None
            prefix = f"model.layers.{parts[1]}." if parts and parts[1] else ""
            names[f"{prefix}{inner}.{parts[3]}" if inner else name] = name
    heads = {"q_proj": f"{arch}.attention.head_count", "k_proj": f"{arch}.attention.head_count_kv"}

    def read(name: str) -> np.ndarray:
        values, part = file.read(names[name]), name.split(".")[-2]
        if arch == "llama" and part in heads:
            return unpermute(values, file.fields.get(heads[part], file.fields[heads["q_proj"]]))
        return values

    return {name: file.shapes[old] for name, old in names.items()}, read


def unpermute(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of a q or k weight in the order of Hugging Face, from that of llama.cpp.

    llama.cpp turns neighbours (2 i, 2 i + 1) of a head, Hugging Face and we (i, i + H / 2). Only files of architecture
    `llama` are permuted, and a wrong order raises no error: it shows in logits alone.
    """
    pairs = rows.reshape(num_heads, -1, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def _import_safetensors():
    try:
        import safetensors
    except ImportError:
        raise ConfigError("hf:FOLDER needs an extra: pip install -e '.[pretrained]'") from None
    return safetensors
