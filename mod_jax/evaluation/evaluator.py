"""Held-out evaluation: the loss under top-k, the loss under each causal selection, and what separates them.

A bare "eval loss" does not exist: top-k looks at the future, so its loss is not a language model's loss until a causal
selection reproduces it. Before a causal loss is reported, a *causality gate* changes the suffix of real rows and
checks that no logit of the prefix moves. Vocabulary: B rows, T positions, V vocabulary, L routed blocks.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from mod_jax.analysis.routing_stats import RoutingStats, block_name
from mod_jax.config import Config
from mod_jax.data.batches import Batch, bits_per_byte, eval_batches
from mod_jax.data.corpus import Corpus
from mod_jax.errors import CausalityError
from mod_jax.models import flops
from mod_jax.models.blocks import RoutingRecord, decide
from mod_jax.models.model import Model
from mod_jax.sharding import local_rows, put_batch, replicated
from mod_jax.training.losses import next_token_sums
from mod_jax.training.step import MODEL_INPUTS, TrainState, routing_keys

# Rounding moves float32 logits by about 1e-6 between two runs on other tokens; a leak moves them by 1e-2.
CAUSALITY_TOLERANCE = {"float32": 1e-3, "bfloat16": 5e-2}

# Held-out noise of stochastic routing is the same at every evaluation, and never a training step's.
NOISE_STEP = 2**31 - 1


class Evaluator:
    """Evaluates train states of one run on fixed held-out windows; compiles each selection's program once."""

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

    def evaluate(self, state: TrainState) -> dict[str, float]:
        """Returns `eval/` metrics, and `routing/` metrics per routed block.

        `eval/topk_loss` and `eval/causal_loss/<selection>` are nats per token (`eval/loss` of a model without routed
        blocks is its top-k loss: no choice is made). `eval/gap/<selection>` is causal minus top-k.

        Raises:
          CausalityError: if the causality gate finds a leak.
        """
        metrics = {}
        stats = {s: RoutingStats(self._config.routed_depths) for s in self._config.causal_selections}
        loss, bits, _ = self._loss(state, "topk", stats)
        metrics["eval/topk_loss"], metrics["eval/topk_bits_per_byte"] = loss, bits
        for selection, block_stats in stats.items():
            self.check_causal(state, selection)
            causal_loss, causal_bits, capacity_L = self._loss(state, selection)
            forward = flops.forward_flops(self._config, self._tokenizer.vocab_size, realised_capacity=tuple(capacity_L))
            metrics |= {
                f"eval/causal_loss/{selection}": causal_loss,
                f"eval/causal_bits_per_byte/{selection}": causal_bits,
                f"eval/gap/{selection}": causal_loss - loss,
                f"eval/realised_capacity/{selection}": float(np.mean(capacity_L)),
                f"eval/forward_flops_per_token/{selection}": forward.total / self._config.data.seq_len,
            }
            # Agreement with top-k is judged along top-k's own run; what was really computed on, along the causal one.
            metrics |= block_stats.metrics(selection)
            metrics |= {
                f"routing/{block_name(depth)}/realised_capacity/{selection}": float(capacity)
                for depth, capacity in zip(self._config.routed_depths, capacity_L, strict=True)
            }
        return metrics

    def check_causal(self, state: TrainState, selection: str) -> float:
        """The causality gate: how far prefix logits move when the suffix is replaced, on one batch of real rows.

        Raises:
          CausalityError: if they move by more than rounding.
        """
        if selection in self._selections_proven_causal:
            return 0.0
        moved = self.prefix_movement(state, selection)
        if not moved <= CAUSALITY_TOLERANCE[self._config.model.dtype]:  # NaN fails too
            raise CausalityError(f"selection {selection!r}: replacing the suffix moved prefix logits by {moved:.3g}")
        self._selections_proven_causal.add(selection)
        return moved

    def prefix_movement(self, state: TrainState, selection: str) -> float:
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
            self._logits(state, self._put(dict(batch, tokens_BT=tokens)), selection=selection)
            for tokens in (tokens_BT, changed_BT)
        )
        return float(jnp.max(jnp.abs(first - second)))

    def records(self, state: TrainState) -> tuple[list[str], dict[str, RoutingRecord]]:
        """The first held-out row as text pieces, and its batch's routing under each selection (NumPy, [L, B, T])."""
        if not self._config.num_routed:
            return [], {}
        selections = ("topk", *self._config.causal_selections)
        batch = self._put(self.batches[0])
        records = {s: jax.device_get(self._score(state, batch, 0, selection=s)[1]) for s in selections}
        pieces = [self._tokenizer.decode([i]).decode("utf-8", "replace") for i in self.batches[0]["tokens_BT"][0]]
        return pieces, records

    def _loss(self, state: TrainState, selection: str, stats: dict[str, RoutingStats] | None = None):
        """(nats per token, bits per byte, fraction of tokens selected per routed block) over all windows.

        Under top-k, fills each causal selection's statistics.
        """
        nats = tokens = num_bytes = 0
        selected_L = np.zeros(self._config.num_routed)
        for index, batch in enumerate(self.batches):
            batch_nats, record, decided = self._score(state, self._put(batch), index, selection=selection)
            valid_BT = batch["segment_ids_BT"] > 0
            nats += float(batch_nats)
            tokens += int(valid_BT.sum())
            num_bytes += int(batch["target_bytes_BT"][valid_BT].sum())
            if record is not None:
                selected_L += np.sum(jax.device_get(record.selected_BT) & valid_BT, axis=(1, 2))
            if stats:
                record, decided = jax.device_get((record, decided))
                for name, sums in stats.items():
                    sums.update(record.router_logits_BT, decided[name], record.selected_BT, valid_BT, record.gate_BT)
        return nats / tokens, bits_per_byte(nats, num_bytes), selected_L / tokens

    def _put(self, batch: Batch) -> dict[str, jax.Array]:
        rows = local_rows(self._mesh, self._batch_size)
        return put_batch(self._mesh, {name: batch[name][rows] for name in MODEL_INPUTS}, self._batch_size)

    def _features(self, state: TrainState, batch: dict[str, jax.Array], index: jax.Array | int, selection: str):
        decoder = self._model.merge(state.params)
        x_BTD, record = decoder.features(
            batch["tokens_BT"],
            batch["positions_BT"],
            batch["segment_ids_BT"],
            selection=selection,
            cutoffs_L=state.cutoffs_L,
            row_keys_B=routing_keys(self._config, NOISE_STEP - index, self._batch_size),
        )
        return decoder, x_BTD, record

    def _score_batch(self, state: TrainState, batch: dict[str, jax.Array], index: jax.Array, *, selection: str):
        """(summed nats, routing record, what each causal selection would decide along the way)."""
        decoder, x_BTD, record = self._features(state, batch, index, selection)
        weights_BT = (batch["segment_ids_BT"] > 0).astype(jnp.float32)
        weight_DV, chunk = decoder.embedder.output_weight(), self._config.train.loss_chunk
        _, nats = next_token_sums(0.0, chunk, x_BTD, weight_DV, batch["targets_BT"], weights_BT)
        decided = {
            name: decide(name, record.router_logits_BT, record.predictor_logits_BT, state.cutoffs_L[:, None, None])
            for name in self._config.causal_selections
        }
        return nats, record, decided

    def _prefix_logits(self, state: TrainState, batch: dict[str, jax.Array], *, selection: str) -> jax.Array:
        half = batch["tokens_BT"].shape[1] // 2
        decoder, x_BTD, _ = self._features(state, batch, 0, selection)
        return decoder.embedder.logits(x_BTD[:, :half])
