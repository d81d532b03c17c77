"""FLOPs, and parameters, counted from the structure of the model, with every convention an explicit switch.

A multiply-add is 2 FLOPs. Counted: every matrix product, attention logits and values, router and predictor. Not
counted: norms, softmax, rotary angles, activations, gather and scatter, the embedding look-up, the optimizer
(together about 1.5 % of what XLA counts). Vocabulary: T row length, C slots of a routed block, D width, F MLP hidden,
N query and K key/value heads of size H, V vocabulary, P predictor hidden.

Conventions, by default the paper's: attention is counted in full, T * T, and a routed block costs what C tokens cost,
C * C. Where bypassed tokens keep their keys, it is C * T, and those keys and values are counted too. The backward pass
costs twice the forward pass, except below a stop-gradient.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
from jax.sharding import PartitionSpec

from mod_jax import routing
from mod_jax.config import Config
from mod_jax.layout import BlockSpec, unrouted
from mod_jax.models import moe
from mod_jax.models.blocks import part, predictor_hidden, router_width
from mod_jax.models.model import Model


@dataclasses.dataclass(frozen=True)
class Flops:
    """FLOPs of one sequence, or of one token, by part."""

    linear: float  # products with the weights of mixers and channels
    attention: float  # logits and weighted values
    router: float
    predictor: float
    unembed: float

    @property
    def total(self) -> float:
        return self.linear + self.attention + self.router + self.predictor + self.unembed


class Parameters(NamedTuple):
    """How many there are, and how many of them one token is expected to pass (see `count_parameters`)."""

    total: int
    active: int

    def __str__(self) -> str:
        return f"{self.total:,} parameters" + ("" if self.active == self.total else f", {self.active:,} active")


def count_parameters(config: Config, model: Model) -> Parameters:
    """Parameters of a model, all and *active* ones. Low-rank additions, which are summed up with them, do not count.

    Of experts as many are active as a token is expected to pass MLPs in training (`moe.expected_mlps`); everything else
    is active, routed blocks too, whatever their capacity. So a model without experts has as many of both.
    """
    of_experts = total = 0
    leaves, specs = (
        jax.tree.leaves(model.plain.abstract_params),
        jax.tree.leaves(model.plain.logical_specs, is_leaf=lambda spec: isinstance(spec, PartitionSpec)),
    )
    for leaf, spec in zip(leaves, specs, strict=True):
        total += leaf.size
        of_experts += leaf.size if "experts" in spec else 0
    passed = moe.expected_mlps(config) / config.experts.count
    return Parameters(total, total - round((1 - passed) * of_experts))


def block_flops(config: Config, spec: BlockSpec, num_tokens: float, causal_half: bool = False) -> tuple[float, float]:
    """(linear, attention) FLOPs of what a block does with `num_tokens` tokens, forward; of all tokens, never of C.

    Of a full block with F = 4 D and full heads this is 24 * n * D^2 and 4 * n^2 * D.
    """
    pairs = num_tokens * (num_tokens + 1) / 2 if causal_half else num_tokens**2
    return part_flops(config, spec, num_tokens, pairs)


def part_flops(config: Config, spec: BlockSpec, num_tokens: float, num_pairs: float) -> tuple[float, float]:
    """The sum over mixer and channel of (products with weights, what is done for each pair of tokens)."""
    places = [place for place in (spec.mixer, spec.channel) if place is not None]
    parts = [part(place).flops(config, num_tokens, num_pairs) for place in places]
    return sum(linear for linear, _ in parts), sum(of_pairs for _, of_pairs in parts)


def routed_flops(
    config: Config, spec: BlockSpec, num_tokens: float, seq_len: int, causal_half: bool = False
) -> tuple[float, float]:
    """(linear, attention) FLOPs of a routed block that computes on `num_tokens` of `seq_len` tokens, forward.

    With `routing.skipped_keys = "kept"` the others leave their items too, and each selected token sees all.
    """
    if config.routing.skipped_keys == "none":
        return block_flops(config, spec, num_tokens, causal_half)
    pairs = num_tokens * ((seq_len + 1) / 2 if causal_half else seq_len)
    linear, of_pairs = part_flops(config, spec, num_tokens, pairs)
    return linear + item_flops(config, spec, seq_len - num_tokens), of_pairs


def item_flops(config: Config, spec: BlockSpec, num_tokens: float) -> float:
    """FLOPs of the items that so many tokens leave in a block, forward."""
    return 0.0 if spec.mixer is None else part(spec.mixer).item_flops(config, num_tokens)


def head_flops(config: Config, num_tokens: float) -> tuple[float, float]:
    """(router, predictor) FLOPs of one routed block that decides about so many tokens, forward."""
    D = config.model.width
    predictor = 2 * num_tokens * predictor_hidden(D) * (D + 1) if config.routing.predictor else 0
    return 2 * num_tokens * router_width(config), predictor


def forward_flops(
    config: Config,
    vocab_size: int,
    seq_len: int | None = None,
    *,
    causal_half: bool = False,
    unembed: bool = True,
    predictor: bool = True,
    realised_capacity: tuple[float, ...] | None = None,
    realised_mlps: tuple[float, ...] | None = None,
) -> Flops:
    """Forward FLOPs of one row of `seq_len` tokens (default `data.seq_len`).

    Args:
      causal_half: count only the pairs that the causal mask allows, n (n + 1) / 2 in place of n^2.
      unembed: include the product that gives the logits.
      predictor: include the predictors.
      realised_capacity: fraction of tokens that each routed block really computed on, under a causal selection;
        default: the static count that top-k keeps.
      realised_mlps: MLPs that a token of each block with experts really passed on average; default: what is expected of
        training (`moe.expected_mlps`).
    """
    T = seq_len or config.data.seq_len
    D = config.model.width
    if realised_capacity is not None and len(realised_capacity) != config.num_routed:
        raise ValueError(f"realised_capacity has {len(realised_capacity)} entries for {config.num_routed} routed")
    realised = iter(realised_capacity) if realised_capacity is not None else None
    mlps = iter(realised_mlps) if realised_mlps is not None else None
    linear = attention = router = predicted = 0.0
    for block in config.blocks:
        tokens = T
        block_linear, block_attention = block_flops(config, block, T, causal_half)
        if block.routed:
            tokens = routing.tokens_kept(T, block.capacity) if realised is None else next(realised) * T
            block_linear, block_attention = routed_flops(config, block, tokens, T, causal_half)
            block_router, block_predictor = head_flops(config, T)
            router, predicted = router + block_router, predicted + block_predictor * predictor
        if block.has_experts and mlps is not None:
            block_linear += (next(mlps) - moe.expected_mlps(config)) * moe.mlp_flops(config, tokens)
        linear, attention = linear + block_linear, attention + block_attention
    return Flops(linear, attention, router, predicted, 2 * T * D * vocab_size if unembed else 0.0)


def selection_flops(
    config: Config,
    vocab_size: int,
    selection: str,
    capacity_L: Sequence[float] | None = None,
    mlps_L: Sequence[float] | None = None,
) -> Flops:
    """Forward FLOPs of one row whose tokens `selection` chose. Only "predictor" needs the predictors.

    Args:
      vocab_size: rows of the embedding table.
      capacity_L: fraction of tokens that each routed block really computed on; None: the count that top-k keeps.
      mlps_L: MLPs that a token really passed, per block with experts; None: what is expected of training.
    """
    realised, mlps = (None if values is None else tuple(map(float, values)) for values in (capacity_L, mlps_L))
    with_predictor = selection == "predictor"
    return forward_flops(config, vocab_size, predictor=with_predictor, realised_capacity=realised, realised_mlps=mlps)


def dense_flops(config: Config, vocab_size: int) -> Flops:
    """Forward FLOPs of one row of the same model without routing and experts: every block is full, with one MLP."""
    layout = "".join(map(unrouted, config.model.layout)).replace("E", "F")
    dense = dataclasses.replace(config, model=dataclasses.replace(config.model, layout=layout))
    return forward_flops(dense, vocab_size)


def train_flops(config: Config, vocab_size: int, **switches) -> float:
    """Training FLOPs of one row: 3 x forward; 2 x for the predictor, whose input takes no gradient."""
    forward = forward_flops(config, vocab_size, **switches)
    return 3 * forward.total - forward.predictor


def decode_flops(config: Config, vocab_size: int, slots: tuple[int, ...]) -> Flops:
    """FLOPs of decoding one token whose blocks, by depth, attend to `slots` cached tokens each.

    A routed block counts by its capacity; its router and predictor, like the logits, by every token.
    """
    linear = attention = router = predicted = 0.0
    for block, num_slots in zip(config.blocks, slots, strict=True):
        block_linear, block_attention = part_flops(config, block, 1, num_slots)
        linear += block.capacity * block_linear
        attention += block.capacity * block_attention
        if block.routed and config.routing.skipped_keys == "kept":
            linear += (1 - block.capacity) * item_flops(config, block, 1)
        if block.routed:
            block_router, block_predictor = head_flops(config, 1)
            router, predicted = router + block_router, predicted + block_predictor
    return Flops(linear, attention, router, predicted, 2 * config.model.width * vocab_size)


def train_steps(config: Config, vocab_size: int) -> int:
    """Length of the run in optimizer steps, from whichever of steps, tokens and flops is given (nearest step, >= 1)."""
    train = config.train
    if train.steps:
        return train.steps
    tokens_per_step = train.batch_size * config.data.seq_len
    if train.tokens:
        return max(1, math.floor(train.tokens / tokens_per_step + 0.5))
    return max(1, math.floor(train.flops / (train.batch_size * train_flops(config, vocab_size)) + 0.5))
