"""The doctor says what is wrong with a machine, and nothing of its secrets."""

import os
import pathlib
import shutil
import subprocess
import sys

import jax.numpy as jnp
import pytest
from faults.harness import QUICK_COMPILER

from mod_jax import doctor

ROOT = pathlib.Path(__file__).resolve().parents[1]


def test_a_report_has_a_line_per_check_and_no_secret(tmp_path):
    """A whole process with one folder that cannot be written: that check fails, the others still report."""
    (tmp_path / "file").write_text("")
    command = [sys.executable, "-m", "mod_jax.doctor", f"--workdir={tmp_path}/file/run"]
    environment = os.environ | {"WANDB_API_KEY": "hunter2", "MOD_JAX_CACHE": str(tmp_path / "cache")}
    environment |= {"PYTHONPATH": str(ROOT), "XLA_FLAGS": QUICK_COMPILER}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    levels = {line.split()[1]: line.split()[0] for line in done.stdout.splitlines()[:-1]}
    assert " ".join(levels) == "versions settings devices memory cache data workdir clock training", done.stderr
    assert [name for name, level in levels.items() if level == "FAIL"] == ["workdir"], done.stdout
    assert done.stdout.splitlines()[-1] == "FAILED: workdir"
    assert done.returncode == 1
    assert "restored bit for bit" in done.stdout
    assert "hunter2" not in done.stdout + done.stderr


def test_whatever_a_check_raises_is_a_finding():
    def check():
        raise ZeroDivisionError("division\nby zero")

    assert doctor.examine(check) == ("FAIL", "ZeroDivisionError: division by zero")


@pytest.mark.parametrize(("free", "level"), [(2**20, "FAIL"), (2**30, "WARN"), (2**40, "ok")])
def test_a_disk_with_little_room_is_told(tmp_path, monkeypatch, free, level):
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(2**41, 2**40, free))
    assert doctor.check_folder(tmp_path / "not" / "yet")[0] == level
    assert list(tmp_path.iterdir()) == []


def test_a_clock_before_the_source_is_told(monkeypatch):
    monkeypatch.setattr(doctor.time, "time", lambda: 0.0)
    assert doctor.check_clock()[0] == "WARN"


def test_one_differing_bit_is_seen():
    one = {"a": jnp.zeros(3), "b": jnp.ones(2)}
    assert doctor.different_leaves(one, {"a": jnp.zeros(3), "b": jnp.ones(2)}) == []
    assert doctor.different_leaves(one, {"a": jnp.array([0.0, -0.0, 0.0]), "b": jnp.ones(2)}) == ["['a']"]
