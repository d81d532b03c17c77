"""The cache: a folder of everything that can be made again, in which each entry appears whole or not at all.

An entry is built in a *scratch* folder beside its final place, ENTRY.<32 hex digits>, and renamed. Its process holds a
lock on the scratch folder, so that one left by a killed process is told from one that is still being filled.
"""

import contextlib
import fcntl
import os
import pathlib
import re
import shutil
import time
import uuid
from collections.abc import Iterator

from absl import logging

from mod_jax import paths
from mod_jax.config import DataConfig
from mod_jax.errors import DataError

GRACE = 60.0  # seconds between the making of a scratch folder and its lock, at the very most


def cache_root(data: DataConfig) -> pathlib.Path:
    """The folder of the cache, made if it is missing: the key, or $MOD_JAX_CACHE, or ~/.cache/mod_jax.

    Raises:
      ConfigError: if it is not on this machine's disks.
      DataError: if it cannot be made.
    """
    if data.cache_dir:
        root = paths.local_folder("config.data.cache_dir", data.cache_dir)
    elif os.environ.get("MOD_JAX_CACHE"):
        root = paths.local_folder("MOD_JAX_CACHE", os.environ["MOD_JAX_CACHE"])
    else:
        try:
            root = pathlib.Path("~/.cache/mod_jax").expanduser()
        except RuntimeError:
            raise DataError("no home folder for the cache is known here; set MOD_JAX_CACHE to a folder") from None
    with naming_the_cache(root):
        root.mkdir(parents=True, exist_ok=True)
    return root


@contextlib.contextmanager
def naming_the_cache(root: pathlib.Path) -> Iterator[None]:
    """Turns a failure to write into one line that says what to do about it."""
    try:
        yield
    except OSError as error:
        cause = error.strerror or str(error)
        raise DataError(f"cannot write to the cache {root} ({cause}); set MOD_JAX_CACHE to another folder") from error


@contextlib.contextmanager
def scratch_folder(final: pathlib.Path) -> Iterator[pathlib.Path]:
    """A new folder beside `final`, to be filled and renamed to it; what is left at the end is removed."""
    remove_stale(final.parent)
    scratch = final.with_name(f"{final.name}.{uuid.uuid4().hex}")
    scratch.mkdir()
    lock = os.open(scratch, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # where a disk has no locks, what killed processes leave stays
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield scratch
    finally:
        os.close(lock)
        shutil.rmtree(scratch, ignore_errors=True)


def remove_stale(root: pathlib.Path) -> None:
    """Removes the scratch folders whose processes are gone."""
    for path in root.iterdir():
        if not re.fullmatch(r".+\.[0-9a-f]{32}", path.name) or not path.is_dir() or path.is_symlink():
            continue
        with contextlib.suppress(OSError):  # another process removed it first, or its lock is held
            if time.time() - path.stat().st_mtime < GRACE:
                continue
            lock = os.open(path, os.O_RDONLY)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                logging.info("removing what a killed process left in %s", path)
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(lock)
