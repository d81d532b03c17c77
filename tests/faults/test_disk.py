"""A disk that is full, read-only or gone: one line that names the folder, exit code 4, and older steps survive."""

import os
import pathlib
import random
import shutil
import subprocess

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import untrained
from harness import SAVED, STEPPING, Run, newest_step

from mod_jax.errors import ConfigError, StorageError
from mod_jax.exporting.folder import export
from mod_jax.training.checkpoint import Checkpointer

# Orbax leaves futures of a failed write unawaited; pytest reports them from whichever test runs next.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

MINUTES = {"train.steps": 100_000, "train.log_every": 1, "train.eval_every": 0, "train.save_every": 2}


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 1 MiB in memory."""
    place = tmp_path / "disk"
    place.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", place], capture_output=True, check=False)
    if made.returncode:
        pytest.skip(f"no file system may be mounted here: {made.stderr.decode().strip()}")
    yield place
    subprocess.run(["umount", "--lazy", place], check=True)


def fill(disk: pathlib.Path, leave: int) -> pathlib.Path:
    """Writes a file that leaves so many bytes free."""
    path = disk / "filler"
    path.write_bytes(bytes(max(0, shutil.disk_usage(disk).free - leave)))
    return path


def make_state(step: int) -> dict:
    return {"step": jnp.int32(step), "params": {"w": jax.random.normal(jax.random.key(step), (16, 1024))}}


def test_a_disk_that_fills_up_at_any_byte_of_a_save(small_disk, monkeypatch):
    """The size is checked first; here the space runs out later, at a byte that chance chooses."""
    wanted = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), make_state(0))
    chance, failed = random.Random(0), []
    monkeypatch.setattr(Checkpointer, "check_space", lambda self, state: None)
    with Checkpointer(small_disk / "run", keep=1) as checkpointer:
        checkpointer.save(1, make_state(1), {})
        checkpointer.wait()
        for step in range(2, 14):
            filler = fill(small_disk, leave=chance.randrange(160_000))
            try:
                checkpointer.save(step, make_state(step), {})
                checkpointer.wait()
            except StorageError as error:
                failed.append(str(error))
            filler.unlink()
            restored = checkpointer.restore(wanted)
            np.testing.assert_array_equal(restored.state["params"]["w"], make_state(restored.step)["params"]["w"])
            assert [restored.step] == checkpointer.all_steps()  # nothing half written is left to take room
        checkpointer.save(14, make_state(14), {})
        assert checkpointer.all_steps() == [14]
    assert len(failed) >= 3


def refused(run: Run, what: str) -> None:
    assert run.end() == [4], run.output()
    last = run.output().splitlines()[-1]
    assert last.startswith(f"error: {run.workdir}"), run.output()
    assert what in last
    assert "Traceback" not in run.output()


@pytest.mark.slow
def test_a_run_on_a_disk_that_fills_up_ends_with_one_line_and_keeps_its_steps(small_disk):
    """Rows are lost first: the disk fills between two saves. With room again, the same command goes on."""
    workdir = small_disk / "run"
    with Run(workdir, MINUTES | {"train.save_every": 50}) as run:
        run.wait_for(SAVED)
        filler = fill(small_disk, leave=0)
        refused(run, "No space left on device")
    filler.unlink()
    step = newest_step(workdir)
    assert step >= 50
    with Run(workdir, MINUTES) as run:
        run.wait_for(rf"RESUMED step {step} of")
        run.wait_for(STEPPING)


@pytest.mark.slow
def test_a_run_whose_folder_is_removed_ends_with_one_line(tmp_path):
    workdir = tmp_path / "run"
    with Run(workdir, MINUTES) as run:
        run.wait_for(SAVED)
        workdir.rename(tmp_path / "moved")
        refused(run, "checkpoints")
    assert newest_step(tmp_path / "moved") >= 2


@pytest.mark.slow
def test_an_export_to_a_disk_that_fills_up_is_one_line_and_leaves_nothing(small_disk):
    model = untrained.build_model()
    for leave in (40_000, 8_192, 0):
        filler = fill(small_disk, leave)
        with pytest.raises((StorageError, ConfigError), match="No space left on device"):
            export(model, small_disk / "out")
        filler.unlink()
        assert list(small_disk.iterdir()) == []
    export(model, small_disk / "out")


def test_a_disk_that_may_not_be_written_is_refused_before_anything_is_prepared(small_disk):
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    with Run(small_disk) as run:
        refused(run, "read-only file system")
        assert not run.reached("corpus")
    assert os.listdir(small_disk) == []
