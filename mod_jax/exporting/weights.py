"""The weights of a model under the names and in the shapes that Hugging Face gives them: one tensor per layer.

Names are Llama's wherever Llama has the part. A matrix there has its output dimension first, and heads are not apart.
Vocabulary: D width, N query and K key/value heads, H head size, F MLP hidden, V vocabulary, P predictor hidden.
"""

from __future__ import annotations

import hashlib
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from mod_jax import outputs
from mod_jax.config import Config
from mod_jax.errors import ConfigError, StorageError
from mod_jax.models.decoder import by_depth

SHARD_BYTES = 4 * 2**30  # of one file

Arrays = Iterator[tuple[str, np.ndarray]]


def _matrix(num_in: int) -> Callable[[np.ndarray], np.ndarray]:
    """From [in, out], where `num_in` dimensions are the input's, to [out, in]."""
    return lambda w: w.reshape(int(np.prod(w.shape[:num_in])), -1).T


def _flat(w: np.ndarray) -> np.ndarray:
    return w.reshape(-1)


def _row(w: np.ndarray) -> np.ndarray:
    return w.reshape(1, -1)


# Of a block: path of our parameter -> (name behind "model.layers.N.", what brings it into its shape there).
OF_BLOCK: dict[str, tuple[str, Callable[[np.ndarray], np.ndarray]]] = {
    "attention_norm.scale_D": ("input_layernorm.weight", _flat),
    "attention.q_DNH": ("self_attn.q_proj.weight", _matrix(1)),
    "attention.k_DKH": ("self_attn.k_proj.weight", _matrix(1)),
    "attention.v_DKH": ("self_attn.v_proj.weight", _matrix(1)),
    "attention.o_NHD": ("self_attn.o_proj.weight", _matrix(2)),
    "attention.q_bias_NH": ("self_attn.q_proj.bias", _flat),
    "attention.k_bias_KH": ("self_attn.k_proj.bias", _flat),
    "attention.v_bias_KH": ("self_attn.v_proj.bias", _flat),
    "attention.q_norm.scale_D": ("self_attn.q_norm.weight", _flat),
    "attention.k_norm.scale_D": ("self_attn.k_norm.weight", _flat),
    "mlp_norm.scale_D": ("post_attention_layernorm.weight", _flat),
    "mlp.gate_DF": ("mlp.gate_proj.weight", _matrix(1)),
    "mlp.up_DF": ("mlp.up_proj.weight", _matrix(1)),
    "mlp.down_FD": ("mlp.down_proj.weight", _matrix(1)),
    "experts_norm.scale_D": ("post_attention_layernorm.weight", _flat),
    "experts.router_DN": ("mlp.router.weight", _matrix(1)),
}
# Of a routed block, beside what is inside it.
OF_ROUTED = {
    "router.weight_D": ("router.weight", _row),
    "predictor.up_DP": ("predictor.up.weight", _matrix(1)),
    "predictor.up_bias_P": ("predictor.up.bias", _flat),
    "predictor.down_P": ("predictor.down.weight", _row),
    "predictor.down_bias_1": ("predictor.down.bias", _flat),
}
OF_EXPERT = {"experts.up_EDF": "up_proj", "experts.down_EFD": "down_proj"}  # one tensor per expert


def tensors(params: dict[str, Any], config: Config) -> Arrays:
    """Every parameter once, float32, as (name, array).

    Raises:
      ConfigError: a parameter has no name there, so that nothing is left out in silence.
    """
    yield "model.embed_tokens.weight", np.asarray(params["embedder"]["table_VD"])
    for depth, block in enumerate(by_depth(params, config)):
        for name, array in _of_block(block):
            yield f"model.layers.{depth}.{name}", array
    yield "model.norm.weight", np.asarray(params["final_norm"]["scale_D"])
    if not config.model.tie_embedding:
        yield "lm_head.weight", np.asarray(params["embedder"]["unembed_DV"]).T


def _of_block(block: dict[str, Any]) -> Arrays:
    routed = "block" in block
    outside = {name: tree for name, tree in block.items() if routed and name != "block"}
    for path, weight in _flatten(outside):
        name, shaped = _known(OF_ROUTED, path)
        yield name, shaped(np.asarray(weight))
    for path, weight in _flatten(block["block"] if routed else block):
        if path in OF_EXPERT:
            for expert, matrix in enumerate(np.asarray(weight)):
                yield f"mlp.experts.{expert}.{OF_EXPERT[path]}.weight", matrix.T
        else:
            name, shaped = _known(OF_BLOCK, path)
            yield name, shaped(np.asarray(weight))


def _known(table, path: str):
    if path not in table:
        raise ConfigError(f"parameter {path}: has no form in the exported model, so this model cannot be exported")
    return table[path]


def _flatten(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def save(arrays: Arrays, folder: pathlib.Path, shard_bytes: int = SHARD_BYTES) -> str:
    """Writes `model.safetensors`, or several files with an index where that is larger. Returns the weights' digest.

    The digest is of names, shapes and values, in order of the names: the same however they are divided into files.
    """
    shards: list[dict[str, np.ndarray]] = [{}]
    sums: dict[str, str] = {}
    place: dict[str, int] = {}
    size = total = 0
    for name, array in arrays:
        array = np.ascontiguousarray(array, np.float32)
        sums[name] = hashlib.sha256(f"{name}{array.shape}".encode() + array.tobytes()).hexdigest()
        if shards[-1] and size + array.nbytes > shard_bytes:
            _save_file(shards[-1], folder / _shard_name(len(shards)))
            shards[-1], size = {}, 0
            shards.append({})
        shards[-1][name], place[name] = array, len(shards)
        size, total = size + array.nbytes, total + array.nbytes
    if len(shards) == 1:
        _save_file(shards[0], folder / "model.safetensors")
    else:
        _save_file(shards[-1], folder / _shard_name(len(shards)))
        names = {}
        for number in range(1, len(shards) + 1):
            name = f"model-{number:05}-of-{len(shards):05}.safetensors"
            (folder / _shard_name(number)).rename(folder / name)
            names |= {tensor: name for tensor, at in place.items() if at == number}
        index = dict(metadata=dict(total_size=total), weight_map=names)
        outputs.write_json(folder / "model.safetensors.index.json", index)
    return hashlib.sha256("".join(sums[name] for name in sorted(sums)).encode()).hexdigest()


def _shard_name(number: int) -> str:
    return f"shard-{number}.safetensors"


def _save_file(arrays: dict[str, np.ndarray], path: pathlib.Path) -> None:
    import safetensors.numpy

    try:
        safetensors.numpy.save_file(arrays, path, metadata={"format": "pt"})
    except safetensors.SafetensorError as error:  # its own for what a file system says, a full disk for example
        raise StorageError(f"{path}: cannot be written: {error}") from None
