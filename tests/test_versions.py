"""The commit recorded with a run is that of this source, never that of a repository around it."""

import os
import pathlib
import shutil
import subprocess
import sys

import jax
import pytest

from mod_jax import versions

ROOT = pathlib.Path(__file__).resolve().parents[1]
ASK = "from mod_jax import versions; print(versions.commit())"


def git(folder, *arguments):
    identity = ["-c", "user.name=x", "-c", "user.email=x@y"]
    clean = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    done = subprocess.run(["git", "-C", folder, *identity, *arguments], check=True, capture_output=True, env=clean)
    return done.stdout.decode().strip()


def recorded(source, **environment):
    environment = os.environ | {"PYTHONPATH": str(source)} | environment
    done = subprocess.run(
        [sys.executable, "-c", ASK], cwd=source, env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


@pytest.fixture
def other(tmp_path):
    """Somebody's repository with one commit."""
    folder = tmp_path / "other"
    folder.mkdir()
    (folder / "setup.py").write_text("")
    git(folder, "init")
    git(folder, "add", "-A")
    git(folder, "commit", "-m", "theirs")
    return folder


def copy_source(to):
    """The package without its subpackages, which `versions` does not import."""
    (to / "mod_jax").mkdir(parents=True)
    shutil.copy(ROOT / "setup.py", to)
    for name in ("__init__.py", "versions.py"):
        shutil.copy(ROOT / "mod_jax" / name, to / "mod_jax")
    return to


def test_a_repository_around_the_package_is_not_asked(other):
    installed = other / ".venv" / "lib" / "site-packages"
    copy_source(installed)
    assert recorded(installed) == "unknown"
    (installed / "setup.py").unlink()
    assert recorded(installed) == "unknown"


def test_a_copy_that_lies_untracked_at_the_top_of_another_repository_is_not_its_commit(other):
    (other / "setup.py").unlink()
    assert recorded(copy_source(other)) == "unknown"


def test_our_own_commit_is_recorded_whatever_git_variables_say(tmp_path, other):
    ours = copy_source(tmp_path / "ours")
    git(ours, "init")
    git(ours, "add", "-A")
    git(ours, "commit", "-m", "ours")
    commit = git(ours, "rev-parse", "--short=12", "HEAD")
    elsewhere = {"GIT_DIR": str(other / ".git"), "GIT_WORK_TREE": str(other)}
    assert recorded(ours) == recorded(ours, **elsewhere) == commit
    (ours / "setup.py").write_text("# edited")
    assert recorded(ours) == f"{commit}-dirty"


def test_versions_name_what_is_installed():
    found = versions.installed()
    assert found["jax"] == jax.__version__
    assert found["mod_jax"].endswith(versions.commit())
