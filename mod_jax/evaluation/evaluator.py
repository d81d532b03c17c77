"""Held-out evaluation: the loss under top-k, the loss under each causal selection, and what separates them.

A bare "eval loss" does not exist: top-k looks at the future, so its loss is not a language model's loss until a causal
selection reproduces it. Before a causal loss is reported, a *causality gate* changes the suffix of real rows and
checks that no logit of the prefix moves. Vocabulary: B rows, T positions, V vocabulary, L routed blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from mod_jax.analysis.expert_stats import ExpertPositions, load_statistics
from mod_jax.analysis.report import Seen
from mod_jax.analysis.routing_stats import RoutingStats, block_name
from mod_jax.config import Config
from mod_jax.data.batches import MODEL_INPUTS, Batch, bits_per_byte, eval_batches
from mod_jax.data.corpus import Corpus
from mod_jax.errors import CausalityError, NumericsError
from mod_jax.models import flops
from mod_jax.models.blocks import decide
from mod_jax.models.model import Model, Weights
from mod_jax.sharding import local_rows, put_batch, replicated
from mod_jax.training.losses import next_token_sums
from mod_jax.training.step import ExpertSums, expert_metrics, expert_sums, routing_keys

# Rounding moves float32 logits by about 1e-6 between two runs on other tokens; a leak moves them by 1e-2.
CAUSALITY_TOLERANCE = {"float32": 1e-3, "bfloat16": 5e-2}

# Held-out noise of stochastic routing is the same at every evaluation, and never a training step's.
NOISE_STEP = 2**31 - 1


class _Pass(NamedTuple):
    """Of one selection over all windows: nats per token; the fraction of tokens selected, and the norm of the update of
    selected tokens over that of their residual, per routed block; and what blocks with experts did."""

    loss: float
    bits_per_byte: float
    capacity_L: np.ndarray
    update_ratio_L: np.ndarray
    experts: ExpertSums | None


class Evaluator:
    """Evaluates the weights of one run on fixed held-out windows; compiles each selection's program once."""

    def __init__(self, config: Config, model: Model, mesh: Mesh, corpus: Corpus):
        self._config, self._model, self._mesh = config, model, mesh
        self._tokenizer = corpus.tokenizer
        self._batch_size = config.train.batch_size // config.train.accumulation
        self.batches = eval_batches(
            corpus,
            seq_len=config.data.seq_len,
            num_windows=config.data.eval_windows,
            batch_size=self._batch_size,
        )
        everywhere = replicated(mesh)  # so that every process can read what comes out
        self._score = jax.jit(self._score_batch, static_argnames="selection", out_shardings=everywhere)
        self._logits = jax.jit(self._prefix_logits, static_argnames="selection", out_shardings=everywhere)
        self._selections_proven_causal: set[str] = set()

    def evaluate(self, weights: Weights) -> dict[str, float]:
        """Returns `eval/` metrics, `routing/` metrics per routed block, and `experts/` metrics per block with experts.

        Every run has a top-k loss; what else there is depends on the causal selections that it was trained for.

        `eval/topk_loss` and `eval/causal_loss/<selection>` are nats per token (`eval/loss` of a model without routed
        blocks is its top-k loss: no choice is made). `eval/gap/<selection>` is causal minus top-k.

        Raises:
          CausalityError: if the causality gate finds a leak.
        """
        depths, selections = self._config.routed_depths, self._config.causal_selections
        stats = {s: RoutingStats(depths) for s in ("topk", *selections)}
        places = ExpertPositions(self._config.expert_depths, self._config.experts.count)
        topk = self._loss(weights, "topk", stats, places)
        metrics = {"eval/topk_loss": topk.loss, "eval/topk_bits_per_byte": topk.bits_per_byte}
        metrics |= self._spent("topk", self._selection_flops("topk", None, topk)) | self._of_experts("topk", topk)
        metrics |= self._spent("dense", flops.dense_flops(self._config, self._model.vocab_size))
        metrics |= places.metrics()
        metrics |= stats["topk"].metrics("topk") | _by_block(depths, "update_ratio/topk", topk.update_ratio_L)
        for selection in selections:
            self.check_causal(weights, selection)
            causal = self._loss(weights, selection)
            metrics |= {
                f"eval/causal_loss/{selection}": causal.loss,
                f"eval/causal_bits_per_byte/{selection}": causal.bits_per_byte,
                f"eval/gap/{selection}": causal.loss - topk.loss,
            }
            if depths:
                metrics[f"eval/realised_capacity/{selection}"] = float(np.mean(causal.capacity_L))
            metrics |= self._spent(selection, self._selection_flops(selection, causal.capacity_L, causal))
            metrics |= self._of_experts(selection, causal)
            # Agreement with top-k is judged along top-k's own run; what was really computed on, along the causal one.
            metrics |= stats[selection].metrics(selection)
            metrics |= _by_block(depths, f"realised_capacity/{selection}", causal.capacity_L)
        return metrics

    def check_causal(self, weights: Weights, selection: str) -> float:
        """The causality gate: how far prefix logits move when the suffix is replaced, on one batch of real rows.

        Raises:
          CausalityError: if they move by more than rounding.
          NumericsError: if they are not finite.
        """
        if selection in self._selections_proven_causal:
            return 0.0
        moved = self.prefix_movement(weights, selection)
        if not np.isfinite(moved):
            raise NumericsError(f"selection {selection!r}: the logits of the first held-out batch are not finite")
        if not moved <= CAUSALITY_TOLERANCE[self._config.model.dtype]:
            raise CausalityError(f"selection {selection!r}: replacing the suffix moved prefix logits by {moved:.3g}")
        self._selections_proven_causal.add(selection)
        return moved

    def prefix_movement(self, weights: Weights, selection: str) -> float:
        """Largest change of a logit in the first half of a row when the second half is replaced."""
        batch = self.batches[0]
        tokens_BT = batch["tokens_BT"]
        half = tokens_BT.shape[1] // 2
        # A document boundary in the suffix changes nothing before it, so the segments can stay as they are.
        changed_BT = tokens_BT.copy()
        changed_BT[:, half:] = (
            changed_BT[:, half:] + 1 + np.arange(half, tokens_BT.shape[1])
        ) % self._tokenizer.vocab_size
        first, second = (
            self._logits(weights, self._put(dict(batch, tokens_BT=tokens)), selection=selection)
            for tokens in (tokens_BT, changed_BT)
        )
        return float(jnp.max(jnp.abs(first - second)))

    def records(self, weights: Weights) -> Seen:
        """What routing did in the first held-out batch, under each selection."""
        config, batch = self._config, self.batches[0]
        ids = np.unique(batch["tokens_BT"])
        texts = {int(i): self._tokenizer.decode([int(i)]).decode("utf-8", "replace") for i in ids}
        routing, experts = {}, {}
        if config.num_routed or config.expert_depths:
            for selection in ("topk", *config.causal_selections):
                _, record, _, done = self._score(weights, self._put(batch), 0, selection=selection)
                if record is not None:
                    routing[selection] = jax.device_get(record)
                if done is not None:
                    experts[selection] = jax.device_get(done.of_tokens)
        return Seen(batch["tokens_BT"], batch["segment_ids_BT"] > 0, texts, routing, experts)

    def _loss(
        self,
        weights: Weights,
        selection: str,
        stats: dict[str, RoutingStats] | None = None,
        places: ExpertPositions | None = None,
    ) -> _Pass:
        """One pass over all windows. Under top-k, fills the statistics of each selection, and those of experts."""
        nats = tokens = num_bytes = 0
        selected_L, update_L, residual_L = np.zeros((3, self._config.num_routed))
        experts = None
        for index, batch in enumerate(self.batches):
            batch_nats, record, decided, done = self._score(weights, self._put(batch), index, selection=selection)
            valid_BT = batch["segment_ids_BT"] > 0
            if done is not None:
                sums = jax.tree.map(np.float64, jax.device_get(expert_sums(done)))
                experts = sums if experts is None else jax.tree.map(np.add, experts, sums)
                if places is not None:
                    places.update(*jax.device_get(done.of_tokens), valid_BT)
            nats += float(batch_nats)
            tokens += int(valid_BT.sum())
            num_bytes += int(batch["target_bytes_BT"][valid_BT].sum())
            if record is None:
                continue
            selected_LBT, *squares = jax.device_get(
                (record.selected_BT, record.update_square_sum, record.residual_square_sum)
            )
            selected_L += np.sum(selected_LBT & valid_BT, axis=(1, 2))
            update_L, residual_L = update_L + squares[0], residual_L + squares[1]
            if stats:
                record, decided = jax.device_get((record, decided))
                for name, sums in stats.items():
                    chosen = decided.get(name, record.selected_BT)
                    sums.update(record.router_logits_BT, chosen, record.selected_BT, valid_BT, record.gate_BT)
        return _Pass(
            nats / tokens,
            bits_per_byte(nats, num_bytes),
            selected_L / tokens,
            np.sqrt(update_L / np.maximum(residual_L, 1e-30)),
            experts,
        )

    def _selection_flops(self, selection: str, capacity_L: np.ndarray | None, made: _Pass) -> flops.Flops:
        mlps_L = None
        if made.experts is not None:
            claims_L = np.sum(made.experts.load_LN[:, : self._config.experts.count], axis=1) - made.experts.dropped_L
            mlps_L = claims_L / np.maximum(made.experts.tokens_L, 1)
        return flops.selection_flops(self._config, self._model.vocab_size, selection, capacity_L, mlps_L)

    def _of_experts(self, selection: str, made: _Pass) -> dict[str, float]:
        if made.experts is None:
            return {}
        num_experts = self._config.experts.count
        measured = expert_metrics(made.experts, num_experts)
        load_LN = np.asarray(measured.pop("experts/load"))
        metrics = {}
        for i, depth in enumerate(self._config.expert_depths):
            values = {name.removeprefix("experts/"): float(values_L[i]) for name, values_L in measured.items()}
            values |= load_statistics(load_LN[i], num_experts)
            values |= {f"load/{n}": float(load) for n, load in enumerate(load_LN[i])}
            metrics |= {f"experts/{block_name(depth)}/{name}/{selection}": value for name, value in values.items()}
        return metrics

    def _spent(self, name: str, forward: flops.Flops) -> dict[str, float]:
        return {f"eval/forward_flops_per_token/{name}": forward.total / self._config.data.seq_len}

    def _put(self, batch: Batch) -> dict[str, jax.Array]:
        rows = local_rows(self._mesh, self._batch_size)
        return put_batch(self._mesh, {name: batch[name][rows] for name in MODEL_INPUTS}, self._batch_size)

    def _features(self, weights: Weights, batch: dict[str, jax.Array], index: jax.Array | int, selection: str):
        decoder = self._model.merge(weights.params)
        keys_B = routing_keys(self._config, NOISE_STEP - index, self._batch_size)
        inputs = batch["tokens_BT"], batch["positions_BT"], batch["segment_ids_BT"]
        x_BTD, record = decoder.features(*inputs, weights.choice(selection, keys_B))
        return decoder, x_BTD, record

    def _score_batch(self, weights: Weights, batch: dict[str, jax.Array], index: jax.Array, *, selection: str):
        """(summed nats; routing record; what each causal selection would decide along the way; what experts did)."""
        decoder, x_BTD, (record, experts) = self._features(weights, batch, index, selection)
        weights_BT = (batch["segment_ids_BT"] > 0).astype(jnp.float32)
        weight_DV, chunk = decoder.embedder.output_weight(), self._config.train.loss_chunk
        _, nats = next_token_sums(0.0, chunk, x_BTD, weight_DV, batch["targets_BT"], weights_BT)
        decided = {
            name: decide(name, record.router_logits_BT, record.predictor_logits_BT, weights.cutoffs_L[:, None, None])
            for name in (self._config.causal_selections if record is not None else ())
        }
        return nats, record, decided, experts

    def _prefix_logits(self, weights: Weights, batch: dict[str, jax.Array], *, selection: str) -> jax.Array:
        half = batch["tokens_BT"].shape[1] // 2
        decoder, x_BTD, _ = self._features(weights, batch, 0, selection)
        return decoder.embedder.logits(x_BTD[:, :half])


def _by_block(depths: Sequence[int], name: str, values_L: np.ndarray) -> dict[str, float]:
    return {f"routing/{block_name(depth)}/{name}": float(value) for depth, value in zip(depths, values_L, strict=True)}
