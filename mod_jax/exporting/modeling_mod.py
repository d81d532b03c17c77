"""A Mixture-of-Depths decoder (Raposo et al. 2024, arXiv 2404.02258) for transformers, as mod_jax exports it.

This file is copied into the folder of the model and needs PyTorch and transformers alone. A routed layer scores every
token; selected ones go through its attention and MLP and come back as x + gate * f(x), all others pass by unchanged.
Who is selected is decided for each token alone, by `config.selection`: "threshold" (score > cut-off), "router"
(score > 0), "predictor" (its logit > 0) or "all".

Vocabulary: B rows, T tokens, C tokens of a row that a layer runs (the most that a row selects; position -1 where it
selects fewer), S keys that it sees, N query heads, K key/value heads, H head size, D width, E experts.
"""

import dataclasses
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

# What transformers calls a memory: by another name since its version 5.24.
CACHE = next(f.name for f in dataclasses.fields(CausalLMOutputWithPast) if f.name in ("cache", "past_key_values"))
ACTIVATIONS = {
    "relu_squared": lambda x: F.relu(x).square(),
    "gelu": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
}
GATES = {
    "raw": lambda score: score,
    "sigmoid": torch.sigmoid,
    "tanh": lambda score: 1 + torch.tanh(score),
    "one": lambda score: 1 + (score - score.detach()),
    "constant": torch.ones_like,
}


class ModConfig(PretrainedConfig):
    """`layers` has one entry per layer: mixer ("attention" or None), channel ("mlp", "experts" or None), routed,
    cutoff (of "threshold"; None if not routed), expert_cutoffs (of experts that choose their tokens, or None)."""

    model_type = "mod_jax"


class Memory:
    """Keys, values and positions of what each layer has seen, and how many columns of input went in before."""

    def __init__(self):
        self.seen, self.layers = 0, {}

    def append(self, layer: int, *new: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Takes keys and values [B, K, C, H] and positions [B, 1, C]; returns all there are, S of each row."""
        old = self.layers.get(layer)
        self.layers[layer] = (
            new if old is None else tuple(torch.cat(pair, dim=2) for pair in zip(old, new, strict=True))
        )
        return self.layers[layer]

    def get_seq_length(self, layer: int = 0) -> int:
        return self.seen

    def reorder_cache(self, rows: torch.Tensor) -> None:
        self.layers = {n: tuple(a.index_select(0, rows) for a in kept) for n, kept in self.layers.items()}


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x):
        return (x.float() * inverse_rms(x, self.eps) * self.weight.float()).to(x.dtype)


def inverse_rms(x, eps: float):
    return torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)


class Attention(nn.Module):
    def __init__(self, c: ModConfig, layer: int):
        super().__init__()
        self.layer, self.head_dim, self.rope_base, self.rope_factors = layer, c.head_dim, c.rope_base, c.rope_factors
        heads, kv_heads = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
        self.q_proj = nn.Linear(c.hidden_size, heads, bias=c.qkv_bias)
        self.k_proj = nn.Linear(c.hidden_size, kv_heads, bias=c.qkv_bias)
        self.v_proj = nn.Linear(c.hidden_size, kv_heads, bias=c.qkv_bias)
        self.o_proj = nn.Linear(heads, c.hidden_size, bias=False)
        self.q_norm, self.k_norm = (RMSNorm(c.head_dim, c.norm_eps) if c.qk_norm else None for _ in range(2))

    def remember(self, x, positions, memory: Memory):
        """Leaves the keys and values of these tokens, and returns all that the layer remembers of their rows."""
        k, v = (w(x).unflatten(-1, (-1, self.head_dim)) for w in (self.k_proj, self.v_proj))
        k = self.rotate(self.k_norm(k) if self.k_norm else k, positions)
        return memory.append(self.layer, k.transpose(1, 2), v.transpose(1, 2), positions[:, None])

    def forward(self, x, positions, k, v, kv_positions):
        q = self.q_proj(x).unflatten(-1, (-1, self.head_dim))
        q = self.rotate(self.q_norm(q) if self.q_norm else q, positions).transpose(1, 2)
        k, v = (a.repeat_interleave(q.shape[1] // a.shape[1], dim=1) for a in (k, v))
        mask = (kv_positions >= 0) & (kv_positions <= positions[..., None])
        mask = mask | (positions < 0)[..., None]  # what is not there looks at anything, and is thrown away
        return self.o_proj(F.scaled_dot_product_attention(q, k, v, mask[:, None]).transpose(1, 2).flatten(2))

    def rotate(self, x, positions):
        half = self.head_dim // 2
        frequencies = self.rope_base ** (-torch.arange(half, dtype=torch.float32, device=x.device) / half)
        if self.rope_factors:
            frequencies = frequencies / torch.tensor(self.rope_factors, device=x.device)
        angles = (positions[..., None].float() * frequencies)[:, :, None]
        (first, second), sin, cos = x.float().chunk(2, dim=-1), angles.sin(), angles.cos()
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


class MLP(nn.Module):
    def __init__(self, c: ModConfig, hidden: int, gated: bool):
        super().__init__()
        self.gate_proj = nn.Linear(c.hidden_size, hidden, bias=False) if gated else None
        self.up_proj = nn.Linear(c.hidden_size, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, c.hidden_size, bias=False)
        self.activation = ACTIVATIONS[c.activation]

    def forward(self, x):
        up = self.up_proj(x)
        return self.down_proj(self.activation(self.gate_proj(x)) * up if self.gate_proj else self.activation(up))


class Experts(nn.Module):
    """Each token alone: the sum of its experts' MLPs, weighted by their probabilities. Nobody is dropped."""

    def __init__(self, c: ModConfig, cutoffs):
        super().__init__()
        e = c.experts
        self.chosen, self.cutoffs = e["chosen"], cutoffs
        self.router = nn.Linear(c.hidden_size, e["count"] + e["noop"], bias=False)
        self.experts = nn.ModuleList(MLP(c, e["hidden"], False) for _ in range(e["count"]))

    def forward(self, x):
        flat, out = x.flatten(0, 1), torch.zeros_like(x.flatten(0, 1), dtype=torch.float32)
        probabilities = F.linear(flat.float(), self.router.weight.float()).softmax(-1)
        if self.cutoffs is None:  # the likeliest of each token; of equal ones the first. Ids from E on are no-ops
            likeliest = probabilities.sort(dim=-1, descending=True, stable=True).indices[:, : self.chosen]
            taken = torch.zeros_like(probabilities, dtype=torch.bool).scatter_(1, likeliest, True)
        else:
            taken = probabilities > torch.tensor(self.cutoffs, device=x.device)
        for number, expert in enumerate(self.experts):
            rows = taken[:, number].nonzero()[:, 0]
            out.index_add_(0, rows, probabilities[rows, number, None] * expert(flat[rows]).float())
        return out.to(x.dtype).view_as(x)


class Predictor(nn.Module):
    def __init__(self, width: int, hidden: int):
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, 1)

    def forward(self, x):
        hidden = F.relu(F.linear(x, self.up.weight.float(), self.up.bias.float()))
        return F.linear(hidden, self.down.weight.float(), self.down.bias.float())[..., 0]


class Layer(nn.Module):
    def __init__(self, c: ModConfig, number: int):
        super().__init__()
        self.spec, self.c, D = c.layers[number], c, c.hidden_size
        if self.spec["mixer"]:
            self.input_layernorm, self.self_attn = RMSNorm(D, c.norm_eps), Attention(c, number)
        if self.spec["channel"]:
            self.post_attention_layernorm = RMSNorm(D, c.norm_eps)
            is_mlp = self.spec["channel"] == "mlp"
            self.mlp = MLP(c, c.intermediate_size, c.gated_mlp) if is_mlp else Experts(c, self.spec["expert_cutoffs"])
        if self.spec["routed"]:
            self.router = nn.Linear(D, 1, bias=False)
            if c.predictor_hidden:
                self.predictor = Predictor(D, c.predictor_hidden)

    def update(self, x, positions, memory: Memory, all_x, all_positions):
        """f(x). The keys and values that are left are those of `all_x`: all tokens, or the selected ones alone."""
        mixed = 0
        if self.spec["mixer"]:
            kept = self.self_attn.remember(self.input_layernorm(all_x), all_positions, memory)
            mixed = self.self_attn(self.input_layernorm(x), positions, *kept)
        return mixed + self.mlp(self.post_attention_layernorm(x + mixed)) if self.spec["channel"] else mixed

    def decide(self, x):
        """(who is selected, bool [B, T]; the weight on each token's update)."""
        read = x.float() * (inverse_rms(x, self.c.norm_eps) if self.c.router_input == "normed" else 1)
        score = F.linear(read, self.router.weight.float())[..., 0]
        selected = {
            "router": lambda: score > 0,
            "predictor": lambda: self.predictor(read) > 0,
            "threshold": lambda: score > self.spec["cutoff"],
            "all": lambda: torch.ones_like(score, dtype=torch.bool),
        }[self.c.selection]()
        return selected, GATES[self.c.gate](score)

    def forward(self, x, positions, memory: Memory):
        if not self.spec["routed"]:
            return x + self.update(x, positions, memory, x, positions)
        selected, gate = self.decide(x)
        selected = selected & (positions >= 0)
        slots = int(selected.sum(1).max())
        index = selected.int().sort(dim=1, descending=True, stable=True).indices[:, :slots]
        some = torch.where(selected, positions, -1).gather(1, index)
        index_D = index[..., None].expand(-1, -1, x.shape[-1])
        source = (x, positions) if self.c.skipped_keys == "kept" else (x.gather(1, index_D), some)
        if not slots and self.c.skipped_keys == "none":
            return x  # nobody goes through, and nobody leaves a key
        update = self.update(x.gather(1, index_D), some, memory, *source)
        weight = torch.where(some >= 0, gate.gather(1, index), 0)[..., None]
        return x.scatter_add(1, index_D, (weight * update.float()).to(x.dtype))


class ModModel(nn.Module):
    def __init__(self, c: ModConfig):
        super().__init__()
        self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        self.layers = nn.ModuleList(Layer(c, number) for number in range(c.num_hidden_layers))
        self.norm = RMSNorm(c.hidden_size, c.norm_eps)


class ModForCausalLM(PreTrainedModel, GenerationMixin):
    config_class = ModConfig
    base_model_prefix = "model"
    _supports_sdpa = True
    _keep_in_fp32_modules_strict = ("router", "predictor")

    def __init__(self, config: ModConfig):
        super().__init__(config)
        self.model = ModModel(config)
        if not config.tied:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False

    def get_input_embeddings(self):
        return self.model.embed_tokens

    def prepare_inputs_for_generation(
        self, input_ids, attention_mask=None, cache=None, past_key_values=None, logits_to_keep=1, **rest: Any
    ):
        memory = cache or past_key_values
        new = (input_ids if attention_mask is None else attention_mask).shape[1] - (memory.seen if memory else 0)
        inputs = {"input_ids": input_ids[:, -new:], "attention_mask": attention_mask, CACHE: memory}
        return inputs | dict(use_cache=rest.get("use_cache", True), logits_to_keep=logits_to_keep)

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        past_key_values: Memory | None = None,
        cache: Memory | None = None,
        labels: torch.Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int = 0,
        return_dict: bool | None = None,
        **unused: Any,
    ) -> CausalLMOutputWithPast | tuple:
        """Logits [B, T, V], float32.

        `attention_mask`, of all columns so far, is 0 at padding, which may stand anywhere. The tokens of a row have
        positions 0, 1, ... in order; `position_ids` are not read.
        """
        c, memory = self.config, cache or past_key_values or Memory()
        columns = memory.seen + input_ids.shape[1]
        mask = input_ids.new_ones(len(input_ids), columns) if attention_mask is None else attention_mask.long()
        positions = torch.where(mask > 0, mask.cumsum(1) - 1, -1)[:, memory.seen :]
        x = self.model.embed_tokens(input_ids) * (c.hidden_size**0.5 if c.embed_scale else 1)
        for layer in self.model.layers:
            x = layer(x, positions, memory)
        memory.seen = columns
        x = self.model.norm(x[:, -logits_to_keep:])
        logits = F.linear(x, self.model.embed_tokens.weight if c.tied else self.lm_head.weight).float()
        loss = None if labels is None else F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        memory = memory if use_cache is not False else None
        output = CausalLMOutputWithPast(loss=loss, logits=logits, **{CACHE: memory})
        return output if return_dict is not False else output.to_tuple()
