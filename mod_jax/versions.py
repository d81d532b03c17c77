"""What is running: the commit of this source, and the versions of the libraries below it."""

import functools
import importlib.metadata
import os
import pathlib
import platform
import subprocess

import mod_jax

LIBRARIES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")
OPTIONAL = ("libtpu", "tensorflow-datasets", "sentencepiece", "tokenizers", "tensorboardX", "wandb", "trackio")


@functools.cache  # what runs is what was imported, and a save should not wait for git
def commit() -> str:
    """The checked-out commit of this source, "-dirty" if it was edited; "unknown" where the source is in no checkout.

    Only the repository whose top is our own folder is asked: a package that is installed below another project's work
    tree is not of that project's commit.
    """
    root = pathlib.Path(mod_jax.__file__).resolve().parents[1]
    if not (root / "setup.py").exists():
        return "unknown"
    # No variable of a caller (a git hook has GIT_DIR and GIT_WORK_TREE) and no folder above ours leads elsewhere.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    environment |= {"GIT_CEILING_DIRECTORIES": str(root.parent), "GIT_OPTIONAL_LOCKS": "0"}

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(root), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10, env=environment)
        return done.stdout.strip()

    try:
        git("ls-files", "--error-unmatch", "mod_jax/__init__.py", "setup.py")
        return git("describe", "--always", "--dirty", "--abbrev=12", "--exclude=*")
    except (OSError, ValueError, subprocess.SubprocessError):
        return "unknown"


def installed() -> dict[str, str]:
    """Versions by name: Python, mod_jax with its commit, the libraries, and the optional ones that are there."""
    found = {"python": platform.python_version(), "mod_jax": f"{mod_jax.__version__}, commit {commit()}"}
    for name in (*LIBRARIES, *OPTIONAL):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            if name in LIBRARIES:
                found[name] = "missing"
    return found
