"""`config.json` of an exported model: that of a known family where the model is one, else of our reference model."""

from __future__ import annotations

from typing import Any

from mod_jax.config import Config
from mod_jax.errors import ConfigError
from mod_jax.models.blocks import predictor_hidden
from mod_jax.pretrained.families import rotary
from mod_jax.trained import TrainedModel

# By our two keys that tell the families apart: (qkv_bias, qk_norm).
FAMILIES = {
    (False, False): ("llama", "LlamaForCausalLM"),
    (True, False): ("qwen2", "Qwen2ForCausalLM"),
    (False, True): ("qwen3", "Qwen3ForCausalLM"),
}
ACTIVATIONS = {"silu": "silu", "gelu": "gelu_pytorch_tanh", "relu_squared": "relu2"}
# How Llama 3 stretches long wavelengths: the ways that are looked through for a vector of factors.
LLAMA_3 = [
    dict(
        rope_type="llama3",
        factor=factor,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=length,
    )
    for factor in (2.0, 4.0, 8.0, 16.0, 32.0, 64.0)
    for length in (2**n for n in range(5, 18))
]
CHANNELS = {"mlp": "mlp", "experts": "experts"}


def family(config: Config) -> str | None:
    """The family of Hugging Face that computes what this model computes; None where only our reference model does."""
    m = config.model
    plain = all(block.kind == "F" for block in config.blocks)
    if not plain or not m.gated_mlp or m.embed_scale or rope_parameters(config) is None:
        return None
    return FAMILIES.get((m.qkv_bias, m.qk_norm), (None,))[0]


def rope_parameters(config: Config) -> dict[str, Any] | None:
    """The rotation in the words of Hugging Face; None where it has none for these `model.rope_factors`."""
    m = config.model
    ways = [dict(rope_type="default")]
    if m.rope_factors:
        ways = [dict(rope_type="linear", factor=m.rope_factors[0]), *LLAMA_3]
    for way in (dict(way, rope_theta=m.rope_base) for way in ways):
        if rotary(dict(rope_parameters=way), m.head_dim, "") == (m.rope_base, m.rope_factors):
            return way
    return None


def refuse(config: Config) -> None:
    """Raises a ConfigError that names what cannot be exported, before anything is written."""
    if config.num_routed and config.routing.score not in ("learned", "frozen"):
        raise ConfigError(
            f"routing.score = {config.routing.score!r}: a control for training, which the exported model does not have"
        )
    for depth, block in enumerate(config.blocks):
        for place in (block.mixer, block.channel):
            name = place and place.split(".")[-1].lower()
            if name not in (None, "attention", *CHANNELS):
                raise ConfigError(f"block {depth}, {block.kind!r}: the exported model has no {name}")


def describe(model: TrainedModel, selection: str, cutoffs_L: list[float], ids: dict[str, Any]) -> dict[str, Any]:
    """The contents of `config.json`.

    Args:
      selection, cutoffs_L: as the model is to run; "none" for one that selects nothing.
      ids: of special tokens, by the names that they have there.
    """
    config, m = model.config, model.config.model
    shape = dict(
        vocab_size=model.model.vocab_size,
        hidden_size=m.width,
        intermediate_size=m.mlp_dim,
        num_hidden_layers=m.depth,
        num_attention_heads=m.num_heads,
        num_key_value_heads=m.num_kv_heads,
        head_dim=m.head_dim,
        max_position_embeddings=m.context,
        dtype="float32",
        **ids,
    )
    if known := family(config):
        return shape | dict(
            architectures=[dict(FAMILIES.values())[known]],
            model_type=known,
            hidden_act=ACTIVATIONS[m.activation],
            rms_norm_eps=m.norm_eps,
            rope_theta=m.rope_base,
            rope_parameters=rope_parameters(config),
            tie_word_embeddings=m.tie_embedding,
        )
    return shape | dict(
        architectures=["ModForCausalLM"],
        model_type="mod_jax",
        auto_map=dict(AutoConfig="modeling_mod.ModConfig", AutoModelForCausalLM="modeling_mod.ModForCausalLM"),
        activation=m.activation,
        gated_mlp=m.gated_mlp,
        qkv_bias=m.qkv_bias,
        qk_norm=m.qk_norm,
        norm_eps=m.norm_eps,
        rope_base=m.rope_base,
        rope_factors=list(m.rope_factors),
        embed_scale=m.embed_scale,
        tied=m.tie_embedding,
        tie_word_embeddings=False,  # that is transformers' own way; the reference model reads `tied`
        layers=_layers(model, cutoffs_L),
        selection="all" if selection == "none" else selection,
        gate="constant" if config.routing.score == "frozen" else config.routing.gate,
        router_input=config.routing.router_input,
        predictor_hidden=predictor_hidden(m.width) if config.routing.predictor else 0,
        skipped_keys=getattr(config.routing, "skipped_keys", "none"),
        experts=dict(
            count=config.experts.count,
            noop=config.experts.noop,
            chosen=config.experts.chosen,
            hidden=config.experts.hidden,
        ),
    )


def _layers(model: TrainedModel, cutoffs_L: list[float]) -> list[dict[str, Any]]:
    config = model.config
    cutoffs = iter(cutoffs_L)
    expert_cutoffs = iter(model.expert_cutoffs_LE.tolist() if config.experts_choose else [])
    return [
        dict(
            mixer="attention" if block.mixer else None,
            channel=block.channel and CHANNELS[block.channel.split(".")[-1].lower()],
            routed=block.routed,
            cutoff=next(cutoffs) if block.routed else None,
            expert_cutoffs=next(expert_cutoffs) if block.has_experts and config.experts_choose else None,
        )
        for block in config.blocks
    ]
