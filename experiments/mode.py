"""Depth and experts together at equal training FLOPs, with the controls: the paper's figure 7 in shape, over seeds.

    python experiments/mode.py --out=runs/mode --jobs=2
    python experiments/mode.py --out=runs/mode_long --jobs=2 --suffix=:long --tuned=runs/mode

First the weight of the balance loss is chosen for each variant whose tokens choose their experts: one run per weight,
of a seed that is not compared. Then `configs/mode.py` runs once per variant and seed. OUT gets table.md, mode.json,
tuning.json and mode.png. Runs of one seed share the order of their data, so compare within a seed: a difference has a
sign only where it has the same one in every seed. Losses are held-out nats per token:

  training rule  as trained: top-k in depth, experts with slots. Not a language model's loss where it looks ahead.
  causal         by the selection in the next column. No expert drops a token, so a model that was trained with slots
                 for half of the tokens spends more than it was trained with.

FLOPs per token are forward: *active* counts the MLPs that tokens are expected to pass, by which runs are equally long;
*passed* those that held-out tokens did pass under the training rule; *slots* counts every slot of every expert, filled
or not, and is what training really multiplies; *causal* is what the causal loss spent. *Computed* and *dropped* are the
fractions of tokens that an expert of a full block computed on, and of claims of such an expert that found no slot, each
by quarter of the row.
"""

import collections
import json
import pathlib

import cells
import jax
import numpy as np
from absl import app, flags, logging
from matplotlib.figure import Figure

import mod_jax
from mod_jax import host, outputs, routing
from mod_jax.analysis import plots
from mod_jax.analysis.routing_stats import block_name
from mod_jax.evaluation import budget
from mod_jax.expert_routing import paced_slots, slots_per_expert
from mod_jax.models.blocks import TOPK
from mod_jax.models.flops import count_parameters
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
WEIGHTS = flags.DEFINE_list(
    "balance_weights", ["0.01", "0.1", "0.3"], "Of which tuning takes the best; one: no tuning."
)
TUNE_SEED = flags.DEFINE_integer("tune_seed", 3, "Seed of the runs that tune; none of --seeds.", 0)
TUNED = flags.DEFINE_string("tuned", None, "OUT of an earlier call, whose balance weights are taken.")
SELECTIONS = ("all", "predictor", "threshold")  # the first one that a run was trained for
NUM_CURVE_POINTS = 10
FLOPS = ("active_flops", "passed_flops", "slot_flops", "causal_flops")


# What the study asks: does the first beat the second?
PAIRS = (
    ("moe", "dense"),
    ("chosen", "dense"),
    ("integrated", "dense"),
    ("integrated", "moe"),
    ("integrated", "reduced"),
    ("integrated", "paced"),
    ("integrated", "halfchosen"),
    ("halfchosen", "reduced"),
    ("mod", "dense"),
    ("staged", "mod"),
    ("staged", "moe"),
)


def main(_) -> None:
    logging.set_verbosity(logging.WARNING)  # Orbax narrates at INFO
    host.prepare()
    out = outputs.check_folder("out", OUT.value)
    if str(TUNE_SEED.value) in SEEDS.value:
        raise SystemExit(f"--tune_seed={TUNE_SEED.value}: must be none of --seeds={','.join(SEEDS.value)}")
    tuning = tune(out)
    outputs.write_json(out / "tuning.json", tuning)
    planned = [
        cell(out, variant, seed, tuning["best"].get(variant)) for variant in VARIANTS.value for seed in SEEDS.value
    ]
    found = cells.run(planned, JOBS.value)
    done = [f for f in found if f.state == "done"]
    if not done:
        raise SystemExit("no run is done: " + "; ".join(cells.not_done(found)))
    results = [measure(f.cell.workdir) for f in done]
    lines = [*tuning_table(tuning), "", *table(results), "", *pair_table(results), *cells.not_done(found)]
    run = done[0].result
    lines.append(f"\n{run['corpus']}; commit {run['commit']}; jax {run['jax']}; {run['device']}.")
    outputs.write_json(out / "mode.json", results)
    outputs.write_text(out / "table.md", "\n".join(lines) + "\n")
    plots.save(draw(results), out / "mode.png")
    print("\n".join(lines))


def cell(folder: pathlib.Path, variant: str, seed: int | str, weight: str | None) -> cells.Cell:
    changes = {"seed": int(seed), "train.eval_every": 900 // NUM_CURVE_POINTS}
    if weight is not None:
        changes["experts.balance_weight"] = float(weight)
    return cells.Cell(folder / f"{variant}-seed{seed}", f"mode.py:{variant}{SUFFIX.value}", changes)


def tune(out: pathlib.Path) -> dict:
    """The best balance weight of each variant that has such a loss, and the losses that say so."""
    if TUNED.value is not None:
        return json.loads((pathlib.Path(TUNED.value) / "tuning.json").read_text())
    configs = {variant: cell(out, variant, TUNE_SEED.value, None).load() for variant in VARIANTS.value}
    tuned = [variant for variant, config in configs.items() if config.expert_depths and not config.experts_choose]
    if len(WEIGHTS.value) == 1:
        return {"seed": None, "losses": {}, "best": dict.fromkeys(tuned, WEIGHTS.value[0])}
    planned = {
        (variant, weight): cell(out / "tuning" / f"balance{weight}", variant, TUNE_SEED.value, weight)
        for variant in tuned
        for weight in WEIGHTS.value
    }
    if lines := cells.not_done(cells.run(list(planned.values()), JOBS.value)):
        raise SystemExit("the balance weight cannot be chosen: " + "; ".join(lines))
    losses = {variant: {} for variant in tuned}
    for (variant, weight), planned_cell in planned.items():
        losses[variant][weight] = evaluations(planned_cell.workdir)[-1]["eval/topk_loss"]
    best = {variant: min(by_weight, key=by_weight.get) for variant, by_weight in losses.items()}
    return {"seed": TUNE_SEED.value, "losses": losses, "best": best}


def evaluations(workdir: pathlib.Path) -> list[dict]:
    """The rows of metrics that hold an evaluation, in order."""
    return [row for row in read_metrics(workdir / "metrics.jsonl") if "eval/topk_loss" in row]


def measure(workdir: pathlib.Path) -> dict:
    """What the tables and the figure say of one run."""
    rows = evaluations(workdir)
    last = rows[-1]
    selection = next((s for s in SELECTIONS if f"eval/causal_loss/{s}" in last), None)
    model = mod_jax.restore(workdir)
    config, vocab_size = model.config, model.model.vocab_size
    variant, seed = workdir.name.rsplit("-seed", 1)
    flops_per_step = mod_jax.train_flops(config, vocab_size) * config.train.batch_size
    active = mod_jax.forward_flops(config, vocab_size).total / config.data.seq_len
    dropped = {block_name(d): last[f"experts/{block_name(d)}/dropped/topk"] for d in config.expert_depths}
    return {
        "variant": variant,
        "seed": int(seed),
        "parameters": count_parameters(config, model.model)._asdict(),
        "balance_weight": config.experts.balance_weight if config.expert_depths else None,
        "steps": last["step"],
        "training_rule": last["eval/topk_loss"],
        "selection": selection or "-",
        "causal": last[f"eval/causal_loss/{selection}"] if selection else last["eval/topk_loss"],
        "active_flops": active,
        "passed_flops": last["eval/forward_flops_per_token/topk"],
        "slot_flops": slot_flops(config, vocab_size),
        "causal_flops": last[f"eval/forward_flops_per_token/{selection}"] if selection else active,
        "dropped_by_block": dropped,
        **by_quarter(model),
        "curve": [(row["step"] * flops_per_step, row["eval/topk_loss"]) for row in rows],
    }


def slot_flops(config: mod_jax.Config, vocab_size: int) -> float:
    """Forward FLOPs per token if every slot of every expert is counted as a token: what training multiplies."""
    e, slots = config.experts, []
    for depth in config.expert_depths:
        length = routing.tokens_kept(config.data.seq_len, config.blocks[depth].capacity)
        num_slots = slots_per_expert(length, e.capacity, e.count, 1 if e.choice == "expert" else e.chosen)
        num_slots = paced_slots(num_slots, length) if e.overflow == "paced" else num_slots
        slots.append(e.count * num_slots / length)
    return mod_jax.forward_flops(config, vocab_size, realised_mlps=tuple(slots)).total / config.data.seq_len


def by_quarter(model: mod_jax.TrainedModel) -> dict[str, list[float] | None]:
    """Of full blocks with experts, under the training rule, by quarter of the row: the fraction of tokens that an
    expert computes on, and the fraction of the claims of an expert that are dropped."""
    full = [i for i, depth in enumerate(model.config.expert_depths) if not model.config.blocks[depth].routed]
    if not full:
        return {"computed_by_quarter": None, "dropped_by_quarter": None}

    @jax.jit
    def run(params, *inputs):
        return model.model.run(params, *inputs, TOPK).channel.of_tokens

    computed = tokens = dropped = claims = 0
    for batch in budget.held_out_batches(model):
        valid_BT = batch["segment_ids_BT"] > 0
        of_tokens = run(model.params, batch["tokens_BT"], batch["positions_BT"], batch["segment_ids_BT"])
        choice_LBTA, has_slot_LBTA = (np.asarray(array)[full] for array in of_tokens)
        wants_LBTA = (choice_LBTA >= 0) & (choice_LBTA < model.config.experts.count)
        computed = computed + (has_slot_LBTA.any(axis=-1) & valid_BT).sum(axis=(0, 1))
        tokens = tokens + len(full) * valid_BT.sum(axis=0)
        dropped = dropped + (wants_LBTA & ~has_slot_LBTA).sum(axis=(0, 1, 3))
        claims = claims + wants_LBTA.sum(axis=(0, 1, 3))
    quarters = np.array_split(np.arange(len(computed)), 4)

    def share(part_T, whole_T):
        return [float(part_T[quarter].sum() / max(1, whole_T[quarter].sum())) for quarter in quarters]

    return {"computed_by_quarter": share(computed, tokens), "dropped_by_quarter": share(dropped, claims)}


def tuning_table(tuning: dict) -> list[str]:
    if not tuning["losses"]:
        return [f"Balance weight, not tuned: {tuning['best']}"]
    weights = list(next(iter(tuning["losses"].values())))
    lines = [
        f"| balance weight; loss by the training rule, seed {tuning['seed']} | {' | '.join(weights)} | taken |",
        "|---|" + "---|" * (len(weights) + 1),
    ]
    for variant, losses in tuning["losses"].items():
        found = " | ".join(f"{losses[weight]:.3f}" for weight in weights)
        lines.append(f"| {variant} | {found} | {tuning['best'][variant]} |")
    return lines


def table(results: list[dict]) -> list[str]:
    seeds = ", ".join(map(str, sorted({result["seed"] for result in results})))
    titles = (
        "model",
        "parameters",
        "active",
        "steps",
        "FLOPs per token: active",
        "passed",
        "slots",
        "causal",
        f"training rule, seeds {seeds}",
        "causal",
        "selection",
        "computed by quarter of the row",
        "dropped by quarter",
    )
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for variant, runs in by_variant(results).items():
        first = runs[0]
        cells_ = [
            variant,
            f"{first['parameters']['total']:,}",
            f"{first['parameters']['active']:,}",
            f"{first['steps']}",
            *(f"{np.mean([run[name] for run in runs]):.3g}" for name in FLOPS),
            ", ".join(f"{run['training_rule']:.3f}" for run in runs),
            ", ".join(f"{run['causal']:.3f}" for run in runs),
            first["selection"],
            quarters(runs, "computed_by_quarter"),
            quarters(runs, "dropped_by_quarter"),
        ]
        lines.append(f"| {' | '.join(cells_)} |")
    return lines


def quarters(runs: list[dict], name: str) -> str:
    """The mean over seeds, by quarter, and over the row."""
    found = [run[name] for run in runs if run[name]]
    if not found:
        return ""
    mean = np.mean(found, axis=0)
    return f"{' '.join(f'{share:.2f}' for share in mean)} (row {mean.mean():.2f})"


def pair_table(results: list[dict]) -> list[str]:
    """The difference of two models in each seed. It has a sign only if every seed has the same one, and there are
    several."""
    found = {(result["variant"], result["seed"]): result for result in results}
    lines = [
        "| first minus second | training rule, by seed | holds | causal, by seed | holds |",
        "|---|---|---|---|---|",
    ]
    for first, second in PAIRS:
        seeds = sorted({seed for v, seed in found if v == first} & {seed for v, seed in found if v == second})
        if not seeds:
            continue
        parts = [f"{first} - {second}"]
        for name in ("training_rule", "causal"):
            differences = [found[first, seed][name] - found[second, seed][name] for seed in seeds]
            parts += [" ".join(f"{difference:+.3f}" for difference in differences), verdict(differences)]
        lines.append(f"| {' | '.join(parts)} |")
    return lines


def verdict(differences: list[float]) -> str:
    if len(differences) < 2:
        return "nothing: one seed"
    if all(difference < 0 for difference in differences):
        return "lower in every seed"
    if all(difference > 0 for difference in differences):
        return "higher in every seed"
    return "nothing: seeds disagree"


def by_variant(results: list[dict]) -> dict[str, list[dict]]:
    runs = collections.defaultdict(list)
    for result in results:
        runs[result["variant"]].append(result)
    return runs


@plots.styled
def draw(results: list[dict]) -> Figure:
    """Left: held-out loss against training FLOPs, mean and range over seeds. Right: the end of every run."""
    figure = Figure(figsize=(10, 4.6))
    curves, ends = figure.subplots(1, 2, width_ratios=[3, 2])
    variants = by_variant(results)
    lowest, highest = [], []
    for place, (variant, runs) in enumerate(variants.items()):
        color, line = plots.PALETTE[place % len(plots.PALETTE)], "-" if place < len(plots.PALETTE) else "--"
        marker = plots.MARKERS[place % len(plots.MARKERS)]  # tells them apart in grey
        flops = np.array([point[0] for point in runs[0]["curve"]])
        loss = np.array([[point[1] for point in run["curve"]] for run in runs])
        curves.plot(flops, loss.mean(axis=0), line, color=color, label=variant, marker=marker, markersize=4)
        curves.fill_between(flops, loss.min(axis=0), loss.max(axis=0), color=color, alpha=0.12, linewidth=0)
        ends.plot([run["training_rule"] for run in runs], [place] * len(runs), marker, color=color)
        ends.plot([run["causal"] for run in runs], [place] * len(runs), "|", color=plots.INK, markersize=11)
        lowest.append(loss[:, -1].min())
        highest.append(loss[:, len(flops) // 3].max())
    curves.set(xlabel="training FLOPs", ylabel="nats per byte", title="Held-out loss by the training rule, over seeds")
    curves.set_ylim(min(lowest) - 0.03, max(highest))
    curves.set_xlim(left=0.2 * flops[-1])
    curves.legend(fontsize=8)
    ends.set_yticks(range(len(variants)), list(variants))
    ends.invert_yaxis()
    ends.plot([], [], "o", color=plots.MUTED, label="training rule")
    ends.plot([], [], "|", color=plots.INK, markersize=11, label="causal, nobody dropped")
    ends.legend(loc="upper right", fontsize=8)
    ends.set(xlabel="nats per byte", title="At the end, each seed")
    return figure


if __name__ == "__main__":
    app.run(main)
