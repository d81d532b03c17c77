"""The plan command: what it refuses, what it reports, and, where libtpu is installed, what it says of a real slice."""

import json
import math
import os
import pathlib
import re
import subprocess
import sys

import jax
import numpy as np
import pytest

from mod_jax import sharding
from mod_jax.config import MeshConfig
from mod_jax.errors import ConfigError
from mod_jax.planning import topology
from mod_jax.planning import train_step as plan
from mod_jax.planning.collectives import Collective, token_movers

ROOT = pathlib.Path(__file__).resolve().parents[2]
FSDP = {"mesh.data": 1, "mesh.fsdp": -1}
SMOKE = "--config=configs/smoke.py"
REFUSED = "RESOURCE_EXHAUSTED: the total memory required (33.04G) exceeds available HBM (15.75G)."

# Imports once, then runs each command in a child of its own: a fork before JAX has a backend or a thread.
RUNNER = """
import json, os, sys
from absl import app
from mod_jax import cli, plan

for number, arguments in enumerate(json.loads(sys.argv[1])):
    if (child := os.fork()) == 0:
        for stream in (1, 2):
            os.dup2(os.open(f"{sys.argv[2]}/{number}.{stream}", os.O_WRONLY | os.O_CREAT), stream)
        sys.argv = ["mod_jax.plan", *arguments]
        app.run(plan.main, flags_parser=cli.parse_flags)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
COMMANDS = [
    ([SMOKE, "--topology=v5e:32x32"], 2, "error: --topology=v5e:32x32: no such product; must be one of v5e:1x1, "),
    ([SMOKE, "--topology=v5e:2x2"], 2, "error: config.model.vocab_size = 0: planning reads no corpus; set it"),
    ([SMOKE], 2, "error: --topology is missing; for example --topology=v5e:4x4, and --list shows all"),
    (["--topology=v5e:2x2"], 2, "error: --config is missing"),
    ([SMOKE, "--topology=v5e:2x2", "--config.model.widht=3"], 2, "did you mean config.model.width?"),
    (
        [SMOKE, "--topology=v5e:2x2", "--batch=4"],
        2,
        "error: --batch needs --program=decode; a train step has --config.",
    ),
    ([SMOKE, "--topology=v5e:2x2", "--program=decode", "--batch=0"], 2, "error: --batch=0: must be >= 1"),
    (
        [SMOKE, "--topology=v5e:2x2", "--program=decode", "--search"],
        2,
        "error: --search compares ways to train",
    ),
    ([SMOKE, "--topology=v5e:2x2", "--search_limit=3"], 2, "error: --search_limit needs --search"),
    ([SMOKE, "--topology=v5e:2x2", "--search", "--batch=4"], 2, "error: --batch needs --program=decode"),
    ([SMOKE, "--topology=v5e:2x2", "--program=serve"], 2, "should be one of <train|decode|prefill>"),
    (["--list"], 0, "v6e:16x16      256   31.24 GiB  v6e-256"),
]


def test_commands_that_need_no_compiler(tmp_path):
    arguments = json.dumps([command for command, _, _ in COMMANDS])
    command = [sys.executable, "-c", RUNNER, arguments, str(tmp_path)]
    codes = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    for number, (arguments, code, text) in enumerate(COMMANDS):
        out, err = ((tmp_path / f"{number}.{stream}").read_text() for stream in (1, 2))
        assert int(codes[number]) == code, err
        assert text in (err if code else out), arguments
        assert "Traceback" not in err


# The mesh.


@pytest.mark.parametrize(
    ("changes", "devices", "mesh"),
    [
        ({}, 8, MeshConfig(-1, 1, 1)),  # as it is
        ({}, 16, MeshConfig(8, 1, 2)),  # 8 rows on 16 devices
        (FSDP, 16, MeshConfig(1, 8, 2)),
        ({"mesh.data": 2}, 4, MeshConfig(4, 1, 1)),  # a run on some of a pod's chips is no run on a pod
        ({"mesh.expert": 2, "model.layout": "E", "routing.predictor": False}, 16, MeshConfig(4, 1, 2, 2)),
    ],
)
def test_a_mesh_that_covers_the_slice(tiny_config, changes, devices, mesh):
    config = tiny_config(**changes)
    found, note = plan.with_workable_mesh(config, devices)
    assert found.mesh == mesh
    assert bool(note) == (found != config)
    if note:
        assert (
            f"--config.mesh.data={mesh.data} --config.mesh.fsdp={mesh.fsdp} --config.mesh.tensor={mesh.tensor}" in note
        )


def test_a_slice_that_no_mesh_covers_is_refused_in_the_words_of_the_config(tiny_config):
    with pytest.raises(ConfigError, match=r"config.train.batch_size = 8: each of 1 micro-batches has 8 rows"):
        plan.with_workable_mesh(tiny_config(), 256)


# The report, with this machine's devices in the place of a slice.


@pytest.fixture
def report(tiny_config, tmp_path, devices_here):
    """A function of config changes that plans for four devices."""

    def make(**changes):
        config = tiny_config(**{**FSDP, "model.vocab_size": 64, "data.cache_dir": str(tmp_path), **changes})
        return plan.make_report(config, "v5e-4")

    return make


def test_a_report(report):
    found = json.loads(json.dumps(report()))
    assert found["topology"]["mesh"] == {"data": 1, "fsdp": 4, "tensor": 1, "expert": 1}
    assert (found["topology"]["chips"], found["topology"]["devices"], found["layout"]) == (4, 4, "FRFR")
    memory = found["memory"]
    assert memory["needed"] == memory["argument"] + memory["temp"] + memory["output"] - memory["alias"]
    # The state of four devices: three float32 per parameter, a few of which are too small to be split.
    assert found["parameters"]["total"] * 12 / 4 < memory["state"] < found["parameters"]["total"] * 12 / 2
    assert memory["state"] <= memory["argument"]
    assert 0 <= memory["whole_state"] - found["parameters"]["total"] * 12 < 100  # counters
    assert found["flops"]["compiled"] == pytest.approx(found["flops"]["model"], rel=0.01)
    assert found["flops"]["compiled_loops_once"] < found["flops"]["model"]
    assert {tuple(entry["axes"]) for entry in found["collectives"]} == {("fsdp",)}
    assert found["token_movers"] == []
    assert found["fits"]
    assert found["estimate"]["seconds_hidden"] < found["estimate"]["seconds_exposed"]
    assert found["notes"][0] == "v5e-4 is v5e:2x2 (chips)"

    text = plan.describe(found)
    assert max(map(len, text.splitlines())) <= 120
    assert text.splitlines()[-1].startswith("verdict   FITS on v5e:2x2: 15.7")
    for start in ("target    v5e:2x2: 4 chips, 4 devices", "routing   no collective", "note      v5e-4 is v5e:2x2"):
        assert f"\n{start}" in f"\n{text}"
    assert "not a measurement" in " ".join(text.split())


def test_the_scales_of_queries_and_keys_may_be_summed_before_their_heads_are(tiny_config):
    """As a TPU's program for model.remat = "dots" does: heads of a chip x head_dim. Tokens of such a size are none."""
    config = tiny_config(**{"model.num_heads": 40, "model.width": 320, "model.head_dim": 16, "mesh.tensor": 2})
    mesh = sharding.make_mesh(config, jax.devices()[:2])
    shapes = plan.gradient_shapes(config, mesh, {})
    for shape, moves in (((20, 16), False), ((40, 16), False), ((20, 17), True), ((21, 16), True)):
        summed = Collective("all-reduce", "f32", shape, 4 * math.prod(shape), ("fsdp",))
        assert bool(token_movers([summed], shapes, plan.BATCH_AXES)) == moves
    bare = tiny_config(**{"model.qk_norm": False, "mesh.tensor": 2})
    assert plan.gradient_shapes(bare, mesh, {}) == []


def test_the_same_plan_is_compiled_once(report):
    first, again = report(), report()
    assert (first["compile"]["cached"], again["compile"]["cached"]) == (False, True)
    assert {**first, "compile": 0} == {**again, "compile": 0}
    assert "by an earlier run" in plan.describe(again)


def test_micro_batches_multiply_what_their_loop_holds(report):
    """And so do the chunks of the loss: a row a device, 2 positions at a time. No note wonders about 2 or 8 trips."""
    once, twice = report(), report(**{"train.accumulation": 2, "train.loss_chunk": 2})
    wondered = re.findall(r"\d+", " ".join(note for note in twice["notes"] if "trips are neither" in note))
    assert not {"2", "8"} & set(wondered)
    assert twice["flops"]["model"] == once["flops"]["model"]
    assert twice["flops"]["compiled"] == pytest.approx(once["flops"]["compiled"], rel=0.01)


def test_what_does_not_fit_is_an_answer_with_advice(report, tiny_config, monkeypatch):
    refused = topology.Compiled("", {}, 0.0, 1.0, 1.0, REFUSED)
    monkeypatch.setattr(topology, "compile_for", lambda *arguments: refused)
    found = report(**{"train.batch_size": 16, "mesh.data": 4, "mesh.fsdp": 1})
    assert not found["fits"]
    text = " ".join(plan.describe(found).splitlines()[-3:])
    assert "DOES NOT FIT on v5e:2x2: RESOURCE_EXHAUSTED" in text
    advice = plan.verdict(tiny_config(), found).partition("; try ")[2].split(", then ")
    assert [piece.split("=")[0] for piece in advice] == [
        "--config.model.remat",
        "--config.train.accumulation",
        "--config.mesh.data",
        "a larger slice",
    ]
    # 33.04 of 15.75 GiB with 16 rows a chip: four micro-batches.
    many_rows = plan.verdict(tiny_config(**{"train.batch_size": 64}), found)
    assert "--config.train.accumulation=4, then" in many_rows
    # What is left when everything has been done.
    found["topology"]["mesh"] = {"data": 1, "fsdp": 16, "tensor": 1, "expert": 1}
    assert plan.verdict(tiny_config(**{"model.remat": "full"}), found).endswith("(15.75G).; try a larger slice")


def test_a_copy_of_the_state_on_every_chip_is_the_first_thing_to_change(report, tiny_config):
    found = {**report(), "fits": False}
    found["topology"]["mesh"] = {"data": 4, "fsdp": 1, "tensor": 1, "expert": 1}
    found["memory"] |= {"needed": 30 * 2**30, "state": 12 * 2**30}
    advice = plan.verdict(tiny_config(), found)
    assert "30.00 GiB of 15.75 GiB a chip; try --config.mesh.data=1 --config.mesh.fsdp=-1" in advice


def test_a_state_that_no_layout_fits_needs_a_larger_slice(report, tiny_config):
    """48 GiB: four chips of 15.75 GiB, not two."""
    found = {**report(), "fits": False}
    found["topology"] |= {"devices": 2, "mesh": {"data": 1, "fsdp": 4, "tensor": 2, "expert": 1}}
    found["memory"] |= {"needed": 30 * 2**30, "whole_state": 48 * 2**30}
    assert plan.verdict(tiny_config(), found) == (
        "DOES NOT FIT on v5e:2x2: parameters and optimizer alone take 48.00 GiB, 4 x 15.75 GiB, and a step needs room "
        "beside them; try a larger slice"
    )
    found["topology"]["devices"] = 4
    assert "alone" not in plan.verdict(tiny_config(), found)


def test_a_collective_of_tokens_is_shouted_about(report):
    found = report()
    found["token_movers"] = ["all-gather s32[8, 4] over data (gather)"]
    assert "1 COLLECTIVES MOVE TOKENS OR SCORES" in plan.describe(found)


def test_little_room_is_called_tight(report, tiny_config):
    found = report()
    found["memory"]["needed"] = 15 * 2**30
    assert plan.verdict(tiny_config(), found).endswith("0.75 GiB a chip to spare (tight: evaluation needs room too)")


# A real slice.

CONFIG = """
from mod_jax.config import default_config

def get_config():
    config = default_config()
    config.model.update(vocab_size=512, width=128, depth=4, dtype="bfloat16", tie_embedding=True)
    config.routing.aux_weight = 0.01
    config.data.seq_len = 128
    config.train.update(steps=10, batch_size=8)
    config.mesh.update(data=1, fsdp=-1)
    return config
"""


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    """(exit code, stdout, stderr) of three commands, of which the first two compile at the same time."""
    pytest.importorskip("libtpu")
    folder = tmp_path_factory.mktemp("plan")
    (folder / "config.py").write_text(CONFIG)
    base = [sys.executable, "-m", "mod_jax.plan", f"--config={folder}/config.py"]
    environment = {**os.environ, "MOD_JAX_CACHE": str(folder / "cache")}
    environment.pop("XLA_FLAGS")  # eight devices on CPU and other options that a user does not set

    def start(*arguments):
        pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        return subprocess.Popen([*base, *arguments], cwd=ROOT, env=environment, **pipes)

    def finish(process):
        out, err = process.communicate(timeout=900)
        return process.returncode, out, err

    plain = ("--topology=v5e:2x2", "--json")
    first, second = start(*plain), start("--topology=v6e-4", "--config.model.remat=full")
    results = {"v5e": finish(first), "v6e": finish(second)}
    return results | {"again": finish(start(*plain))}


@pytest.mark.slow
def test_two_plans_at_once_exit_0_and_stderr_holds_progress_only(planned):
    for code, _, err in planned.values():
        assert code == 0, err
        assert all(line.startswith("compiling for v") for line in err.splitlines()), err


@pytest.mark.slow
def test_no_token_moves_and_no_sort_runs_again_on_the_slice(planned):
    found = json.loads(planned["v5e"][1])
    assert found["token_movers"] == []
    assert found["sorts"] == 2 * 2  # top-k and putting it in order, for each of two routed blocks, forward only
    assert {"all-gather", "reduce-scatter"} <= {entry["kind"] for entry in found["collectives"]}
    assert found["notes"] == []
    text = planned["v6e"][1]  # the same with everything recomputed in the backward pass
    assert "no collective: only weights, gradients and sums" in text
    assert "4 sorts a step" in " ".join(text.split())
    assert text.splitlines()[-1].startswith("verdict   FITS on v6e:2x2: 31.2")


@pytest.mark.slow
def test_the_compiled_program_has_the_flops_that_we_count(planned):
    """128 tokens are one chunk of attention: nothing is skipped, nothing recomputed, and both counts are of T * T."""
    flops = json.loads(planned["v5e"][1])["flops"]
    np.testing.assert_allclose(flops["compiled"], flops["model"], rtol=0.03)
    assert flops["compiled_loops_once"] < 0.75 * flops["model"]


@pytest.mark.slow
def test_the_second_time_nothing_is_compiled(planned):
    (_, first, _), (_, again, err) = planned["v5e"], planned["again"]
    first, again = json.loads(first), json.loads(again)
    assert err == ""
    assert again["compile"] == {**first["compile"], "cached": True}
    assert {**first, "compile": 0} == {**again, "compile": 0}


@pytest.mark.slow
def test_what_the_compiler_refuses_for_want_of_memory_is_planned_all_the_same(tmp_path):
    pytest.importorskip("libtpu")
    command = [sys.executable, "-m", "mod_jax.plan", "--config=configs/paper.py:size=60m", "--topology=v5e:1x1"]
    command.append("--config.model.remat=none")
    environment = {**os.environ, "MOD_JAX_CACHE": str(tmp_path)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    assert "DOES NOT FIT on v5e:1x1: RESOURCE_EXHAUSTED" in done.stdout
    assert "try --config.model.remat=full" in " ".join(done.stdout.split())
