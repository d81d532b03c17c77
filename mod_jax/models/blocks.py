"""The two kinds of block, full and routed, and the two small heads that route.

Vocabulary: B rows, T positions, C slots (tokens that a routed block computes on), D width. A *score* is the router's
raw float32 number per token; the *gate* is the weight multiplied on the block's update; *selected* tokens go through
the block, the others are *bypassed* and leave it bit for bit as they came. `selection` says who chooses: "topk"
(training; looks at the future), or causally each token alone: "router" (score > 0), "predictor" (its logit > 0),
"threshold" (score > a cut-off averaged over training).
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from mod_jax import routing
from mod_jax.config import Config, ModelConfig
from mod_jax.models.attention import Attention
from mod_jax.models.layers import MLP, RMSNorm, Rotation, inverse_rms, normal, rotation
from mod_jax.sharding import param

CAUSAL_SELECTIONS = ("router", "predictor", "threshold")
SELECTIONS = ("topk", *CAUSAL_SELECTIONS)

# Saved by every remat policy, so that the backward pass cannot choose other tokens.
ROUTING_INDICES = "routing_indices"


class Stream(NamedTuple):
    """What stays with each token through the stack: its original position, its segment (0 = padding), its rotation."""

    positions_BT: jax.Array
    segments_BT: jax.Array
    rotation: Rotation


def make_stream(positions_BT: jax.Array, segments_BT: jax.Array, head_dim: int, rope_base: float) -> Stream:
    """The stream of int32 [B, T] positions and segments, with the rotation that every block applies."""
    return Stream(positions_BT, segments_BT, rotation(positions_BT, head_dim, rope_base))


class RoutingRecord(NamedTuple):
    """What one routed block did; under a stack of blocks every field gains a leading axis L of routed blocks.

    `cutoff_B` is the C-th largest score of each row, infinite where all of it is padding. The two sums of squares, over
    selected tokens, give the ratio of update to residual norm that shows a router feeding itself or a block that died.
    """

    router_logits_BT: jax.Array
    predictor_logits_BT: jax.Array | None
    selected_BT: jax.Array
    gate_BT: jax.Array
    cutoff_B: jax.Array
    update_square_sum: jax.Array
    residual_square_sum: jax.Array


class FullBlock(nnx.Module):
    """Pre-norm attention and MLP. `update` is f in x + f(x): attn(norm(x)), plus the MLP of the norm of x plus that."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.attention_norm = RMSNorm(config.width, rngs)
        self.attention = Attention(config, rngs)
        self.mlp_norm = RMSNorm(config.width, rngs)
        self.mlp = MLP(config.width, config.mlp_dim, config.activation, config.depth, rngs)

    def update(self, x_BTD: jax.Array, stream: Stream) -> jax.Array:
        """The block's total residual update, without x itself. [B, T, D]."""
        return self.with_mlp(x_BTD, self.attention(self.attention_norm(x_BTD), *stream))

    def with_mlp(self, x_BTD: jax.Array, attended_BTD: jax.Array) -> jax.Array:
        """The block's total update, once what attention adds to x is known."""
        return attended_BTD + self.mlp(self.mlp_norm(x_BTD + attended_BTD))

    def __call__(self, x_BTD: jax.Array, stream: Stream) -> jax.Array:
        return x_BTD + self.update(x_BTD, stream)


class Router(nnx.Module):
    """Gives each token one raw float32 score: a linear map without bias (the paper's "Routing implementation").

    With `routing.score` "position" the map reads sinusoids of the position in place of the token; "frozen" stops its
    gradient; "stochastic" has no parameters and draws Gaussian noise, fresh per row, block and step.

    To add a kind of score: name it in `RoutingConfig.score`, compute it here, say in `RoutedBlock` whether the input's
    scale applies and what the gate is, and count it in `models/flops.py`.
    """

    def __init__(self, config: Config, rngs: nnx.Rngs):
        self.kind = config.routing.score
        if self.kind != "stochastic":
            D = config.model.width
            self.weight_D = param(rngs, (D,), (None,), normal(config.routing.router_init_scale * D**-0.5))

    def __call__(self, input_BTD: jax.Array, positions_BT: jax.Array, keys_B: jax.Array | None) -> jax.Array:
        """float32 scores [B, T] from the router's float32 input; `keys_B` only for "stochastic"."""
        if self.kind == "stochastic":
            if keys_B is None:
                raise ValueError("routing.score = 'stochastic' needs row_keys_B, one random key per row")
            return jax.vmap(lambda key: jax.random.normal(key, input_BTD.shape[1:2]))(keys_B)
        weight_D = self.weight_D[...]
        if self.kind == "frozen":
            weight_D = jax.lax.stop_gradient(weight_D)
        if self.kind == "position":
            input_BTD = _sinusoids(positions_BT, weight_D.shape[0])
        B, T, D = input_BTD.shape
        scores_M = jnp.dot(input_BTD.reshape(B * T, D), weight_D, precision=jax.lax.Precision.HIGHEST)
        return scores_M.reshape(B, T)


def predictor_hidden(width: int) -> int:
    """P, the hidden size of a predictor."""
    return max(32, width // 4)


class Predictor(nnx.Module):
    """A small float32 MLP that predicts top-k membership from a gradient-stopped input (the paper's "Sampling")."""

    def __init__(self, width: int, capacity: float, rngs: nnx.Rngs):
        hidden = predictor_hidden(width)
        self.up_DP = param(rngs, (width, hidden), ("embed", None), normal(width**-0.5))
        self.up_bias_P = param(rngs, (hidden,), (None,), jax.nn.initializers.zeros)
        self.down_P = param(rngs, (hidden,), (None,), normal(0.1 * hidden**-0.5))
        # Starts at the base rate, so that no step is spent on learning how many tokens are kept.
        kept = min(max(capacity, 0.01), 0.99)
        self.down_bias_1 = param(rngs, (1,), (None,), jax.nn.initializers.constant(math.log(kept / (1 - kept))))

    def __call__(self, input_BTD: jax.Array, scale_BT: jax.Array) -> jax.Array:
        """Logits [B, T]; > 0 predicts membership. Reads scale_BT * input_BTD."""
        B, T, D = input_BTD.shape
        input_MD, scale_M1 = jax.lax.stop_gradient((input_BTD.reshape(B * T, D), scale_BT.reshape(B * T, 1)))
        hidden_MP = jax.nn.relu(scale_M1 * (input_MD @ self.up_DP[...]) + self.up_bias_P[...][None])
        return (hidden_MP @ self.down_P[...] + self.down_bias_1[...]).reshape(B, T)


class RoutedBlock(nnx.Module):
    """x_i <- x_i + gate_i * f_i(x_S) for the selected tokens S; x_i unchanged, bit for bit, for the others.

    S goes through attention and MLP together; who is not in S has no key or value here (the paper's eq. 1).
    """

    def __init__(self, config: Config, capacity: float, rngs: nnx.Rngs):
        self.block = FullBlock(config.model, rngs)
        self.router = Router(config, rngs)
        self.predictor = Predictor(config.model.width, capacity, rngs) if config.routing.predictor else None
        self.capacity = capacity
        self.gate_kind = "one" if config.routing.score in ("stochastic", "frozen") else config.routing.gate
        self.input_kind = config.routing.router_input
        self.topk_per = config.routing.topk_per

    def __call__(
        self,
        x_BTD: jax.Array,
        stream: Stream,
        *,
        selection: str = "topk",
        cutoff: jax.Array | float = 0.0,
        keys_B: jax.Array | None = None,
    ) -> tuple[jax.Array, RoutingRecord]:
        """Routes, computes, and returns the new residual stream with the record of what was done.

        Args:
          selection: one of `SELECTIONS`.
          cutoff: scalar, read by selection "threshold" only.
          keys_B: random keys, one per row, read by stochastic scores only.
        """
        gather, scatter_add = jax.vmap(routing.gather_tokens), jax.vmap(routing.scatter_add)
        scores_BT, predictor_logits_BT = self.score(x_BTD, stream, keys_B)
        idx_BC, allowed_BT = self.choose(selection, scores_BT, predictor_logits_BT, stream, cutoff)
        live_BC = gather(allowed_BT, idx_BC)

        # An empty slot (padding, or a token that was not chosen) gets segment 0: nobody attends to it.
        x_BCD = gather(x_BTD, idx_BC)
        stream_BC = jax.tree.map(lambda a: gather(a, idx_BC), stream)
        stream_BC = stream_BC._replace(segments_BT=jnp.where(live_BC, stream_BC.segments_BT, 0))
        update_BCD = self.block.update(x_BCD, stream_BC)
        gate_BT = self.gate(scores_BT, stream)
        gated_BCD = gather(gate_BT, idx_BC)[..., None] * update_BCD.astype(jnp.float32)
        # x + -0.0 is x bit for bit; x + 0.0 would turn -0.0 into 0.0.
        gated_BCD = jnp.where(live_BC[..., None], gated_BCD, -0.0).astype(x_BTD.dtype)

        selected_BT = jax.vmap(routing.topk_targets, (0, None))(idx_BC, x_BTD.shape[1]) & allowed_BT
        live_x_BCD = jnp.where(live_BC[..., None], x_BCD.astype(jnp.float32), 0.0)
        measured = dict(
            gate_BT=gate_BT,
            cutoff_B=self.cutoff(scores_BT, selected_BT, stream.segments_BT > 0),
            update_square_sum=jnp.sum(jnp.square(gated_BCD.astype(jnp.float32))),
            residual_square_sum=jnp.sum(jnp.square(live_x_BCD)),
        )
        record = RoutingRecord(
            router_logits_BT=scores_BT,
            predictor_logits_BT=predictor_logits_BT,
            selected_BT=selected_BT,
            **jax.lax.stop_gradient(measured),
        )
        return scatter_add(x_BTD, idx_BC, gated_BCD), record

    def score(
        self, x_BTD: jax.Array, stream: Stream, keys_B: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array | None]:
        """Router scores and predictor logits, float32 [B, T], from the block's input."""
        # A linear map commutes with each token's scale, so normalised tokens are never written to memory: for a small
        # C that would cost a fifth of the block.
        input_BTD = x_BTD.astype(jnp.float32)
        scale_BT = inverse_rms(input_BTD) if self.input_kind == "normed" else jnp.ones(x_BTD.shape[:2], jnp.float32)
        scores_BT = self.router(input_BTD, stream.positions_BT, keys_B)
        if self.router.kind in ("learned", "frozen"):
            scores_BT = scores_BT * scale_BT
        return scores_BT, None if self.predictor is None else self.predictor(input_BTD, scale_BT)

    def gate(self, scores_BT: jax.Array, stream: Stream) -> jax.Array:
        """Weight on each token's update, float32 [B, T]."""
        if self.gate_kind == "one":
            return jnp.ones_like(scores_BT)
        if self.gate_kind == "sigmoid":
            return jax.nn.sigmoid(scores_BT)
        if self.gate_kind == "tanh":
            return 1.0 + jnp.tanh(scores_BT)
        if self.gate_kind == "softmax":  # over the row: not causal, for ablation only
            # A finite lowest score: a row of nothing but padding would be NaN, and so would its gradient.
            scores_BT = jnp.where(stream.segments_BT > 0, scores_BT, jnp.finfo(jnp.float32).min)
            return jax.nn.softmax(scores_BT, axis=-1) * scores_BT.shape[-1]
        return scores_BT

    def cutoff(self, scores_BT: jax.Array, selected_BT: jax.Array, valid_BT: jax.Array) -> jax.Array:
        """The cut-off that keeps as many tokens of each row: its C-th largest score. [B].

        Chosen over the row it is the smallest selected score. Chosen by document that one may lie far below: each
        document has its own smallest one.
        """
        if self.topk_per == "document":
            T = scores_BT.shape[1]
            select = jax.vmap(routing.select_topk, in_axes=(0, None, 0))
            idx_BC = select(scores_BT, routing.tokens_kept(T, self.capacity), valid_BT)
            selected_BT = jax.vmap(routing.topk_targets, (0, None))(idx_BC, T) & valid_BT
        return jnp.min(jnp.where(selected_BT, scores_BT, jnp.inf), axis=1)

    def choose(
        self,
        selection: str,
        scores_BT: jax.Array,
        predictor_logits_BT: jax.Array | None,
        stream: Stream,
        cutoff: jax.Array | float,
    ) -> tuple[jax.Array, jax.Array]:
        """The positions that get a slot, idx_BC, and which positions may be updated, bool [B, T]."""
        B, T = scores_BT.shape
        valid_BT = stream.segments_BT > 0
        if selection != "topk":
            if self.gate_kind == "softmax":
                raise ValueError("routing.gate = 'softmax' weighs a token by later ones: no causal selection exists")
            every_position_BT = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32)[None], (B, T))
            return every_position_BT, valid_BT & decide(selection, scores_BT, predictor_logits_BT, cutoff)
        if self.topk_per == "document":
            scores_BT = -jax.vmap(routing.share_within_document)(scores_BT, stream.segments_BT)
        select = jax.vmap(routing.select_topk, in_axes=(0, None, 0))
        idx_BC = select(scores_BT, routing.tokens_kept(T, self.capacity), valid_BT)
        return checkpoint_name(idx_BC, ROUTING_INDICES), valid_BT


def decide(
    selection: str, scores: jax.Array, predictor_logits: jax.Array | None, cutoff: jax.Array | float
) -> jax.Array:
    """What a causal selection decides about each token alone: bool, in the shape of `scores`."""
    if selection == "router":
        return routing.select_causal(scores, 0.0)
    if selection == "threshold":
        return routing.select_causal(scores, cutoff)
    if selection != "predictor":
        raise ValueError(f"selection = {selection!r}: must be one of {', '.join(SELECTIONS)}")
    if predictor_logits is None:
        raise ValueError("selection = 'predictor': this model has no predictor (routing.predictor = False)")
    return routing.select_causal(predictor_logits, 0.0)


def _sinusoids(positions_BT: jax.Array, width: int) -> jax.Array:
    """Sinusoids of each position at `width` wavelengths, float32 [B, T, width]."""
    half = (width + 1) // 2
    frequencies = 10_000.0 ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = positions_BT[..., None].astype(jnp.float32) * frequencies[None, None]
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)[..., :width]
