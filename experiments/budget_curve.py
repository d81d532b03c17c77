"""One trained model, many compute budgets: held-out loss against the FLOPs really spent, without retraining.

    python experiments/budget_curve.py --workdir=runs/mod --out=runs/mod/budget

For each capacity the cut-offs of selection "threshold" are calibrated on every other batch of held-out windows, and the
causal loss is taken on the rest, together with the capacity that the blocks realised there; that, not the one asked
for, gives the FLOPs. Writes budget_curve.json and the plot, and prints the table.
"""

import jax.numpy as jnp
import numpy as np
from absl import app, flags, logging
from matplotlib.figure import Figure

from mod_jax import host, outputs, sampling
from mod_jax.analysis import plots
from mod_jax.data.corpus import describe_corpus, prepare_corpus
from mod_jax.evaluation import budget, finished, tables
from mod_jax.models.model import Weights

WORKDIR = flags.DEFINE_string("workdir", None, "Folder of a finished run.", required=True)
OUT = flags.DEFINE_string("out", None, "Folder for the results; default: WORKDIR/budget_curve.")
CAPACITIES = flags.DEFINE_list(
    "capacities", ["0.01", "0.03", "0.06", "0.09", "0.125", "0.18", "0.25", "0.35", "0.5", "0.7", "1.0"], "Budgets."
)


def main(_) -> None:
    host.prepare()
    logging.set_verbosity(logging.ERROR)
    out = outputs.check_folder("out", OUT.value or f"{WORKDIR.value}/budget_curve")
    model = sampling.restore(WORKDIR.value)
    corpus = prepare_corpus(model.config.data, model.tokenizer)
    evaluator = finished.make_evaluator(model, corpus)
    calibration, evaluator.batches = evaluator.batches[::2], evaluator.batches[1::2]
    if not evaluator.batches:
        raise app.UsageError("one batch of held-out windows is not enough to calibrate and to judge")

    points = [measure(model, evaluator, "trained cut-offs", model.cutoffs_L)]
    for capacity in map(float, CAPACITIES.value):
        shifted = budget.calibrate(model, capacity, calibration)
        points.append(measure(model, evaluator, f"{capacity:g}", shifted.cutoffs_L))

    header = "| budget | realised | FLOPs per token | of dense | causal loss (threshold) | minus top-k loss |"
    lines = [header, "|---|---|---|---|---|---|"]
    for p in points:
        lines.append(
            f"| {p['budget']} | {p['realised_capacity']:.3f} | {p['flops_per_token']:.4g} | {p['of_dense']:.3f} | "
            f"{p['loss']:.4f} | {p['loss'] - p['topk_loss']:+.4f} |"
        )
    lines.append(f"\n{describe_corpus(corpus)}; step {model.step}, commit {model.metadata['commit']}")
    print("\n".join(lines))

    outputs.write_json(out / "budget_curve.json", points)
    figure = draw(points)
    plots.add_caption(figure, f"{WORKDIR.value}, step {model.step}, corpus {corpus.digest[:12]}, cut-offs by threshold")
    for ending in ("png", "pdf"):
        plots.save(figure, out / f"budget_curve.{ending}")


def measure(model: sampling.TrainedModel, evaluator, name: str, cutoffs_L: np.ndarray) -> dict:
    """The causal loss under these cut-offs, and what it cost."""
    metrics = evaluator.evaluate(Weights(model.params, jnp.asarray(cutoffs_L)))
    losses = {loss.selection: loss for loss in tables.held_out_losses(metrics)}
    return {
        "budget": name,
        "cutoffs": [float(cutoff) for cutoff in cutoffs_L],
        "realised_capacity": losses["threshold"].routed,
        "flops_per_token": losses["threshold"].flops,
        "of_dense": losses["threshold"].of_dense,
        "loss": losses["threshold"].loss,
        "topk_loss": losses["topk"].loss,
    }


def draw(points: list[dict]) -> Figure:
    """The curve, with the trained cut-offs as one point and the top-k loss as a line."""
    figure = Figure(figsize=(6.5, 4.2), layout="constrained")
    axes = figure.subplots()
    curve = sorted(points[1:], key=lambda p: p["flops_per_token"])
    axes.plot([p["flops_per_token"] for p in curve], [p["loss"] for p in curve], "o-", label="cut-offs shifted")
    axes.plot(points[0]["flops_per_token"], points[0]["loss"], "k*", markersize=12, label="cut-offs of training")
    axes.axhline(points[0]["topk_loss"], linestyle=":", color="gray", label="top-k loss (looks at the future)")
    for p in readable(curve):
        label = dict(xytext=(0, 8), textcoords="offset points", ha="center", fontsize=7)
        axes.annotate(f"{p['realised_capacity']:.2g}", (p["flops_per_token"], p["loss"]), **label)
    axes.set_xlabel("FLOPs per token really spent")
    axes.set_ylabel("held-out causal loss, nats per token")
    axes.legend()
    axes.margins(0.08)
    return figure


def readable(curve: list[dict], gap: float = 0.06) -> list[dict]:
    """The points that can carry a label: each a part of the plot's diagonal away from the one before."""
    at = np.array([(p["flops_per_token"], p["loss"]) for p in curve])
    at = at / np.maximum(np.ptp(at, axis=0), 1e-9)
    kept = [0]
    for i in range(1, len(curve)):
        if np.hypot(*(at[i] - at[kept[-1]])) > gap:
            kept.append(i)
    return [curve[i] for i in kept]


if __name__ == "__main__":
    app.run(main)
