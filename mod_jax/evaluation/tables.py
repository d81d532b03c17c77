"""An evaluation for a person: one line for the log, tables for the end of a run, and what is out of order in it.

Everything here is read from the metrics that `Evaluator.evaluate` returns, as they also stand in metrics.jsonl and in
checkpoints. So an evaluation reads the same wherever it is shown.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from mod_jax.analysis.expert_stats import DEAD_LOAD, LOAD_STATISTICS
from mod_jax.analysis.routing_stats import FAR_FROM_CAPACITY, HEALTHY_UPDATE_RATIO, capacities, capacity_error

Metrics = Mapping[str, Any]


class HeldOutLoss(NamedTuple):
    """One held-out loss and the selection that produced it, "topk" or a causal one.

    Attributes:
      loss: nats per token.
      gap: loss minus top-k loss; None for top-k itself.
      routed: fraction of tokens selected, the mean over routed blocks; None without routed blocks.
      flops: forward FLOPs per token; None in the rows of versions that did not count them.
      of_dense: the same, as a share of what the dense model of this depth takes.
    """

    selection: str
    loss: float
    bits_per_byte: float
    gap: float | None
    routed: float | None
    flops: float | None
    of_dense: float | None


def held_out_losses(metrics: Metrics) -> list[HeldOutLoss]:
    """The losses of an evaluation, top-k first."""
    kept = [value for key, value in metrics.items() if re.fullmatch(r"routing/block\d+/topk_fraction", key)]
    names = ("topk_loss", "topk_bits_per_byte")
    routed = sum(kept) / len(kept) if kept else None
    found = [_held_out_loss(metrics, "topk", *(metrics[f"eval/{name}"] for name in names), None, routed)]
    for selection in causal_selections(metrics):
        names = ("causal_loss", "causal_bits_per_byte", "gap", "realised_capacity")
        found.append(_held_out_loss(metrics, selection, *(metrics.get(f"eval/{name}/{selection}") for name in names)))
    return found


def causal_loss(metrics: Metrics) -> HeldOutLoss | None:
    """The causal loss to compare models by: of the selection that sampling takes by default.

    Where there is nothing to select, the top-k loss, which is causal there. None of a model without a causal selection.
    """
    losses = {loss.selection: loss for loss in held_out_losses(metrics)}
    for selection in ("predictor", "all", "router", "threshold"):
        if selection in losses:
            return losses[selection]
    return losses["topk"] if losses["topk"].routed is None else None


def _held_out_loss(metrics: Metrics, selection: str, loss, bits_per_byte, gap, routed) -> HeldOutLoss:
    spent, dense = (metrics.get(f"eval/forward_flops_per_token/{name}") for name in (selection, "dense"))
    of_dense = None if spent is None or dense is None else spent / dense
    return HeldOutLoss(selection, loss, bits_per_byte, gap, routed, spent, of_dense)


def causal_selections(metrics: Metrics) -> list[str]:
    """The causal selections that were evaluated."""
    return [key.split("/")[-1] for key in metrics if key.startswith("eval/causal_loss/")]


def log_line(metrics: Metrics) -> str:
    """Held-out losses on one line, each with the selection that produced it."""
    parts = [f"held out: top-k loss {metrics['eval/topk_loss']:.4f}"]
    for x in held_out_losses(metrics)[1:]:
        routed = "" if x.routed is None else f", routed {x.routed:.1%}"
        parts.append(f"{x.selection} {x.loss:.4f} (gap {x.gap:+.4f}{routed})")
    return ", ".join(parts)


def loss_table(metrics: Metrics) -> list[str]:
    """One line per selection: its losses, what it routed, and the FLOPs that it really spent."""
    found = held_out_losses(metrics)
    header = f"{'held out under':<16}{'nats/token':>11}{'bits/byte':>11}{'minus top-k':>13}{'routed':>9}"
    lines = [header + f"{'FLOPs/token':>13}{'of dense':>10}"]
    for x in found:
        name = x.selection.replace("topk", "top-k" if len(found) > 1 or x.routed is not None else "no routing")
        cells = (x.gap, "+.4f", 13), (x.routed, ".1%", 9), (x.flops, ".4g", 13), (x.of_dense, ".1%", 10)
        rest = "".join(f"{'' if value is None else format(value, form):>{width}}" for value, form, width in cells)
        lines.append(f"{name:<16}{x.loss:>11.4f}{x.bits_per_byte:>11.4f}{rest}".rstrip())
    return lines


def calibration_table(metrics: Metrics) -> list[str]:
    """One line per routed block and causal selection: how its decisions agree with top-k membership."""
    names = ("accuracy", "precision", "recall", "f1", "realised_capacity")
    lines = [f"{'block':<9}{'selection':<11}{'base rate':>10}" + "".join(f"{n.split('_')[0]:>11}" for n in names)]
    for key, base_rate in metrics.items():
        if found := re.fullmatch(r"routing/(block\d+)/base_rate_accuracy", key):
            for selection in causal_selections(metrics):
                values = (metrics[f"routing/{found[1]}/{name}/{selection}"] for name in names)
                numbers = "".join(f"{value:>11.3f}" for value in values)
                lines.append(f"{found[1]:<9}{selection:<11}{base_rate:>10.3f}{numbers}")
    return lines if len(lines) > 1 else []


def expert_table(metrics: Metrics) -> list[str]:
    """One line per block with experts and selection: tokens that experts computed on, claims that they dropped, and
    how evenly they were chosen (see `expert_stats.load_statistics`)."""
    names = ("computed", "dropped", *LOAD_STATISTICS)
    titles = ("computed", "dropped", "entropy", "smallest load", "dead")
    lines = [f"{'experts':<9}{'selection':<15}" + "".join(f"{title:>{len(title) + 3}}" for title in titles)]
    for key in metrics:
        if found := re.fullmatch(r"experts/(block\d+)/dead/(\w+)", key):
            values = [metrics[f"experts/{found[1]}/{name}/{found[2]}"] for name in names]
            forms = (".1%", ".1%", ".3f", ".2f", ".0f")
            cells = zip(values, forms, titles, strict=True)
            numbers = "".join(f"{format(value, form):>{len(title) + 3}}" for value, form, title in cells)
            name = found[2].replace("topk", "training rule")
            lines.append(f"{found[1]:<9}{name:<15}{numbers}")
    return lines if len(lines) > 1 else []


def warnings(metrics: Metrics, selections: Sequence[str] | None = None) -> list[str]:
    """What a person should know before relying on this evaluation; nothing where all is well.

    A causal selection that routes far from what top-k keeps, a routed block whose update is out of proportion, and
    experts that nobody chooses.

    Args:
      selections: those to speak of; None for all that were evaluated.
    """
    lines = []
    for selection in causal_selections(metrics) if selections is None else selections:
        error = capacity_error(metrics, selection)
        if error is not None and not error <= FAR_FROM_CAPACITY:
            blocks = ", ".join(
                f"{block} {realised:.1%} of {kept:.1%}" for block, realised, kept in capacities(metrics, selection)
            )
            lines.append(
                f"WARNING {selection} routes far from what the model was trained with ({blocks}): train longer, take "
                "another selection, or shift the cut-offs with --capacity"
            )
    low, high = HEALTHY_UPDATE_RATIO
    for key, ratio in metrics.items():
        if (found := re.fullmatch(r"routing/(block\d+)/update_ratio/topk", key)) and not low <= ratio <= high:
            meaning = "it drowns the other blocks" if ratio > high else "it is dead, and what it computes is lost"
            lines.append(f"WARNING {found[1]}: update/residual norm {ratio:.3g} ({meaning})")
    for key, dead in metrics.items():
        if (found := re.fullmatch(r"experts/(block\d+)/dead/topk", key)) and dead >= 1:
            few = f"less than {DEAD_LOAD:.0%} of an even load"
            lines.append(f"WARNING {found[1]}: dead experts: {dead:.0f} ({few}); their parameters are lost")
    return lines
