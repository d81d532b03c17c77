"""The evaluation of a finished run: every held-out loss with the selection and the path that produced it.

The causality gate comes first, and top-k is tried on it to see whether it can fail. The numbers are those that
`Evaluator` gives during training, of causal selections by the uncached forward. In addition one held-out document goes
through all three causal paths (uncached, prefill, step by step), which must agree.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from mod_jax import config as config_lib
from mod_jax import sharding
from mod_jax.config import MeshConfig
from mod_jax.data.batches import Batch
from mod_jax.data.corpus import Corpus, describe_corpus, prepare_corpus
from mod_jax.errors import ConfigError, PathMismatchError, RequestError
from mod_jax.evaluation import budget, tables
from mod_jax.evaluation.evaluator import CAUSALITY_TOLERANCE, Evaluator
from mod_jax.models.blocks import Choice
from mod_jax.sampling.generate import Sampler
from mod_jax.sampling.text import encode_prompt
from mod_jax.trained import TrainedModel, restore, why_not_sampled
from mod_jax.training.losses import token_cross_entropy

PATHS_AGREE = {"float32": 1e-4, "bfloat16": 2e-2}  # nats per token


class HeldOut(NamedTuple):
    """`metrics` as in metrics.jsonl; `lines` for a person."""

    metrics: dict[str, Any]
    lines: list[str]


def evaluate_run(
    run: str | os.PathLike | TrainedModel,
    step: int | None = None,
    capacity: float | None = None,
    *,
    context: int | None = None,
    mesh: MeshConfig | Mapping[str, int] | None = None,
) -> HeldOut:
    """Evaluates a checkpoint of a run on its held-out windows.

    Args:
      run: the workdir, or a restored model.
      step: of the checkpoint; None for the newest. Not with a restored model.
      capacity: shift the cut-offs to this budget first, on every other batch; then the rest alone is evaluated.
      context: tokens per window, in place of `data.seq_len`; at least as many. Not with a restored model.
      mesh: devices to lay the model out over (see `restore`). Not with a restored model, which has its own.

    Raises:
      ConfigError: if the config cannot be evaluated so; before anything is computed.
      CausalityError: if a selection that must be causal is not.
      PathMismatchError: if the cached paths disagree with the uncached one.
    """
    if isinstance(run, TrainedModel):
        if not step is context is mesh is None:
            raise RequestError("step, context and mesh: give them to restore(), the model is restored already")
        model = run
    else:
        model = restore(run, step, context=context, mesh=mesh)
    if capacity is not None:
        budget.check_capacity(model, capacity)
    seq_len = context or model.config.data.seq_len
    corpus = prepare_corpus(model.config.data, model.tokenizer)
    evaluator = make_evaluator(model, corpus, seq_len)
    lines = [
        f"step {model.step}{'' if run is model else f' of {os.fspath(run)}'}, "
        f"config {config_lib.fingerprint(model.config)}",
        describe_corpus(corpus),
    ]
    trained_on = model.metadata.get("corpus_digest", corpus.digest)
    if corpus.digest != trained_on:
        lines.append(f"WARNING: trained on another corpus, digest {trained_on[:12]}")
    capacity_L = None
    if capacity is not None:
        calibration, evaluator.batches = evaluator.batches[::2], evaluator.batches[1::2]
        if not evaluator.batches:
            raise ConfigError("capacity: needs two batches of held-out windows; raise data.eval_windows")
        shifted = budget.calibrate(model, capacity, calibration)
        capacity_L = shifted.capacity_L
        model = dataclasses.replace(model, cutoffs_L=jax.numpy.asarray(shifted.cutoffs_L))
        lines.append(
            f"cut-offs shifted to capacity {capacity} on {len(calibration)} other batches: {shifted.cutoffs_L}"
        )
    windows = sum(int(np.sum(batch["example_ids_B"] >= 0)) for batch in evaluator.batches)
    lines.append(f"{windows} held-out windows of {seq_len} tokens")
    if seq_len > model.trained_positions:
        lines.append(f"positions from {model.trained_positions} on were never trained")

    lines += gate_lines(model, evaluator)
    metrics = evaluator.evaluate(model.weights)
    as_trained = [s for s in model.config.causal_selections if s != "threshold" or capacity is None]
    lines += [*tables.loss_table(metrics), *tables.calibration_table(metrics), *tables.expert_table(metrics)]
    lines += tables.warnings(metrics, as_trained)
    if why_not := why_not_sampled(model.config):
        lines.append(f"no cached path to compare with: {why_not}")
    else:
        for selection in model.config.causal_selections or (None,):
            lines.append(check_paths(model, selection, first_document(evaluator.batches[0], model), capacity_L))
    return HeldOut(metrics | {"step": model.step, "data/digest": corpus.digest[:12]}, lines)


def make_evaluator(model: TrainedModel, corpus: Corpus, seq_len: int | None = None) -> Evaluator:
    """The trainer's own evaluator, where the model lies whatever the run was trained on. `seq_len`: tokens per window.

    Raises:
      ConfigError: the rows of a batch do not divide evenly over the mesh of the model.
    """
    data = dataclasses.replace(model.config.data, seq_len=seq_len or model.config.data.seq_len)
    config = dataclasses.replace(model.config, mesh=MeshConfig(data=1), data=data)
    if model.mesh is None:
        return Evaluator(config, model.model, sharding.make_mesh(config, jax.local_devices()[:1]), corpus)
    sharding.check_rows(config, model.mesh.shape)
    return Evaluator(config, model.model, model.mesh, corpus)


def gate_lines(model: TrainedModel, evaluator: Evaluator) -> list[str]:
    """What the causality gate found: every causal selection passes, and top-k is looked at to see that it does not.

    Raises:
      CausalityError: if a causal selection fails.
    """
    if not model.config.num_routed and not model.config.causal_selections:
        return []
    lines = []
    for selection in model.config.causal_selections:
        moved = evaluator.check_causal(model.weights, selection)
        lines.append(f"causality gate: {selection} passed, a new suffix moved prefix logits by {moved:.1e}")
    moved = evaluator.prefix_movement(model.weights, "topk")
    if moved > CAUSALITY_TOLERANCE[model.config.model.dtype]:
        return [*lines, f"causality gate: topk fails, as it must: {moved:.1e}"]
    if not model.config.num_routed and not model.config.experts_choose:
        why = "when tokens choose their experts, who is dropped depends on what came before alone"
    elif model.config.num_routed and all(block.capacity == 1.0 for block in model.config.blocks):
        why = "at capacity 1 every token is selected, whatever comes later"
    elif model.config.routing.score in ("stochastic", "position"):
        why = f"scores of routing.score = {model.config.routing.score!r} do not depend on the text"
    else:
        why = "these rows do not show that the gate can fail"
    return [*lines, f"causality gate: topk did NOT fail, {moved:.1e}: {why}"]


def first_document(batch: Batch, model: TrainedModel) -> np.ndarray:
    """Tokens of the batch's first row up to its first document boundary."""
    tokens_T = batch["tokens_BT"][0][batch["segment_ids_BT"][0] == 1]
    tokens_T = tokens_T[tokens_T != model.tokenizer.separator_id]
    return tokens_T[: model.config.model.context - 1]


def check_paths(
    model: TrainedModel, selection: str | None, ids_T: np.ndarray, capacity_L: tuple[float, ...] | None = None
) -> str:
    """Log-likelihood of one document by the uncached forward, by prefill, and by decoding step by step.

    Raises:
      PathMismatchError: if they disagree.
    """
    sampler = Sampler(model, selection, cutoffs_L=model.cutoffs_L, capacity_L=capacity_L)
    tokens_1T = encode_prompt(model.tokenizer, ids_T, model.config.model.context, truncate=False)[None]
    tokens_BT = np.repeat(tokens_1T, sampler.row_groups, axis=0)  # one for each part of a mesh

    @jax.jit
    def uncached(params, cutoffs_L):
        output = model.model.run(
            params, tokens_BT, choice=Choice(selection or "topk", cutoffs_L, expert_cutoffs_LE=model.expert_cutoffs_LE)
        )
        return -token_cross_entropy(output.logits_BTV[:, :-1], tokens_BT[:, 1:])[0][0]

    with sharding.within(model.mesh):
        uncached_T = np.asarray(uncached(model.params, model.cutoffs_L))
    paths = {
        "uncached": uncached_T,
        "prefill": sampler.log_likelihoods(list(map(int, ids_T)))[0],
        "decode steps": sampler.log_likelihoods(list(map(int, ids_T)), stepwise=True)[0],
    }
    sums = {name: float(log_p.sum()) for name, log_p in paths.items()}
    line = f"paths agree: {sampler.selection}, {ids_T.size} tokens, nats: " + ", ".join(
        f"{name} {-total:.3f}" for name, total in sums.items()
    )
    worst = max(abs(total - sums["uncached"]) for total in sums.values())
    if not worst <= PATHS_AGREE[model.config.model.dtype] * max(1, ids_T.size):
        raise PathMismatchError(line.replace("paths agree", "paths DISAGREE"))
    return line
