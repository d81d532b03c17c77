"""What a pretrained model is in our terms: its config keys, and its weights as our parameters.

Known are the decoders of the families in `FAMILIES`: pre-norm, rotary, gated MLP, RMS norms. Anything else is refused
by the name of what does not fit. No tensor is skipped: each has a place, or is shown to say nothing new, or is refused.

Vocabulary as in `models`: D width, N heads, K key/value heads, H head dim, F MLP hidden, V vocabulary. A linear weight
of Hugging Face is [out, in], ours [in, out].
"""

import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from mod_jax.config import Config
from mod_jax.errors import CheckpointMismatch
from mod_jax.models.decoder import from_depth
from mod_jax.pretrained.source import Source

FAMILIES = {  # model_type: whether queries and keys are normalised per head
    "llama": False,
    "mistral": False,
    "qwen2": False,
    "qwen3": True,
}
ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu", "gelu_new": "gelu"}
# Hyperparameters under which a model computes something that has no place here, and the values that change nothing.
PLAIN = {
    "partial_rotary_factor": (1.0,),
    "quantization_config": (None,),
    "use_sliding_window": (False,),
    "no_rope_layers": (None, []),
    "residual_multiplier": (1.0,),
    "embedding_multiplier": (1.0,),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
}


def model_keys(source: Source) -> dict[str, Any]:
    """The `model.` keys of a model of layout "F", and the longest context that its rotation and windows allow.

    Raises:
      CheckpointMismatch: naming what has no place here.
    """
    about, name = source.about, source.name

    def refuse(key: str, allowed: str):
        raise CheckpointMismatch(f"{name}: {key} = {about.get(key)!r} has no place here: must be {allowed}")

    def get(key: str, kind=int):
        value = about.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0 or value != kind(value):
            refuse(key, f"a positive {'integer' if kind is int else 'number'}")
        return kind(value)

    family = about.get("model_type")
    if family not in FAMILIES:
        refuse("model_type", f"one of {', '.join(FAMILIES)}")
    for key, plain in PLAIN.items():
        if about.get(key, plain[0]) not in plain:
            refuse(key, f"{plain[0]} or absent")
    if about.get("hidden_act", "silu") not in ACTIVATIONS:
        refuse("hidden_act", f"one of {', '.join(ACTIVATIONS)}")
    if set(about.get("layer_types") or ["full_attention"]) != {"full_attention"}:
        refuse("layer_types", "full_attention for every layer")
    heads, width = get("num_attention_heads"), get("hidden_size")
    if about.get("head_dim") is None and width % heads:
        refuse("num_attention_heads", f"a divisor of hidden_size = {width}, or stand beside head_dim")
    head_dim = get("head_dim") if about.get("head_dim") is not None else width // heads
    base, factors = rotary(about, head_dim, name)
    context = get("max_position_embeddings")
    if about.get("sliding_window") and family == "mistral":
        context = min(context, get("sliding_window"))  # within it, a window changes nothing
    return {
        "model.vocab_size": get("vocab_size"),
        "model.width": width,
        "model.depth": get("num_hidden_layers"),
        "model.num_heads": heads,
        "model.num_kv_heads": get("num_key_value_heads") if about.get("num_key_value_heads") is not None else heads,
        "model.head_dim": head_dim,
        "model.mlp_dim": get("intermediate_size"),
        "model.activation": ACTIVATIONS[about.get("hidden_act", "silu")],
        "model.gated_mlp": True,
        "model.layout": "F",
        "model.context": context,
        "model.rope_base": base,
        "model.rope_factors": factors,
        "model.qkv_bias": "model.layers.0.self_attn.q_proj.bias" in source.shapes,
        "model.qk_norm": FAMILIES[family],
        "model.norm_eps": get("rms_norm_eps", float),
        "model.embed_scale": False,
        "model.tie_embedding": bool(about.get("tie_word_embeddings", False)),
    }


def rotary(about: dict[str, Any], head_dim: int, name: str) -> tuple[float, tuple[float, ...]]:
    """(base, factors) of the rotary frequencies: see `model.rope_factors`.

    Raises:
      CheckpointMismatch: their scaling is of another kind than none, linear and Llama 3's.
    """
    scaling = about.get("rope_parameters") or about.get("rope_scaling") or {}
    base = float(scaling.get("rope_theta") or about.get("rope_theta") or 10_000.0)
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    half = head_dim // 2
    if kind == "default":
        return base, ()
    try:
        if kind == "factors":
            return base, tuple(scaling["factors"])
        if kind == "linear":
            return base, (float(scaling["factor"]),) * half
        if kind == "llama3":
            return base, _llama_3_factors(scaling, base, half)
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise CheckpointMismatch(f"{name}: rope_scaling = {scaling}: cannot be read ({error!r})") from None
    raise CheckpointMismatch(
        f"{name}: rope_scaling of type {kind!r} has no place here: must be default, linear, llama3"
    )


def _llama_3_factors(scaling: dict[str, Any], base: float, half: int) -> tuple[float, ...]:
    """Long wavelengths are stretched by `factor`, short ones stay, and between the two bounds it fades in."""
    factor, low, high = (float(scaling[k]) for k in ("factor", "low_freq_factor", "high_freq_factor"))
    length = float(scaling["original_max_position_embeddings"])
    factors = []
    for i in range(half):
        wavelength = 2 * math.pi * base ** (i / half)
        kept = min(max((length / wavelength - low) / (high - low), 0.0), 1.0)  # share of the frequency as it was
        factors.append(1.0 / (kept + (1.0 - kept) / factor))
    return tuple(factors)


# Weights.


class Place(NamedTuple):
    """Where a tensor goes: path in a block's parameters, the shape of the tensor in its file, and how it is turned."""

    path: tuple[str, ...]
    shape: tuple[int, ...]
    turn: Callable[[np.ndarray], np.ndarray]


def places(config: Config) -> dict[str, Place]:
    """The tensors of one block, by their names behind `model.layers.N.`"""
    m = config.model
    D, N, K, H, F = m.width, m.num_heads, m.num_kv_heads, m.head_dim, m.mlp_dim

    def as_is(w):
        return w

    def heads_out(w):  # [N * H, D] -> [D, N, H]
        return w.T.reshape(D, -1, H)

    found = {
        "input_layernorm.weight": Place(("attention_norm", "scale_D"), (D,), as_is),
        "post_attention_layernorm.weight": Place(("mlp_norm", "scale_D"), (D,), as_is),
        "self_attn.q_proj.weight": Place(("attention", "q_DNH"), (N * H, D), heads_out),
        "self_attn.k_proj.weight": Place(("attention", "k_DKH"), (K * H, D), heads_out),
        "self_attn.v_proj.weight": Place(("attention", "v_DKH"), (K * H, D), heads_out),
        "self_attn.o_proj.weight": Place(("attention", "o_NHD"), (D, N * H), lambda w: w.T.reshape(N, H, D)),
        "mlp.gate_proj.weight": Place(("mlp", "gate_DF"), (F, D), np.transpose),
        "mlp.up_proj.weight": Place(("mlp", "up_DF"), (F, D), np.transpose),
        "mlp.down_proj.weight": Place(("mlp", "down_FD"), (D, F), np.transpose),
    }
    if m.qkv_bias:
        for letter, shape in (("q", (N, H)), ("k", (K, H)), ("v", (K, H))):
            path = ("attention", f"{letter}_bias_{'NH' if letter == 'q' else 'KH'}")
            found[f"self_attn.{letter}_proj.bias"] = Place(
                path, (shape[0] * H,), lambda b, shape=shape: b.reshape(shape)
            )
    if m.qk_norm:
        for letter in "qk":
            found[f"self_attn.{letter}_norm.weight"] = Place(("attention", f"{letter}_norm", "scale_D"), (H,), as_is)
    return found


def read_params(source: Source, config: Config) -> dict[str, Any]:
    """The parameters of the dense model, float32, as `Model.init` would give them for layout "F".

    Raises:
      CheckpointMismatch: a tensor is missing, of another shape, not finite, or has no place here.
    """
    D, V = config.model.width, config.model.vocab_size
    of_block = places(config)
    outside = {"model.embed_tokens.weight": (V, D), "model.norm.weight": (D,)}
    if not config.model.tie_embedding:
        outside["lm_head.weight"] = (V, D)
    wanted = dict(outside)
    for depth in range(config.model.depth):
        wanted |= {f"model.layers.{depth}.{name}": place.shape for name, place in of_block.items()}
    _check_names(source, config, wanted)

    def read(name: str) -> np.ndarray:
        values = source.read(name)
        if not np.isfinite(values).all():
            raise CheckpointMismatch(f"{source.name}: tensor {name} holds numbers that are not finite")
        return values

    blocks = []
    for depth in range(config.model.depth):
        block: dict[str, Any] = {}
        for name, place in of_block.items():
            *folders, leaf = place.path
            inner = block
            for folder in folders:
                inner = inner.setdefault(folder, {})
            inner[leaf] = jnp.asarray(place.turn(read(f"model.layers.{depth}.{name}")))
        blocks.append(block)
    embedder = {"table_VD": jnp.asarray(read("model.embed_tokens.weight"))}
    if not config.model.tie_embedding:
        embedder["unembed_DV"] = jnp.asarray(read("lm_head.weight").T)
    norm = {"scale_D": jnp.asarray(read("model.norm.weight"))}
    return from_depth(blocks, {"embedder": embedder, "final_norm": norm}, config)


def _check_names(source: Source, config: Config, wanted: dict[str, tuple[int, ...]]) -> None:
    for name, shape in wanted.items():
        if name not in source.shapes:
            raise CheckpointMismatch(f"{source.name}: lacks tensor {name} {list(shape)}")
        if source.shapes[name] != shape:
            raise CheckpointMismatch(
                f"{source.name}: tensor {name} is {list(source.shapes[name])}, must be {list(shape)}"
            )
    unknown = [name for name in source.shapes.keys() - wanted if not _says_nothing_new(source, config, name)]
    if unknown:
        more = f", and {len(unknown) - 1} more" if len(unknown) > 1 else ""
        raise CheckpointMismatch(f"{source.name}: tensor {min(unknown)} has no place here{more}")


def _says_nothing_new(source: Source, config: Config, name: str) -> bool:
    """Whether a tensor without a place is what the others say already: a tied head, or rotary frequencies."""
    if name == "lm_head.weight" and config.model.tie_embedding:
        return np.array_equal(source.read(name), source.read("model.embed_tokens.weight"))
    if re.fullmatch(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq", name):
        half = config.model.head_dim // 2
        frequencies = config.model.rope_base ** (-np.arange(half) / half)
        return np.allclose(source.read(name), frequencies, rtol=1e-2)  # bfloat16 may have rounded it
    return False
