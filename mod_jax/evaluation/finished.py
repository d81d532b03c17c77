"""The evaluation of a finished run: every held-out loss with the selection and the path that produced it.

The causality gate comes first, and is shown to fail under top-k. The numbers are those of `training.evaluate`; in
addition one held-out row goes through all three causal paths (uncached, prefill, step by step), which must agree.
"""

import dataclasses
import os
from typing import Any, NamedTuple

import jax
import numpy as np

from mod_jax import config as config_lib
from mod_jax import sharding
from mod_jax.analysis.routing_stats import block_name
from mod_jax.config import MeshConfig
from mod_jax.data.batches import Batch
from mod_jax.data.corpus import Corpus, describe_corpus, prepare_corpus
from mod_jax.errors import ConfigError, PathMismatchError
from mod_jax.evaluation import budget
from mod_jax.evaluation.evaluator import Evaluator
from mod_jax.models import flops
from mod_jax.sampling.generate import Sampler
from mod_jax.trained import TrainedModel, restore
from mod_jax.training.losses import token_cross_entropy
from mod_jax.training.step import TrainState

PATHS_AGREE = {"float32": 1e-4, "bfloat16": 2e-2}  # nats per token


class HeldOut(NamedTuple):
    """`metrics` as in metrics.jsonl; `lines` for a person."""

    metrics: dict[str, Any]
    lines: list[str]


def evaluate_run(workdir: str | os.PathLike, step: int | None = None, capacity: float | None = None) -> HeldOut:
    """Evaluates a checkpoint of a run on its held-out windows, on one device.

    Args:
      step: of the checkpoint; None for the newest.
      capacity: shift the cut-offs to this budget first, on every other batch; then the rest alone is evaluated.

    Raises:
      CausalityError: if a selection that must be causal is not.
      PathMismatchError: if the cached paths disagree with the uncached one.
    """
    model = restore(workdir, step)
    corpus = prepare_corpus(model.config.data, model.tokenizer)
    evaluator = make_evaluator(model, corpus)
    lines = [
        f"step {model.step} of {os.fspath(workdir)}, config {config_lib.fingerprint(model.config)}",
        describe_corpus(corpus),
    ]
    if corpus.digest != model.metadata["corpus_digest"]:
        lines.append(f"WARNING: trained on another corpus, digest {model.metadata['corpus_digest'][:12]}")
    capacity_L = None
    if capacity is not None:
        calibration, evaluator.batches = evaluator.batches[::2], evaluator.batches[1::2]
        if not evaluator.batches:
            raise ConfigError("capacity: needs two batches of held-out windows; raise data.eval_windows")
        shifted = budget.calibrate(model, capacity, calibration)
        model, capacity_L = (
            dataclasses.replace(model, cutoffs_L=jax.numpy.asarray(shifted.cutoffs_L)),
            shifted.capacity_L,
        )
        lines.append(
            f"cut-offs shifted to capacity {capacity:g} on {len(calibration)} other batches: {shifted.cutoffs_L}"
        )
    state = as_state(model)
    windows = sum(int(np.sum(batch["example_ids_B"] >= 0)) for batch in evaluator.batches)
    lines.append(f"{windows} held-out windows of {model.config.data.seq_len} tokens")

    selections = model.config.causal_selections
    for selection in selections:
        moved = evaluator.check_causal(state, selection)
        lines.append(f"causality gate: {selection} passed, a new suffix moved prefix logits by {moved:.1e}")
    if selections:
        lines.append(f"causality gate: topk fails, as it must: {evaluator.prefix_movement(state, 'topk'):.1e}")
    metrics = evaluator.evaluate(state)
    lines += loss_table(model, metrics) + calibration_table(model, metrics)
    for selection in selections or (None,):
        lines.append(check_paths(model, selection, first_document(evaluator.batches[0], model), capacity_L))
    return HeldOut(metrics | {"step": model.step, "data/digest": corpus.digest[:12]}, lines)


def make_evaluator(model: TrainedModel, corpus: Corpus) -> Evaluator:
    """The trainer's own evaluator, on one device whatever the run was trained on."""
    config = dataclasses.replace(model.config, mesh=MeshConfig(1, 1, 1))
    return Evaluator(config, model.model, sharding.make_mesh(config, jax.local_devices()[:1]), corpus)


def as_state(model: TrainedModel) -> TrainState:
    """What the evaluator reads of a train state."""
    return TrainState(np.int32(model.step), model.params, (), model.cutoffs_L, np.int32(0))


def loss_table(model: TrainedModel, metrics: dict[str, float]) -> list[str]:
    """One line per selection: its path, losses, and the FLOPs that it really spends."""
    config, vocab_size = model.config, model.config.model.vocab_size or model.tokenizer.vocab_size
    dense = dataclasses.replace(config, model=dataclasses.replace(config.model, layout="F"))
    dense_flops = flops.forward_flops(dense, vocab_size).total
    depths = [block_name(depth) for depth in config.routed_depths]

    def line(selection, path, loss, gap, bits, capacity_L):
        spent = flops.forward_flops(
            config, vocab_size, predictor=selection == "predictor", realised_capacity=tuple(capacity_L)
        ).total
        routed = f"{np.mean(capacity_L):.1%}" if len(capacity_L) else "-"
        cost = f"{spent / config.data.seq_len:.4g} ({spent / dense_flops:.1%} of dense)"
        return f"{selection:<11}{path:<44}{loss:>8.4f}{gap:>9}{bits:>11.4f}{routed:>8}  {cost}"

    path = "training forward, chooses by the future" if config.num_routed else "forward, nothing to choose"
    kept_L = [metrics[f"routing/{name}/topk_fraction"] for name in depths]
    lines = [f"{'selection':<11}{'path':<44}{'loss':>8}{'gap':>9}{'bits/byte':>11}{'routed':>8}  FLOPs/token"]
    lines.append(line("topk", path, metrics["eval/topk_loss"], "", metrics["eval/topk_bits_per_byte"], kept_L))
    for selection in config.causal_selections:
        loss, gap, bits = (
            metrics[f"eval/{name}/{selection}"] for name in ("causal_loss", "gap", "causal_bits_per_byte")
        )
        realised_L = [metrics[f"routing/{name}/realised_capacity/{selection}"] for name in depths]
        lines.append(line(selection, "causal forward, uncached, by masks", loss, f"{gap:+.4f}", bits, realised_L))
    return lines


def calibration_table(model: TrainedModel, metrics: dict[str, float]) -> list[str]:
    """One line per routed block and causal selection: how its decisions agree with top-k membership."""
    names = ("accuracy", "precision", "recall", "f1", "realised_capacity")
    lines = [f"{'block':<9}{'selection':<11}{'base rate':>10}" + "".join(f"{n.split('_')[0]:>11}" for n in names)]
    for depth in model.config.routed_depths:
        group = f"routing/{block_name(depth)}"
        for selection in model.config.causal_selections:
            numbers = "".join(f"{metrics[f'{group}/{name}/{selection}']:>11.3f}" for name in names)
            lines.append(
                f"{block_name(depth):<9}{selection:<11}{metrics[f'{group}/base_rate_accuracy']:>10.3f}{numbers}"
            )
    return lines if len(lines) > 1 else []


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
    tokens_1T = np.concatenate([[model.tokenizer.separator_id], ids_T]).astype(np.int32)[None]

    @jax.jit
    def uncached(params, cutoffs_L):
        output = model.model.run(params, tokens_1T, selection=selection or "topk", cutoffs_L=cutoffs_L)
        return -token_cross_entropy(output.logits_BTV[:, :-1], tokens_1T[:, 1:])[0][0]

    paths = {
        "uncached": np.asarray(uncached(model.params, model.cutoffs_L)),
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
