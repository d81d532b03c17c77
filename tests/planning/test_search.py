"""The search: which candidates there are, what is counted of them, which are tried, and what is said of the result."""

import dataclasses
import json
import os
import pathlib
import subprocess
import sys

import jax
import pytest

from mod_jax import sharding
from mod_jax.config import MeshConfig
from mod_jax.errors import ConfigError
from mod_jax.planning import counts, search, topology
from mod_jax.planning.counts import Count

ROOT = pathlib.Path(__file__).resolve().parents[2]
EXPERTS = {"model.layout": "E", "experts.count": 4, "routing.predictor": False}


# What there is to try.


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, {(1, 4, 1), (2, 2, 1), (4, 1, 1), (1, 2, 2), (2, 1, 2)}),  # 2 heads: no tensor 4
        ({"train.batch_size": 2}, {(1, 2, 2), (2, 1, 2)}),
        ({"model.num_heads": 1, "model.width": 6}, {(2, 2, 1), (4, 1, 1)}),  # a width of 6 has no fourth part
        ({"train.batch_size": 6, "model.num_kv_heads": 1}, set()),  # 6 rows for 4 devices, one key/value head for 2
    ],
)
def test_meshes_of_four_devices(tiny_config, changes, expected):
    found = [(mesh.data, mesh.fsdp, mesh.tensor) for mesh in search.meshes(tiny_config(**changes), 4)]
    assert len(found) == len(set(found))
    assert set(found) == expected


def test_experts_have_an_axis_of_their_own(tiny_config):
    found = list(search.meshes(tiny_config(**EXPERTS), 4))
    # Five as above; two experts a device, with two devices more for one of three axes; one expert a device.
    pairs = {(mesh.data, mesh.fsdp, mesh.tensor) for mesh in found if mesh.expert == 2}
    assert [mesh.expert for mesh in found].count(1) == 5
    assert pairs == {(2, 1, 1), (1, 2, 1), (1, 1, 2)}
    assert [mesh for mesh in found if mesh.expert == 4] == [MeshConfig(1, 1, 1, 4)]


def test_candidates_by_hand(tiny_config):
    default = tiny_config(**{"model.vocab_size": 64, "mesh.data": 4})
    found = list(search.candidates(default, jax.devices()[:4]))
    assert len(found) == len(set(found))
    assert default in found
    # 8 rows: 2 a device on three meshes, in 1 or 2 micro-batches; 4 on two meshes, in 1, 2 or 4. 16 positions are one
    # chunk, whatever its length.
    assert len(found) == (3 * 2 + 2 * 3) * 3
    by_rows = {config.train.accumulation for config in found if config.mesh.tensor == 2}
    assert by_rows == {1, 2, 4}
    # 2048 positions are 4 chunks or 1. Of two names for one thing the default's stays.
    long = dataclasses.replace(default, data=dataclasses.replace(default.data, seq_len=2048))
    chunks = {c.train.loss_chunk for c in search.candidates(long, jax.devices()[:4]) if c.train.accumulation == 2}
    assert chunks == {0, 8192}


# What is counted.


def test_what_a_row_leaves_when_everything_is_recomputed(tiny_config):
    """Of each unit: its input, float32 [T, D]; which C of T tokens were taken, and as a mask; and what the losses of
    routing need of each token, four times float32 [T]."""
    changes = {"model.vocab_size": 64, "model.remat": "full", "train.batch_size": 1}
    deep, shallow = (
        counts.kept_per_row(tiny_config(**changes, **{"model.depth": depth}), jax.devices()[0]) for depth in (8, 4)
    )
    assert deep - shallow == 2 * (16 * 16 * 4 + 4 * 4 + 16 + 4 * 16 * 4)


def test_counts_by_remat_and_micro_batches(tiny_config):
    product, devices = topology.find_product("v5e:2x2")[0], jax.devices()[:4]

    def counted(**changes) -> Count:
        config = tiny_config(**{"model.vocab_size": 64, "mesh.data": 4, "data.seq_len": 64, **changes})
        return counts.count(config, product, sharding.make_mesh(config, devices))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(topology, "coordinates", lambda mesh: [(x, y, 0) for x in range(2) for y in range(2)])
        none, dots, full = (counted(**{"model.remat": remat}) for remat in ("none", "dots", "full"))
        assert none.memory > dots.memory > full.memory
        two = counted(**{"train.accumulation": 2})
        assert two.memory < none.memory
        assert two.seconds > none.seconds


# The search, with this machine's devices in the place of a slice.

# Six candidates: a width that has no fourth part leaves two meshes, one row a device leaves one micro-batch, and a row
# is one chunk. All tests together compile them once.
SIX = {
    "model.vocab_size": 64,
    "model.layout": "F",
    "model.depth": 2,
    "model.width": 34,
    "model.num_heads": 1,
    "model.remat": "none",
    "routing.predictor": False,
    "data.seq_len": 128,
    "train.batch_size": 4,
}


@pytest.fixture(scope="module")
def plans(tmp_path_factory):
    return tmp_path_factory.mktemp("plans")


@pytest.fixture
def searched(tiny_config, plans, devices_here):
    """A function of a limit and config changes that searches for four devices."""

    def make(limit, **changes):
        return search.make_report(tiny_config(**{**SIX, "data.cache_dir": str(plans), **changes}), "v5e-4", limit)

    return make


def test_a_search(searched, capsys):
    """What was counted agrees with what was compiled, and the winner with the table."""
    found = json.loads(json.dumps(searched(6)))
    told = capsys.readouterr().err.splitlines()
    assert [line[:13] for line in told if "/6 " in line] == [f"search:   {n}/6" for n in range(1, 7)]
    rows = found["rows"]
    assert found["candidates"] == {"counted": 6, "tried": 6, "too_large": 0, "not_tried": 0}
    assert len({json.dumps([row["mesh"], row["remat"]]) for row in rows}) == 6
    for row in rows:
        assert 0.5 < row["counted"]["memory"] / row["memory"] < 2
        assert row["seconds"] == row["estimate"]["seconds_exposed"]
        assert row["seconds"] >= row["estimate"]["seconds_hidden"]
    assert [row["seconds"] for row in rows] == sorted(row["seconds"] for row in rows)
    [default] = [row for row in rows if row["default"]]
    assert default["mesh"] == {"data": 4, "fsdp": 1, "tensor": 1, "expert": 1}
    assert (default["remat"], default["flags"]["mesh.data"]) == ("none", 4)  # -1 as it was given
    assert found["winner"] == rows[0]
    assert found["winner"]["seconds"] < default["seconds"]  # so small a model takes longer to keep than to make again
    assert found["verdict"].startswith("FASTER THAN THE DEFAULT on v5e:2x2, by estimate: ")
    assert found["verdict"].endswith(" ".join(f"--config.{key}={v}" for key, v in found["winner"]["flags"].items()))

    text = search.describe(found)
    assert max(map(len, text.splitlines())) <= 120
    assert "not a measurement" in " ".join(text.split())
    assert sum(line.endswith("  default") for line in text.splitlines()) == 1
    assert "6 of 6 candidates" in text


def test_the_second_time_nothing_is_compiled_and_the_winner_is_the_default(searched, monkeypatch):
    found = searched(6)["winner"]
    monkeypatch.setattr(topology, "_write", None)  # what a compilation would call
    again = searched(6, **found["flags"])
    assert all(row["compile"]["cached"] for row in again["rows"])
    assert again["winner"]["default"]
    assert (again["winner"]["seconds"], again["winner"]["flags"]) == (found["seconds"], {})
    assert again["verdict"] == "THE DEFAULT WINS on v5e:2x2: none of 5 others tried is estimated faster"


def test_the_limit_counts_the_default(searched):
    found = searched(3)
    assert found["candidates"] == {"counted": 6, "tried": 3, "too_large": 0, "not_tried": 3}
    assert sum(row["default"] for row in found["rows"]) == 1
    assert "3 of 6 candidates; 0 more are too large by count, 3 were not tried" in " ".join(
        search.describe(found).split()
    )
    with pytest.raises(ConfigError, match=r"--search_limit=1: must be >= 2"):
        searched(1)


def test_what_the_compiler_refuses_is_a_row_and_corrects_the_count(searched, monkeypatch):
    """33 GiB in place of a megabyte: the other mesh with the same recomputation is not tried."""
    complaint = "RESOURCE_EXHAUSTED: the total memory required (33.04G) exceeds available HBM (15.75G)."
    compile_for, refused = topology.compile_for, []

    def refuse_all_but_full(lowered, *arguments):
        compiled = compile_for(lowered, *arguments)
        if "optimization_barrier" in lowered.as_text() and not refused:
            return compiled
        refused.append(lowered)
        return topology.Compiled("", {}, 0.0, 1.0, 1.0, complaint)

    monkeypatch.setattr(topology, "compile_for", refuse_all_but_full)
    found = searched(6, **{"model.remat": "full"})
    rows = {row["remat"]: row for row in found["rows"] if row["refused"]}
    assert rows["none"]["memory"] == 33.04 * 2**30
    assert not rows["none"]["fits"]
    assert not found["rows"][-1]["fits"]
    assert found["rows"][0]["fits"]
    assert found["candidates"]["too_large"] > 0
    text = search.describe(found)
    assert "does not fit   33.04 GiB  " in text
    assert max(map(len, text.splitlines())) <= 120


def test_what_fits_too_tightly_does_not_win(searched, monkeypatch):
    """Evaluation needs room beside the state: a faster step that leaves none is shown, and not advised."""
    free = searched(6)
    most = free["winner"]["memory"]
    assert any(row["memory"] < 0.8 * most for row in free["rows"])
    monkeypatch.setitem(topology.CHIPS, "v5e", dataclasses.replace(topology.CHIPS["v5e"], hbm_bytes=most * 1.05))
    found = searched(6)
    assert found["verdict"].startswith("THE DEFAULT DOES NOT FIT on v5e:2x2; the fastest that does: --config.")
    [tight] = [row for row in found["rows"] if row["flags"] == free["winner"]["flags"]]
    assert (tight["fits"], tight["tight"]) == (True, True)
    assert found["winner"] != tight
    assert found["winner"]["default"] or not found["winner"]["tight"]
    assert "tight" in search.describe(found)


def test_a_compiler_that_fails_ends_a_row_not_the_search(searched, monkeypatch):
    compile_for, asked = topology.compile_for, []

    def fail_second(*arguments):
        asked.append(arguments)
        if len(asked) == 2:
            raise jax.errors.JaxRuntimeError("INTERNAL: a fault\nof the compiler")
        return compile_for(*arguments)

    monkeypatch.setattr(topology, "compile_for", fail_second)
    found = searched(3)
    assert found["rows"][-1]["refused"] == "INTERNAL: a fault of the compiler"
    assert "the compiler fails" in search.describe(found)


def test_a_slice_that_nothing_fits(searched, monkeypatch):
    monkeypatch.setitem(topology.CHIPS, "v5e", dataclasses.replace(topology.CHIPS["v5e"], hbm_bytes=1000.0))
    found = searched(2)
    assert found["winner"] is None
    assert found["candidates"]["too_large"] == 5
    assert found["verdict"].startswith("NOTHING THAT WAS TRIED FITS on v5e:2x2")
    assert "does not fit" in search.describe(found)


# A real slice.


@pytest.mark.slow
def test_a_search_for_a_slice(tmp_path):
    pytest.importorskip("libtpu")
    config = (
        "from mod_jax.config import default_config\n\n"
        "def get_config():\n"
        "    config = default_config()\n"
        "    config.model.update(vocab_size=512, width=128, depth=4, num_heads=1, dtype='bfloat16', remat='full')\n"
        "    config.data.seq_len = 128\n"
        "    config.train.update(steps=10, batch_size=8)\n"
        "    return config\n"
    )
    (tmp_path / "config.py").write_text(config)
    command = [sys.executable, "-m", "mod_jax.plan", f"--config={tmp_path}/config.py", "--topology=v5e:2x2"]
    command += ["--search", "--search_limit=3"]
    environment = {**os.environ, "MOD_JAX_CACHE": str(tmp_path / "cache")}
    environment.pop("XLA_FLAGS")

    def run(*arguments):
        done = subprocess.run([*command, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done

    first, again = run("--json"), run()
    found = json.loads(first.stdout)
    [default] = [row for row in found["rows"] if row["default"]]
    assert found["winner"]["seconds"] <= default["seconds"]
    for row in found["rows"]:
        assert row["fits"]
        assert row["token_movers"] == []
        assert row["memory"] < 3 * row["counted"]["memory"]  # much less, for most of so small a model stays on the chip
    assert "compiling for" in first.stderr
    assert "compiling for" not in again.stderr
    assert all(line.startswith("search: ") for line in again.stderr.splitlines())
    assert any(line.startswith("verdict   ") for line in again.stdout.splitlines()[-2:])  # its flags may need two lines
