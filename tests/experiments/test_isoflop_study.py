"""The isoFLOP study as a user runs it: planned at equal FLOPs, killed, run by two at once, collected."""

import json
import os
import pathlib
import random
import re
import signal
import subprocess
import sys
import time

import cells
import isoflop_results
import numpy as np
import pytest

from mod_jax.errors import DataError
from mod_jax.models import flops
from mod_jax.training.rows import read_metrics

ROOT = cells.ROOT
# One device and one thread, as docs/studies.md says; the tests themselves have eight devices.
OPTIONS = dict(cwd=ROOT, env=dict(os.environ, XLA_FLAGS="--xla_cpu_multi_thread_eigen=false"), text=True)
SMALL = ["--preset=tiny", "--budgets=5e8", "--variants=dense,mod", "--widths=8,12"]


def study(command, out, *flags):
    return [sys.executable, "experiments/isoflop.py", command, f"--out={out}", *flags]


def call(command, out, *flags):
    done = subprocess.run(study(command, out, *flags), capture_output=True, **OPTIONS)
    assert done.returncode == 0, done.stderr
    return done.stdout


def plan_of(out):
    return [json.loads(line) for line in (out / "plan.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    """Folder and output of a plan of four cells."""
    out = tmp_path_factory.mktemp("planned")
    return out, call("plan", out, *SMALL)


def test_cells_are_equal_in_training_flops(planned):
    out, said = planned
    rows = plan_of(out)
    assert [row["name"] for row in rows] == [f"5e8-{v}-w{w}-s0" for w in (8, 12) for v in ("dense", "mod")]
    for row, command in zip(rows, (out / "commands.txt").read_text().splitlines(), strict=True):
        cell = cells.Cell(out / row["name"], row["config"], row["changes"])
        assert command == cell.command
        config = cell.load()
        per_step = config.train.batch_size * flops.train_flops(config, 257)
        assert row["steps"] == flops.train_steps(config, 257)
        assert row["flops"] == pytest.approx(row["steps"] * per_step)
        assert abs(row["flops"] / 5e8 - 1) <= 0.005
        assert row["seconds"] > 0
        assert row["name"] in said


def test_a_second_plan_adds_to_the_first(planned):
    out, _ = planned
    before = plan_of(out)
    call(
        "plan", out, *SMALL[:2], "--variants=dense", "--widths=8", "--seeds=0,1", "--rates=1,2", "--corpus_tokens=6000"
    )
    after = plan_of(out)
    names = {row["name"] for row in after} - {row["name"] for row in before}
    assert names == {"5e8-dense-w8-s1", "5e8-dense-w8-s0-r2", "5e8-dense-w8-s1-r2"}
    by_name = {row["name"]: row for row in after}
    assert by_name["5e8-dense-w8-s1-r2"]["learning_rate"] == 2 * by_name["5e8-dense-w8-s1"]["learning_rate"]
    done = subprocess.run(study("plan", out, *SMALL, "--source=text:elsewhere"), capture_output=True, **OPTIONS)
    assert done.returncode == 2
    assert "its plan has 5e8-dense-w8-s0 with" in done.stderr


def test_many_epochs_are_warned_of_and_times_come_from_a_given_mfu(tmp_path):
    given = ["--mfu=0.5", "--device=H100", "--num_devices=8", "--corpus_tokens=1000"]
    said = call("plan", tmp_path, *SMALL, *given)
    [row, *_] = plan_of(tmp_path)
    assert row["seconds"] == pytest.approx(row["flops"] / (0.5 * 989e12 * 8))
    assert f"WARNING {row['name']}: {row['tokens'] / 1000:.1f} epochs, more than 4" in said


def record(budget, variant, width, topk, digest="d" * 64, rate=1, seed=0, state="done"):
    """A cell of `collect`, as if it had been trained."""
    known = dict(
        name=f"{budget:g}-{variant}-{width}-{seed}-{rate}", variant=variant, budget=budget, width=width, depth=4
    )
    known |= dict(heads=1, rate=rate, learning_rate=1e-3, seed=seed, parameters=48 * width**2, steps=100, tokens=6400)
    known |= dict(forward_flops_per_token=96.0 * width**2, flops=budget, epochs=0.1, state=state, detail="")
    loss = {"loss": topk, "bits_per_byte": topk / np.log(2), "routed": None, "flops": 1.0}
    return known | {
        "top-k": loss,
        "causal": loss | {"loss": topk + 0.01, "selection": "predictor"},
        "corpus_digest": digest,
        "corpus": "text",
        "commit": "abc",
        "jax": "1",
        "python": "3",
        "device": "cpu",
    }


def test_optima_of_collected_cells_are_those_of_the_surface():
    """Losses are parabolas in log parameters, lowest at width 64 for dense, at 80 and by 0.02 nats for mod."""
    cells_ = [
        record(b, variant, width, base + 0.2 * np.log(width / best) ** 2)
        for b, base in ((3e12, 1.5), (1e13, 1.4))
        for variant, best, base in (("dense", 64, base), ("mod", 80, base - 0.02))
        for width in (40, 48, 64, 80, 96, 112)
    ]
    panels = {
        size: [isoflop_results.panel(cells_, loss, size) for loss in isoflop_results.LOSSES] for size in ("parameters",)
    }
    topk, causal = panels["parameters"]
    assert topk.optima[3e12, "dense"].size == pytest.approx(48 * 64**2, rel=0.02)
    assert topk.optima[1e13, "mod"].size == pytest.approx(48 * 80**2, rel=0.02)
    assert causal.optima[3e12, "mod"].loss == pytest.approx(1.49, abs=1e-3)
    [line] = [x for x in isoflop_results.optimum_table(panels) if x.startswith("| 3e12 | mod | top-k")]
    assert "| -0.0200 [" in line
    law = isoflop_results.power_laws(topk, ["dense"])["dense", "loss"]
    assert law.exponent == pytest.approx(np.log(1.4 / 1.5) / np.log(1e13 / 3e12), rel=1e-3)


def test_cells_of_two_corpora_are_not_mixed():
    isoflop_results.check_one_corpus([record(1e9, "dense", 8, 2.0), {"name": "not done"}])
    with pytest.raises(DataError, match=r"different corpora.*dddddddddddd: .*eeeeeeeeeeee: "):
        isoflop_results.check_one_corpus([record(1e9, "dense", 8, 2.0), record(1e9, "mod", 8, 2.0, digest="e" * 64)])


def test_the_learning_rate_check_is_a_table_of_its_own():
    lines = isoflop_results.rate_table([record(1e9, "mod", 8, 2.0), record(1e9, "mod", 8, 2.1, rate=2)])
    assert lines[-1] == "| 1e9 | mod | 8 | 0 | 2.0000, 2.0100 | 2.1000, 2.1100 |"


def test_what_is_not_there_is_listed(planned):
    out, _ = planned
    said = call("collect", out)
    rows = plan_of(out)
    assert said.startswith(f"0 of {len(rows)} cells are done.")
    assert all(f"- not done: {row['name']}: missing" in said for row in rows)
    assert len(json.loads((out / "cells.json").read_text())) == len(rows)


def kill_at_random(out: pathlib.Path, names: list[str], runner: subprocess.Popen) -> int:
    """Kills each of these cells' runs once, at some moment after it has begun; returns how many."""
    killed, rng = set(), random.Random(0)
    while runner.poll() is None and len(killed) < len(names):
        for name in set(names) - killed:
            claim = out / name / "claim.json"
            if claim.exists() and (found := re.search(r'"pid": (\d+)', claim.read_text())):
                time.sleep(rng.uniform(0, 3))
                os.kill(int(found[1]), signal.SIGKILL)
                killed.add(name)
        time.sleep(0.05)
    return len(killed)


@pytest.mark.slow
def test_killed_cells_change_no_byte_and_two_runners_train_no_cell_twice(tmp_path):
    shared, killed = tmp_path / "shared", tmp_path / "killed"
    for out in (shared, killed):
        call("plan", out, *SMALL[:3], "--widths=8", "--mfu=0.5", "--device=H100")
    names = [row["name"] for row in plan_of(shared)]

    options = dict(OPTIONS, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    runners = [subprocess.Popen(study("run", shared), **options) for _ in range(2)]
    for runner in runners:
        assert "2 of 2 cells are done" in runner.communicate()[0]
    for name in names:
        log = (shared / f"{name}.log").read_text()
        assert (log.count("FRESH RUN"), log.count("RESUMED")) == (1, 0)
        steps = [row["step"] for row in read_metrics(shared / name / "metrics.jsonl") if "train/loss" in row]
        assert len(steps) == len(set(steps))

    with subprocess.Popen(study("run", killed), **options) as runner:
        assert kill_at_random(killed, random.Random(1).sample(names, 1), runner) == 1
        assert "2 of 2 cells are done" not in runner.communicate()[0]  # so the kills did what they should
    assert "unfinished" in call("collect", killed)
    with subprocess.Popen(study("run", killed), **options) as runner:
        assert "2 of 2 cells are done" in runner.communicate()[0]
    for out in (shared, killed):
        call("collect", out)
    for name in ("table.md", "cells.json", "fits.json", "loss_by_parameters.png"):
        assert (shared / name).read_bytes() == (killed / name).read_bytes(), name
