"""Files for other programs: strict JSON everywhere, whole or not at all, and a place that is checked first."""

import ast
import json
import math
import os
import pathlib
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest

from mod_jax import outputs
from mod_jax.errors import ConfigError, StorageError

ROOT = pathlib.Path(__file__).resolve().parents[1]


def refuse(constant):
    raise AssertionError(f"{constant} is no JSON")


def test_what_is_not_finite_becomes_a_string_at_any_depth_and_in_any_array():
    value = {
        "plain": [1, "a", None, True, 0.5],
        "python": [math.nan, (math.inf, -math.inf)],
        "numpy": {"scalar": np.float32(np.nan), "array": np.array([[1.0, np.inf]]), "int": np.int64(3)},
        "jax": jnp.array([1.5, -jnp.inf], jnp.bfloat16),
    }
    read = json.loads(outputs.to_json(value), parse_constant=refuse)
    assert read == {
        "plain": [1, "a", None, True, 0.5],
        "python": ["NaN", ["Infinity", "-Infinity"]],
        "numpy": {"scalar": "NaN", "array": [[1.0, "Infinity"]], "int": 3},
        "jax": [1.5, "-Infinity"],
    }
    assert math.isnan(outputs.NON_FINITE[read["python"][0]])


def test_nobody_else_encodes_json():
    places = [ROOT / name for name in ("mod_jax", "experiments", "configs")]
    found = []
    for path in sorted(path for place in places for path in place.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            called = isinstance(node, ast.Attribute) and node.attr in ("dump", "dumps")
            imported = isinstance(node, ast.ImportFrom) and node.module == "json"
            if imported or (called and isinstance(node.value, ast.Name) and node.value.id == "json"):
                found.append(path.relative_to(ROOT).as_posix())
    assert set(found) == {"mod_jax/outputs.py"}


def test_a_file_is_the_old_or_the_new_one_and_a_failed_write_leaves_nothing(tmp_path, monkeypatch):
    path = tmp_path / "x.json"
    outputs.write_json(path, {"old": 1})

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(outputs.os, "fsync", full)
    with pytest.raises(StorageError, match=r"x\.json: cannot be written \(No space left on device\)"):
        outputs.write_json(path, {"new": 2})
    assert json.loads(path.read_text()) == {"old": 1}
    assert os.listdir(tmp_path) == ["x.json"]


def test_a_link_stays_a_link(tmp_path):
    (tmp_path / "link.json").symlink_to(tmp_path / "target.json")
    outputs.check_place("out", tmp_path / "link.json")
    outputs.write_json(tmp_path / "link.json", [1])
    assert (tmp_path / "link.json").is_symlink()
    assert json.loads((tmp_path / "target.json").read_text()) == [1]


def test_a_pipe_is_written_to_and_stays():
    code = (
        "from mod_jax import outputs; outputs.check_place('out', '/dev/stdout'); outputs.write_json('/dev/stdout', [1])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, json.loads(done.stdout)) == (0, [1]), done.stderr


def test_a_place_is_made_or_refused_before_the_work(tmp_path):
    outputs.check_place("out", tmp_path / "missing" / "folder" / "x.json")
    assert os.listdir(tmp_path / "missing" / "folder") == []
    (tmp_path / "file").write_text("")
    for bad, cause in (
        (tmp_path / "file" / "x.json", "(Not a directory|File exists)"),
        (tmp_path, "must be a file"),
        ("", "must be a file"),
        (tmp_path / ("x" * 300), "File name too long"),
    ):
        with pytest.raises(ConfigError, match=rf"out = .*: .*{cause}"):
            outputs.check_place("out", bad)
    assert outputs.check_folder("out", tmp_path / "new") == tmp_path / "new"
    assert (tmp_path / "new").is_dir()
