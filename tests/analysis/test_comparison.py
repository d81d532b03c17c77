"""What is said of several runs: where they differ, what each cost, and which losses may not be compared."""

import json
import subprocess
import sys

import numpy as np
import pytest

from mod_jax import config as config_lib
from mod_jax import outputs
from mod_jax.analysis import comparison
from mod_jax.errors import DataError
from mod_jax.models.model import make_model

DIGEST = "a" * 64
TRAIN = {"train/loss": 3.0, "train/flops": 1e9, "train/tokens": 640, "perf/tokens_per_second": 1234.4}


@pytest.fixture
def write(tmp_path, tiny_config):
    """Writes what a run leaves: write(name, rows, digest=..., **config)."""

    def make(name, rows, digest=DIGEST, **changes):
        config = tiny_config(**changes)
        folder = tmp_path / name
        folder.mkdir()
        about = {"config": config_lib.to_flat_dict(config), "vocab_size": 257, "num_steps": 40}
        outputs.write_json(folder / "config.json", about | {"corpus_digest": digest, "commit": "abc"})
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return folder

    return make


def train_row(step, **more):
    return {"step": step, **TRAIN, "train/flops": 1e9 * step, "train/tokens": 64 * step} | more


def eval_row(step, topk, causal=None):
    row = {"step": step, "eval/topk_loss": topk, "eval/topk_bits_per_byte": topk / np.log(2)}
    if causal is not None:
        row["routing/block01/topk_fraction"] = 0.25
        row["eval/causal_loss/predictor"] = causal
        row["eval/causal_bits_per_byte/predictor"] = causal / np.log(2)
    return row


@pytest.fixture
def two(write):
    dense = write("dense", [train_row(40), eval_row(40, 1.5)], **{"model.layout": "F", "routing.predictor": False})
    mod = write("mod", [train_row(20), eval_row(20, 1.6, 1.7), train_row(30)], **{"optimizer.learning_rate": 0.002})
    return dense, mod


def test_a_row_says_what_a_run_is_and_how_far_it_got(two):
    runs, unreadable = comparison.read_runs(two)
    assert not unreadable
    keys = ["model.layout", "routing.predictor", "optimizer.learning_rate"]
    assert comparison.differing_keys(runs) == keys
    head, dense, mod, last = comparison.table(runs, markdown=True)[0], *comparison.table(runs, markdown=True)[2:4], ""
    assert head.split(" | ")[1:5] == ["step", *keys]
    parameters = [sum(np.prod(leaf.shape) for leaf in leaves(run)) for run in runs]
    cells = ["dense", "40 of 40", "F", "False", "0.003", f"{parameters[0]:,}", "4e+10", "2.56e+03", "1.5000", "1.5000"]
    assert dense.strip("| ").split(" | ")[:10] == cells
    cells = ["mod", "30 of 40", "FR", "True", "0.002", f"{parameters[1]:,}", "3e+10", "1.92e+03", "1.6000 at 20"]
    assert mod.strip("| ").split(" | ")[:12] == [*cells, "1.7000", "predictor", f"{1.6 / np.log(2):.4f}"]
    assert "1,234" in dense
    assert not last


def leaves(run):
    import jax

    return jax.tree.leaves(make_model(run.config, 257).abstract_params)


def test_keys_that_follow_from_another_are_not_columns(write):
    runs, _ = comparison.read_runs([write("a", []), write("b", [], **{"model.width": 32})])
    assert comparison.differing_keys(runs) == ["model.width"]  # head_dim and mlp_dim differ too


@pytest.mark.parametrize(
    ("other", "why"),
    [
        (dict(digest="b" * 64), "corpus bbbbbbbbbbbb"),
        ({"data.eval_windows": 8}, "8 windows"),
        ({"data.seq_len": 8}, "of 8 tokens"),
    ],
)
def test_runs_of_another_held_out_set_are_marked(write, other, why):
    runs, _ = comparison.read_runs([write("a", [eval_row(1, 1.0)]), write("b", [eval_row(1, 1.0)], **other)])
    lines = comparison.table(runs)
    assert lines[-1].startswith("WARNING losses on different held-out sets are not comparable: A: corpus aaaaaaaaaaaa")
    assert why in lines[-1]
    assert [line.split()[-1] for line in lines[1:3]] == ["A", "B"]
    same = comparison.table(runs[:1])
    assert "WARNING" not in same[-1]
    assert "NOT one held-out set" in comparison.draw(runs)._suptitle.get_text()


def test_odd_folders_get_a_line_each_and_the_rest_is_shown(write, tmp_path):
    good = write("good", [train_row(1)])
    (tmp_path / "file").write_text("x")
    (tmp_path / "empty").mkdir()
    broken = write("broken", [])
    (broken / "config.json").write_text('{"config": ')
    newer = write("newer", [])
    about = json.loads((newer / "config.json").read_text())
    about["config"]["model.colour"] = 3
    (newer / "config.json").write_text(json.dumps(about))
    given = [good, tmp_path / "file", tmp_path / "empty", tmp_path / "gone", broken, newer, good, "s3://bucket/run"]
    runs, unreadable = comparison.read_runs(given)
    assert [run.name for run in runs] == ["good"]
    text = "\n".join(unreadable)
    assert len(unreadable) == 6
    for part in (
        "file: is not a folder",
        "empty: has no config.json",
        "gone: does not exist",
        "broken: config.json cannot be read",
        "newer: config.json is of another version: config.model.colour: unknown key",
        "s3:/",
    ):
        assert part in text
    with pytest.raises(DataError, match="gone: does not exist"):
        comparison.read_runs([tmp_path / "gone"])


def test_runs_of_one_name_are_told_apart(write, tmp_path):
    (tmp_path / "more").mkdir()
    first = write("run", [])
    second = write("more/run", [])
    runs, _ = comparison.read_runs([first, second])
    assert [run.name for run in runs] == [str(first), str(second)]


def test_curves_by_flops_tokens_and_seconds(write):
    rows = [
        train_row(1),
        train_row(11, **{"perf/step_seconds": 0.5}),
        eval_row(11, 2.0, 2.25),
        train_row(21, **{"perf/step_seconds": 0.25}),
        eval_row(21, 1.5, 1.625),
    ]
    run = comparison.read_run(write("run", rows), "run")
    expected = {"flops": [1.1e10, 2.1e10], "tokens": [704, 1344], "seconds": [5.0, 7.5]}  # 10 x 0.5, then 10 x 0.25
    for axis, costs in expected.items():
        cost, training, topk, causal = run.curve(axis)
        evaluated = np.isfinite(topk)
        assert (np.isfinite(training) != evaluated).all()
        np.testing.assert_allclose(cost[evaluated], costs)
        np.testing.assert_allclose(topk[evaluated], [2.0, 1.5])
        np.testing.assert_allclose(causal[evaluated], [2.25, 1.625])
        ax = comparison.draw([run], axis).axes[0]
        shown = np.concatenate([line.get_xydata() for line in ax.lines[1:]])
        for point in zip(costs, [2.0, 1.5], strict=True):
            assert np.isclose(shown, point).all(axis=1).any()
        assert ax.get_xlabel() == comparison.AXES[axis]


def test_a_router_without_a_causal_selection_has_no_causal_loss(write):
    row = eval_row(4, 1.5) | {"routing/block01/topk_fraction": 0.25}
    run = comparison.read_run(write("run", [row], **{"routing.gate": "softmax", "routing.predictor": False}), "run")
    assert run.summary()["losses"]["causal"] is None
    assert np.isnan(run.curve("flops")[3]).all()


def test_the_command(two, tmp_path):
    command = [sys.executable, "-m", "mod_jax.compare", *map(str, two), str(tmp_path / "gone"), f"--out={tmp_path}/out"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "not shown: " in done.stdout
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["compare.json", "compare.md", "compare.png"]
    assert [run["name"] for run in json.loads((tmp_path / "out" / "compare.json").read_text())] == ["dense", "mod"]
    done = subprocess.run([sys.executable, "-m", "mod_jax.compare"], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("error: give the workdirs of one or more runs")
