"""Depth and experts together at equal training FLOPs, with the controls: the paper's figure 7 in shape, over seeds.

    python experiments/mode.py --out=runs/mode --jobs=2
    python experiments/mode.py --out=runs/mode_long --jobs=2 --suffix=:long --seeds=0

Runs `configs/mode.py` once per variant and seed, then prints a table, and writes table.md, mode.json and mode.png to
OUT. Runs of one seed share the order of their data, so compare within a seed. Losses are held-out nats per token:

  training rule  as trained: top-k in depth, experts with slots. Not a language model's loss where it looks ahead.
  causal         by the selection in the next column. No expert drops a token, so a model that was trained with slots
                 for half of the tokens spends more than it was trained with.
"""

import collections
import json
import pathlib

import cells
import jax
import numpy as np
from absl import app, flags
from matplotlib.figure import Figure

import mod_jax
from mod_jax import host, outputs
from mod_jax.analysis import plots
from mod_jax.evaluation import budget
from mod_jax.expert_routing import paced_slots, slots_per_expert
from mod_jax.models.blocks import TOPK
from mod_jax.training.rows import read_metrics

OUT = flags.DEFINE_string("out", "runs/mode", "Folder of all runs.")
VARIANTS = flags.DEFINE_list(
    "variants",
    ["dense", "mod", "moe", "staged", "integrated", "reduced", "paced", "chosen", "halfchosen"],
    "Arguments of configs/mode.py.",
)
SEEDS = flags.DEFINE_list("seeds", ["0", "1", "2"], "Seeds.")
SUFFIX = flags.DEFINE_string("suffix", "", "Options of every variant, such as :long.")
JOBS = flags.DEFINE_integer("jobs", 1, "Runs at a time.", 1)
SELECTIONS = ("all", "predictor", "threshold")  # the first one that a run was trained for
NUM_CURVE_POINTS = 10


def main(_) -> None:
    host.prepare_cpu()
    out = outputs.check_folder("out", OUT.value)
    planned = [
        cells.Cell(f"mode.py:{variant}{SUFFIX.value}", out / f"{variant}-seed{seed}", (f"--config.seed={seed}", EVERY))
        for variant in VARIANTS.value
        for seed in SEEDS.value
    ]
    cells.run(planned, JOBS.value)
    results = [measure(cell.workdir) for cell in planned]
    lines = table(results)
    run = json.loads((planned[0].workdir / "config.json").read_text())
    lines.append(f"\n{run['corpus']}; commit {run['commit']}; jax {run['jax']}; {run['device']}.")
    outputs.write_json(out / "mode.json", results)
    outputs.write_text(out / "table.md", "\n".join(lines) + "\n")
    plots.save(draw(results), out / "mode.png")
    print("\n".join(lines))


EVERY = f"--config.train.eval_every={900 // NUM_CURVE_POINTS}"


def measure(workdir: pathlib.Path) -> dict:
    """What the table and the figure say of one run."""
    rows = [row for row in read_metrics(workdir / "metrics.jsonl") if "eval/topk_loss" in row]
    last = rows[-1]
    selection = next((s for s in SELECTIONS if f"eval/causal_loss/{s}" in last), None)
    model = mod_jax.restore(workdir)
    variant, seed = workdir.name.rsplit("-seed", 1)
    flops_per_step = mod_jax.train_flops(model.config, vocabulary(model)) * model.config.train.batch_size
    return {
        "variant": variant,
        "seed": int(seed),
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(model.params)),
        "steps": last["step"],
        "training_rule": last["eval/topk_loss"],
        "selection": selection or "-",
        "causal": last[f"eval/causal_loss/{selection}"] if selection else last["eval/topk_loss"],
        "flops_per_token": mod_jax.forward_flops(model.config, vocabulary(model)).total / model.config.data.seq_len,
        "slots": slot_share(model.config),
        "computed_by_quarter": computed_by_quarter(model),
        "curve": [(row["step"] * flops_per_step, row["eval/topk_loss"]) for row in rows],
    }


def vocabulary(model: mod_jax.TrainedModel) -> int:
    return model.config.model.vocab_size or model.tokenizer.vocab_size


def slot_share(config: mod_jax.Config) -> float | None:
    """Slots of all experts of a full block per token: what the products of the channel really cost in training."""
    if not config.expert_depths:
        return None
    e, length = config.experts, config.data.seq_len
    num_slots = slots_per_expert(length, e.capacity, e.count, 1 if e.choice == "expert" else e.chosen)
    return e.count * (paced_slots(num_slots, length) if e.overflow == "paced" else num_slots) / length


def computed_by_quarter(model: mod_jax.TrainedModel) -> list[float] | None:
    """Fraction of tokens that experts of full blocks compute on, by quarter of the row, under the training rule."""
    if not model.config.expert_depths:
        return None
    full = [i for i, depth in enumerate(model.config.expert_depths) if not model.config.blocks[depth].routed]

    @jax.jit
    def run(params, *inputs):
        return model.model.run(params, *inputs, TOPK).channel.of_tokens.has_slot_BTA

    served = tokens = 0
    for batch in budget.held_out_batches(model):
        valid_BT = batch["segment_ids_BT"] > 0
        has_slot_LBT = np.asarray(
            run(model.params, batch["tokens_BT"], batch["positions_BT"], batch["segment_ids_BT"])
        ).any(axis=-1)
        served = served + (has_slot_LBT[full] & valid_BT).sum(axis=(0, 1))
        tokens = tokens + len(full) * valid_BT.sum(axis=0)
    quarters = np.array_split(np.arange(len(served)), 4)
    return [float(served[quarter].sum() / tokens[quarter].sum()) for quarter in quarters]


def table(results: list[dict]) -> list[str]:
    seeds = sorted({result["seed"] for result in results})
    lines = [
        "| model | parameters | steps | FLOPs per token | slots per token | training rule, seeds "
        + ", ".join(map(str, seeds))
        + " | causal | selection | computed by quarter of the row |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for variant, runs in by_variant(results).items():
        first = runs[0]
        quarters = [run["computed_by_quarter"] for run in runs if run["computed_by_quarter"]]
        cells_ = [
            variant,
            f"{first['parameters']:,}",
            f"{first['steps']}",
            f"{first['flops_per_token']:.3g}",
            "" if first["slots"] is None else f"{first['slots']:.2f}",
            ", ".join(f"{run['training_rule']:.3f}" for run in runs),
            ", ".join(f"{run['causal']:.3f}" for run in runs),
            first["selection"],
            " ".join(f"{share:.2f}" for share in np.mean(quarters, axis=0)) if quarters else "",
        ]
        lines.append(f"| {' | '.join(cells_)} |")
    return lines


def by_variant(results: list[dict]) -> dict[str, list[dict]]:
    runs = collections.defaultdict(list)
    for result in results:
        runs[result["variant"]].append(result)
    return runs


def draw(results: list[dict]) -> Figure:
    """Left: held-out loss against training FLOPs, mean and range over seeds. Right: the end of every run."""
    figure = Figure(figsize=(10, 4.6), layout="constrained")
    curves, ends = figure.subplots(1, 2, width_ratios=[3, 2])
    variants = by_variant(results)
    styles = {
        v: (plots.PALETTE[i % len(plots.PALETTE)], "-" if i < len(plots.PALETTE) else "--")
        for i, v in enumerate(variants)
    }
    lowest, highest = [], []
    for place, (variant, runs) in enumerate(variants.items()):
        color, line = styles[variant]
        flops = np.array([point[0] for point in runs[0]["curve"]])
        loss = np.array([[point[1] for point in run["curve"]] for run in runs])
        curves.plot(flops, loss.mean(axis=0), line, color=color, label=variant)
        curves.fill_between(flops, loss.min(axis=0), loss.max(axis=0), color=color, alpha=0.15, linewidth=0)
        ends.plot([run["training_rule"] for run in runs], [place] * len(runs), "o", color=color)
        ends.plot([run["causal"] for run in runs], [place] * len(runs), "|", color=plots.INK, markersize=11)
        lowest.append(loss[:, -1].min())
        highest.append(loss[:, len(flops) // 3].max())
    curves.set(xlabel="training FLOPs", ylabel="held-out loss by the training rule, nats per byte")
    curves.set_ylim(min(lowest) - 0.03, max(highest))
    curves.legend(fontsize=8)
    ends.set_yticks(range(len(variants)), list(variants))
    ends.invert_yaxis()
    ends.set(xlabel="held-out nats per byte, each seed: dot training rule, bar causal")
    ends.grid(axis="x", color="#dddddd")
    return figure


if __name__ == "__main__":
    app.run(main)
