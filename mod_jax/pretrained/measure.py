"""What a dense model can leave out, and which tokens need which block: measured by forward passes, without a gradient.

All of it is done with the *probe*: the same model with every block routed, by selection "threshold" and gate `one`. A
cut-off of -inf makes a block full, +inf leaves it out (and costs nothing), and anything between routes it. All blocks
being of one kind, they run in one scan, so that a program compiles in seconds whatever the depth.

Vocabulary: B rows, T positions, D width, L blocks (all of them: each is routed here).
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mod_jax import routing
from mod_jax.config import Config
from mod_jax.data.batches import Batch
from mod_jax.models.blocks import TOPK, Choice
from mod_jax.models.dispatch import by_mask
from mod_jax.models.layers import rms_normalise
from mod_jax.models.memory import Present, Tokens, make_tokens
from mod_jax.models.model import make_model
from mod_jax.training.losses import next_token_sums

RIDGE = 0.03  # of the mean diagonal of the inputs' covariance
ROUNDING = 1e-12  # variance of 1 - cos that a float32 makes of nothing: there is nothing to predict


class Loss(NamedTuple):
    """Summed over batches: nats, tokens, bytes of text, and tokens that each block computed on."""

    nats: float
    tokens: int
    num_bytes: int
    selected_L: np.ndarray

    @property
    def per_token(self) -> float:
        return self.nats / self.tokens

    @property
    def capacity_L(self) -> np.ndarray:
        return self.selected_L / self.tokens


class Moments(NamedTuple):
    """Sums over tokens of x x', x y, x, y and y y, per block; x is the router's input, y what is to be predicted."""

    xx_LDD: Any
    xy_LD: Any
    x_LD: Any
    y_L: Any
    yy_L: Any
    tokens_L: Any


class Probe:
    """The programs of one dense model. `params` are always those of `make_params`."""

    def __init__(self, config: Config, vocab_size: int):
        """`config`: of the dense model; its `routing.` keys say how its blocks would be routed."""
        model = dataclasses.replace(config.model, layout="R", scan=True, tie_embedding=False)
        routed = dataclasses.replace(config.routing, capacity=1.0, predictor=False, gate="one", aux_weight=0.0)
        self.config = dataclasses.replace(config, model=model, routing=routed)
        self.depth = config.model.depth
        self._model = make_model(self.config, vocab_size)
        self._score = jax.jit(self._score_batch)
        self._score_rows = jax.jit(self._score_by_rows)
        self._cutoffs = jax.jit(self._choose_cutoffs)
        self._sums = jax.jit(self._moments)
        self._without_each = jax.jit(self._leave_each_out)

    def make_params(self, dense: dict[str, Any], router_LD: np.ndarray) -> dict[str, Any]:
        """The probe's parameters: those of the dense model (layout "F"), which are not copied, and routers.

        Of a tied table the transpose is taken once, here: taken in each pass it costs a fifth of the logits.
        """
        block = {"block": dense["units"]["blocks"][0], "router": {"weight_D": jnp.asarray(router_LD, jnp.float32)}}
        embedder = dense["embedder"]
        if "unembed_DV" not in embedder:
            embedder = {**embedder, "unembed_DV": jnp.array(embedder["table_VD"].T)}
        return {**dense, "embedder": embedder, "units": {"blocks": {0: block}}}

    def loss(self, params: dict[str, Any], cutoffs_L: np.ndarray, batches: Sequence[Batch]) -> Loss:
        """The loss at these cut-offs."""
        cutoffs = jnp.asarray(cutoffs_L, jnp.float32)
        return self._summed(batches, lambda *batch: self._score(params, cutoffs, *batch))

    def topk_loss(self, params: dict[str, Any], capacity_L: np.ndarray, batches: Sequence[Batch]) -> Loss:
        """The loss where each block takes its capacity of every row, as top-k does."""
        capacity = jnp.asarray(capacity_L, jnp.float32)
        return self._summed(batches, lambda *batch: self._score_rows(params, capacity, *batch))

    def _summed(self, batches: Sequence[Batch], score) -> Loss:
        nats, tokens, num_bytes, selected_L = 0.0, 0, 0, np.zeros(self.depth)
        for batch in batches:
            batch_nats, batch_selected_L = score(*_inputs(batch), batch["targets_BT"])
            valid_BT = batch["segment_ids_BT"] > 0
            nats, tokens = nats + float(batch_nats), tokens + int(valid_BT.sum())
            num_bytes += int(batch["target_bytes_BT"][valid_BT].sum()) if "target_bytes_BT" in batch else 0
            selected_L += np.asarray(batch_selected_L)
        return Loss(nats, tokens, num_bytes, selected_L)

    def leave_out(self, params: dict[str, Any], blocks: Sequence[int], batches: Sequence[Batch]) -> Loss:
        """The loss without these blocks; with none, that of the dense model."""
        cutoffs_L = np.full(self.depth, -np.inf)
        cutoffs_L[list(blocks)] = np.inf
        return self.loss(params, cutoffs_L, batches)

    def leave_one_out(self, params: dict[str, Any], batch: Batch) -> np.ndarray:
        """[L]: how many nats per token each block is worth alone, the loss without it minus that of the whole model.

        One pass, in which each block in turn is skipped by a copy of the stream that goes on from there.
        """
        whole, without_L = self._without_each(params, *_inputs(batch), batch["targets_BT"])
        return (np.asarray(without_L, np.float64) - float(whole)) / int((batch["segment_ids_BT"] > 0).sum())

    def cutoffs(self, params: dict[str, Any], capacity_L: np.ndarray, batch: Batch) -> np.ndarray:
        """The cut-offs at which each block selects its capacity of the tokens of `batch`, those before it doing so too.

        One pass, block after block. With capacity 1 a block selects all.
        """
        return np.asarray(self._cutoffs(params, jnp.asarray(capacity_L, jnp.float32), *_inputs(batch)))

    def moments(self, params: dict[str, Any], batch: Batch) -> Moments:
        """Of the router's input and of how far each block turns a token, 1 - cos(x, x + f(x)), in the dense model.

        The first token of each document is left out: attention leans on it whatever it is.
        """
        return jax.tree.map(lambda a: np.asarray(a, np.float64), self._sums(params, *_inputs(batch)))

    # On the device.

    def _score_batch(self, params, cutoffs_L, tokens_BT, positions_BT, segments_BT, targets_BT):
        decoder, x_BTD, tokens = self._begin(params, tokens_BT, positions_BT, segments_BT)

        def step(x_BTD, inputs):
            group, cutoff = inputs
            return jax.lax.cond(
                cutoff == jnp.inf,
                lambda: (x_BTD, jnp.zeros((), jnp.float32)),
                lambda: _route(group, x_BTD, tokens, cutoff),
            )

        x_BTD, selected_L = jax.lax.scan(step, x_BTD, (decoder.units, cutoffs_L))
        return self._nats(decoder, x_BTD, segments_BT, targets_BT), selected_L

    def _score_by_rows(self, params, capacity_L, tokens_BT, positions_BT, segments_BT, targets_BT):
        decoder, x_BTD, tokens = self._begin(params, tokens_BT, positions_BT, segments_BT)
        valid_BT = segments_BT > 0

        def step(x_BTD, inputs):
            group, capacity = inputs
            scores_BT, _ = group.blocks[0].score(x_BTD, tokens)
            cutoff_B = jax.vmap(_cutoff_of_row, (0, 0, None))(scores_BT, valid_BT, capacity)
            return _route(group, x_BTD, tokens, cutoff_B)

        x_BTD, selected_L = jax.lax.scan(step, x_BTD, (decoder.units, capacity_L))
        return self._nats(decoder, x_BTD, segments_BT, targets_BT), selected_L

    def _leave_each_out(self, params, tokens_BT, positions_BT, segments_BT, targets_BT):
        decoder, x_BTD, tokens = self._begin(params, tokens_BT, positions_BT, segments_BT)

        def run(depth, x_BTD):
            (routed,) = jax.tree.map(
                lambda w: jax.lax.dynamic_index_in_dim(w, depth, keepdims=False), decoder.units
            ).blocks
            return x_BTD + routed.block.update(x_BTD, tokens, Present(), TOPK)[0]

        def step(x_BTD, depth):
            without_BTD = jax.lax.fori_loop(depth + 1, self.depth, run, x_BTD)
            return run(depth, x_BTD), self._nats(decoder, without_BTD, segments_BT, targets_BT)

        x_BTD, without_L = jax.lax.scan(step, x_BTD, jnp.arange(self.depth))
        return self._nats(decoder, x_BTD, segments_BT, targets_BT), without_L

    def _nats(self, decoder, x_BTD, segments_BT, targets_BT) -> jax.Array:
        weights_BT = (segments_BT > 0).astype(jnp.float32)
        weight_DV, chunk = decoder.embedder.output_weight(), self.config.train.loss_chunk
        return next_token_sums(0.0, chunk, decoder.final_norm(x_BTD), weight_DV, targets_BT, weights_BT)[1]

    def _begin(self, params, tokens_BT, positions_BT, segments_BT):
        decoder = self._model.merge(params)
        tokens = make_tokens(positions_BT, segments_BT, *decoder.rotary)
        return decoder, decoder.embedder.embed(tokens_BT, decoder.dtype), tokens

    def _choose_cutoffs(self, params, capacity_L, tokens_BT, positions_BT, segments_BT):
        decoder, x_BTD, tokens = self._begin(params, tokens_BT, positions_BT, segments_BT)
        valid_BT = segments_BT > 0

        def step(x_BTD, inputs):
            group, capacity = inputs
            scores_BT, _ = group.blocks[0].score(x_BTD, tokens)
            cutoff = _cutoff_at(scores_BT.ravel(), valid_BT.ravel(), capacity)
            return _route(group, x_BTD, tokens, cutoff)[0], cutoff

        return jax.lax.scan(step, x_BTD, (decoder.units, capacity_L))[1]

    def _moments(self, params, tokens_BT, positions_BT, segments_BT) -> Moments:
        decoder, x_BTD, tokens = self._begin(params, tokens_BT, positions_BT, segments_BT)
        weight_M1 = ((segments_BT > 0) & (positions_BT > 0)).reshape(-1, 1).astype(jnp.float32)
        dot = functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)

        def step(x_BTD, group):
            (routed,) = group.blocks
            update_BTD, _, _ = routed.block.update(x_BTD, tokens, Present(), TOPK)
            before_MD, after_MD = (a.astype(jnp.float32).reshape(-1, a.shape[-1]) for a in (x_BTD, x_BTD + update_BTD))
            input_MD = rms_normalise(before_MD, routed.norm_eps) if routed.input_kind == "normed" else before_MD
            turned_M1 = 1.0 - jnp.sum(_direction(before_MD) * _direction(after_MD), axis=-1, keepdims=True)
            x_MD, y_M1 = weight_M1 * input_MD, weight_M1 * turned_M1
            sums = dot(x_MD.T, x_MD), dot(x_MD.T, y_M1)[:, 0], x_MD.sum(0), y_M1.sum(), jnp.square(y_M1).sum()
            return x_BTD + update_BTD, Moments(*sums, weight_M1.sum())

        return jax.lax.scan(step, x_BTD, decoder.units)[1]


def _route(group, x_BTD: jax.Array, tokens: Tokens, cutoff: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(the stream behind a group's one block at this cut-off, or one per row; how many tokens it computed on)."""
    (block,) = group.blocks
    x_BTD, _, record = block(x_BTD, tokens, Present(), Choice("threshold", cutoff), by_mask)
    return x_BTD, jnp.sum(record.routing.selected_BT, dtype=jnp.float32)


def _inputs(batch: Batch) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return batch["tokens_BT"], batch["positions_BT"], batch["segment_ids_BT"]


def _direction(x_MD: jax.Array) -> jax.Array:
    return x_MD / jnp.maximum(jnp.linalg.norm(x_MD, axis=-1, keepdims=True), 1e-30)


def _cutoff_at(scores_M: jax.Array, valid_M: jax.Array, capacity: jax.Array) -> jax.Array:
    """The cut-off that the nearest possible number to `capacity` of the valid scores exceed."""
    kept = jnp.round(capacity * jnp.sum(valid_M)).astype(jnp.int32)
    return _cutoff_keeping(kept, scores_M, valid_M)


def _cutoff_of_row(scores_T: jax.Array, valid_T: jax.Array, capacity: jax.Array) -> jax.Array:
    """The cut-off that as many of a row's scores exceed as top-k takes of it (see `routing.tokens_kept`)."""
    kept = jnp.floor(jnp.round(scores_T.shape[0] * capacity, 4) + 0.5).astype(jnp.int32)
    return _cutoff_keeping(jnp.maximum(kept, 1), scores_T, valid_T)


def _cutoff_keeping(kept: jax.Array, scores_M: jax.Array, valid_M: jax.Array) -> jax.Array:
    ordered_M = jnp.sort(jnp.where(valid_M, scores_M, -jnp.inf))
    below = scores_M.shape[0] - kept
    low, high = ordered_M[jnp.maximum(below - 1, 0)], ordered_M[jnp.minimum(below, scores_M.shape[0] - 1)]
    middle = jnp.where(low + (high - low) / 2 < high, low + (high - low) / 2, low)
    return jnp.where(kept >= jnp.sum(valid_M), -jnp.inf, jnp.where(kept == 0, ordered_M[-1], middle))


# On the host.


def fit_routers(moments: Moments) -> tuple[np.ndarray, np.ndarray]:
    """(router weights [L, D], R2 [L]): ridge regression of y on x, scaled to scores of standard deviation 1.

    A router has no bias: what the mean of y needs is left to the cut-off.
    """
    weights, fits = [], []
    for xx_DD, xy_D, x_D, y, yy, tokens in zip(*moments, strict=True):
        mean_D = x_D / tokens
        covariance_DD = xx_DD / tokens - np.outer(mean_D, mean_D)
        with_y_D, variance = xy_D / tokens - mean_D * y / tokens, yy / tokens - (y / tokens) ** 2
        shrunk_DD = covariance_DD + RIDGE * np.trace(covariance_DD) / len(x_D) * np.eye(len(x_D))
        weight_D = np.linalg.solve(shrunk_DD, with_y_D)
        spread = weight_D @ covariance_DD @ weight_D
        left = variance - 2 * weight_D @ with_y_D + spread
        fits.append(1 - left / variance if variance > ROUNDING else 0.0)
        weights.append(weight_D / np.sqrt(spread) if variance > ROUNDING else np.zeros_like(weight_D))
    return np.array(weights, np.float32), np.array(fits)


def cheapest(worth_L: np.ndarray, count: int) -> list[int]:
    """The `count` blocks that are worth least, cheapest first; never the first and the last block."""
    inner = np.argsort(worth_L[1:-1], kind="stable") + 1
    return [int(depth) for depth in inner[:count]]


def capacity_of(depth: int, routed: Sequence[int], capacity: float) -> np.ndarray:
    """[L]: `capacity` of the routed blocks, 1 of the others."""
    capacity_L = np.ones(depth)
    capacity_L[list(routed)] = capacity
    return capacity_L


def tokens_kept(seq_len: int, capacity: float) -> float:
    """The fraction that top-k keeps of a row."""
    return routing.tokens_kept(seq_len, capacity) / seq_len
