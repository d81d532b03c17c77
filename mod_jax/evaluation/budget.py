"""A serving-time compute budget: other cut-offs for a trained model, without training.

Under selection "threshold" a routed block computes on the tokens whose score exceeds its cut-off. Shifting the cut-offs
sets how many those are. That is a way down rather than up: tokens far below the trained capacity's cut-off carry
weights that no training ever used, and the loss rises with them (`experiments/budget_curve.py` draws it). Vocabulary:
L routed blocks in order of depth.
"""

from __future__ import annotations

import numbers
import os
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np

from mod_jax import sharding
from mod_jax.data.batches import Batch, eval_batches
from mod_jax.data.corpus import Corpus, prepare_corpus
from mod_jax.errors import ConfigError, RequestError
from mod_jax.models.blocks import Choice, RoutingRecord
from mod_jax.sampling.generate import Sampler
from mod_jax.trained import TrainedModel, as_model, why_not_sampled


class Budget(NamedTuple):
    """Cut-offs, and the fraction of the calibration text that they select, per routed block."""

    cutoffs_L: np.ndarray
    capacity_L: tuple[float, ...]


def calibrate(
    model: TrainedModel | str | os.PathLike, capacity: float | Sequence[float], batches: Sequence[Batch]
) -> Budget:
    """Finds the cut-offs at which each routed block selects `capacity` of the tokens of `batches`.

    Block by block, first to last: what a block selects changes what later blocks read, and nothing before it.

    Args:
      capacity: fraction in (0, 1]; one number, or one per routed block.
      batches: held-out text (see `held_out_batches`), best of other windows than those of the evaluation.

    Raises:
      ConfigError: if the model cannot be run by selection "threshold", or if the rows of a batch do not divide evenly
        over its mesh.
    """
    model = as_model(model)
    capacities = check_capacity(model, capacity)
    if model.mesh is not None:
        sharding.check_rows(model.config, model.mesh.shape)

    @jax.jit
    def route(params, cutoffs_L, tokens_BT, positions_BT, segments_BT) -> RoutingRecord:
        return model.model.run(params, tokens_BT, positions_BT, segments_BT, choice(cutoffs_L)).routing

    def choice(cutoffs_L) -> Choice:
        return Choice("threshold", cutoffs_L, expert_cutoffs_LE=model.expert_cutoffs_LE)

    cutoffs_L = np.array(model.cutoffs_L)
    realised = []
    for index, wanted in enumerate(capacities):
        scores = []
        for batch in batches:
            given = (batch[name] for name in ("tokens_BT", "positions_BT", "segment_ids_BT"))
            with sharding.within(model.mesh):
                record = route(model.params, cutoffs_L, *given)
            scores.append(np.asarray(record.router_logits_BT[index])[batch["segment_ids_BT"] > 0])
        scores = np.sort(np.concatenate(scores))
        cutoffs_L[index] = cutoff_between(scores, wanted)
        realised.append(float(np.mean(scores > cutoffs_L[index])))
    return Budget(cutoffs_L, tuple(realised))


def budgeted_sampler(
    model: TrainedModel | str | os.PathLike, selection: str | None, capacity: float | Sequence[float] | None, **options
) -> Sampler:
    """The sampler of a model, its cut-offs shifted to `capacity` on the run's held-out text unless that is None.

    Args:
      selection: a causal one that was trained; None for the best. With a capacity, None or "threshold".
      **options: of the `Sampler`.

    Raises:
      ConfigError: this model cannot be sampled so.
    """
    if capacity is None:
        return Sampler(model, selection, **options)
    check_selection(selection, capacity)
    model = as_model(model)
    check_capacity(model, capacity)
    shifted = calibrate(model, capacity, held_out_batches(model))
    return Sampler(model, "threshold", cutoffs_L=shifted.cutoffs_L, capacity_L=shifted.capacity_L, **options)


def check_selection(selection: str | None, capacity: float | Sequence[float] | None) -> None:
    """Refuses a capacity for another selection than that which has cut-offs."""
    if capacity is not None and selection not in (None, "threshold"):
        raise RequestError(f"capacity shifts the cut-offs of selection 'threshold', not of {selection!r}")


def check_capacity(model: TrainedModel, capacity: float | Sequence[float]) -> list[float]:
    """The capacity of each routed block.

    Raises:
      ConfigError: if the model cannot be run by selection "threshold".
      RequestError: if the capacity is out of range, or of another number of blocks.
    """
    config, num_routed = model.config, model.config.num_routed
    if not num_routed or why_not_sampled(config):  # cut-offs of experts are not those of a routed block
        why = why_not_sampled(config) or "no block of this model is routed"
        raise ConfigError(f"capacity = {capacity}: this model has no cut-offs to shift ({why})")
    one = isinstance(capacity, str) or not isinstance(capacity, Sequence | np.ndarray)
    capacities = [capacity] * num_routed if one else list(capacity)
    if len(capacities) != num_routed or not all(isinstance(c, numbers.Real) and 0 < c <= 1 for c in capacities):
        raise RequestError(
            f"capacity = {capacity!r}: must be in (0, 1]; one number, or {num_routed}, one per routed block"
        )
    return capacities


def cutoff_between(scores: np.ndarray, capacity: float) -> np.float32:
    """The cut-off that the nearest possible number to `capacity` * len of the increasing `scores` exceed."""
    below = scores.size - round(capacity * scores.size)
    if below == 0:
        return np.nextafter(np.float32(scores[0]), np.float32(-np.inf))
    if below == scores.size:
        return np.float32(scores[-1])
    low, high = np.float32(scores[below - 1]), np.float32(scores[below])
    middle = low + (high - low) / np.float32(2)
    return middle if middle < high else low


def held_out_batches(model: TrainedModel | str | os.PathLike, corpus: Corpus | None = None) -> list[Batch]:
    """The run's own held-out windows. `corpus`: the prepared corpus, if it is at hand."""
    model = as_model(model)
    config = model.config
    corpus = corpus or prepare_corpus(config.data, model.tokenizer)
    return eval_batches(
        corpus,
        seq_len=config.data.seq_len,
        num_windows=config.data.eval_windows,
        batch_size=config.train.batch_size // config.train.accumulation,
    )
