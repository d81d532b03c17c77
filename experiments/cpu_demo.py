"""Learned against stochastic routing against dense, at equal training FLOPs, on a CPU, over seeds.

    python experiments/cpu_demo.py --out=runs/cpu_demo --seeds=0,1
    python experiments/cpu_demo.py --out=runs/cpu_demo_long --variants=dense:long,mod:long,stochastic:long

Runs `configs/cpu_demo.py` once per variant and seed (each in its own process; finished runs are not repeated), then
prints a table and writes it to OUT/table.md. Runs of one seed share the order of the data, so compare within a seed.
"""

import json
import pathlib
import subprocess
import sys

from absl import app, flags

from mod_jax import outputs
from mod_jax.evaluation import tables
from mod_jax.training.rows import read_metrics

OUT = flags.DEFINE_string("out", "runs/cpu_demo", "Folder of all runs.")
VARIANTS = flags.DEFINE_list("variants", ["dense", "mod", "stochastic", "every"], "Arguments of configs/cpu_demo.py.")
SEEDS = flags.DEFINE_list("seeds", ["0", "1"], "Seeds.")
ROOT = pathlib.Path(__file__).resolve().parent.parent


def main(_) -> None:
    out = outputs.check_folder("out", OUT.value)
    lines = [
        "| model | seed | steps | top-k loss | predictor loss | gap | threshold loss | gap | routed | recall |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for variant in VARIANTS.value:
        for seed in SEEDS.value:
            workdir = out / f"{variant.replace(':', '-')}-seed{seed}"
            train(variant, seed, workdir)
            lines.append(table_row(variant, seed, workdir))
    run = json.loads((workdir / "config.json").read_text())
    lines.append(f"\n{run['corpus']}; commit {run['commit']}; jax {run['jax']}; {run['device']}.")
    outputs.write_text(out / "table.md", "\n".join(lines) + "\n")
    print("\n".join(lines))


def train(variant: str, seed: str, workdir: pathlib.Path) -> None:
    config = [f"--config={ROOT}/configs/cpu_demo.py:{variant}", f"--config.seed={seed}"]
    subprocess.run([sys.executable, "-m", "mod_jax.train", *config, f"--workdir={workdir}"], check=True)


def table_row(variant: str, seed: str, workdir: pathlib.Path) -> str:
    row = [row for row in read_metrics(workdir / "metrics.jsonl") if "eval/topk_loss" in row][-1]
    losses = {loss.selection: loss for loss in tables.held_out_losses(row)}
    cells = [variant, seed, f"{row['step']}", f"{losses['topk'].loss:.3f}"]
    for selection in ("predictor", "threshold"):
        found = losses.get(selection)
        cells += [f"{found.loss:.3f}", f"{found.gap:+.4f}"] if found else ["", ""]
    cells.append(form_range(row, "realised_capacity/predictor"))
    cells.append(form_range(row, "recall/predictor"))
    return f"| {' | '.join(cells)} |"


def form_range(row: dict, name: str) -> str:
    """Each routed block's value."""
    return " ".join(f"{row[key]:.3f}" for key in sorted(row) if key.startswith("routing/") and key.endswith(name))


if __name__ == "__main__":
    app.run(main)
