"""Files that other programs read: strict JSON, written whole or not at all, at a place that is checked before the work.

JSON has no NaN and no infinity: they are written as the strings of NON_FINITE. No other file encodes JSON.
"""

import contextlib
import json
import math
import os
import pathlib
import re
import shutil
from collections.abc import Iterator
from typing import Any

import numpy as np

from mod_jax import buckets, paths
from mod_jax.errors import ConfigError, StorageError

NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def plain(value: Any) -> Any:
    """`value` as JSON can hold it: arrays become lists, their scalars Python's, non-finite numbers strings."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if hasattr(value, "dtype"):  # of NumPy or JAX
        return plain(np.asarray(value).tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def to_json(value: Any, indent: int | None = None) -> str:
    """Strict JSON; any parser reads it."""
    return json.dumps(plain(value), indent=indent, allow_nan=False)


def canonical(value: Any) -> str:
    """The text that digests are taken of: keys sorted. Not for files, since a NaN in it is spelt as Python does."""
    return json.dumps(value, sort_keys=True)


def write_json(path: str | os.PathLike, value: Any) -> None:
    """Writes a JSON file for people to read too. See `write_text`."""
    write_text(path, to_json(value, indent=2) + "\n")


def write_text(path: str | os.PathLike, text: str) -> None:
    """Writes a file that is there whole or not at all, and survives a power cut.

    A pipe or a device (`/dev/stdout`) is written to, not replaced. An object of a bucket is whole by its nature.

    Raises:
      StorageError: names the file and the cause.
    """
    if buckets.is_bucket(path):
        with paths.writing(path):
            buckets.folder("path", os.fspath(path)).write_text(text)
        return
    path = pathlib.Path(path).expanduser()
    try:
        if path.exists() and not path.is_file():
            path.write_text(text, encoding="utf-8")
            return
        path = path.resolve()  # a link stays one
        scratch = _scratch(path)
        try:
            with scratch.open("w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            scratch.replace(path)
        except BaseException:
            scratch.unlink(missing_ok=True)
            raise
        _sync_folder(path.parent)
    except OSError as error:
        raise StorageError(f"{path}: cannot be written ({error.strerror})") from error


def check_place(name: str, path: str | os.PathLike) -> None:
    """Makes sure, before the work, that `write_text(path)` will succeed; makes the folder if it is missing.

    Raises:
      ConfigError: names the flag or argument `name`, its value and the cause.
    """
    if re.match(paths.SCHEME, os.fspath(path)):
        paths.folder_to_write(name, path)
        return
    given, path = path, pathlib.Path(path).expanduser()
    try:
        if not os.fspath(given) or path.is_dir():
            raise ConfigError(f"{name} = {os.fspath(given)!r}: must be a file")
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists() or path.is_file():
            scratch = _scratch(path.resolve())
            scratch.touch()
            scratch.unlink()
    except OSError as error:
        raise ConfigError(f"{name} = {os.fspath(given)!r}: cannot be written ({error.strerror})") from None


def check_folder(name: str, path: str | os.PathLike) -> pathlib.Path:
    """The same for a folder of results, which is made. Returns it, absolute."""
    folder = paths.local_folder(name, path)
    check_place(name, folder / "file")
    return folder


def check_new_folder(name: str, path: str | os.PathLike) -> pathlib.Path:
    """Makes sure, before the work, that `new_folder(path)` will succeed; makes the folders above it. Returns it.

    Raises:
      ConfigError: names the flag or argument `name`, its value and the cause.
    """
    folder = paths.local_folder(name, path)
    given = f"{name} = {os.fspath(path)!r}"
    try:
        if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
            raise ConfigError(f"{given}: is there already, and is not a folder")
        if folder.is_dir() and any(folder.iterdir()):
            raise ConfigError(f"{given}: is there already, and not empty; nothing is overwritten")
        scratch = _scratch(folder)
        scratch.mkdir(parents=True)
        scratch.rmdir()
    except OSError as error:
        raise ConfigError(f"{given}: cannot be written ({error.strerror})") from None
    return folder


@contextlib.contextmanager
def new_folder(folder: pathlib.Path) -> Iterator[pathlib.Path]:
    """A folder to write into, which becomes `folder`, new or empty, when all is written; if not, nothing is left.

    Raises:
      StorageError: names the folder and the cause.
    """
    scratch = _scratch(folder)
    try:
        with paths.writing(folder):
            scratch.mkdir()
            yield scratch
            for path in scratch.iterdir():
                _sync_file(path)
            _sync_folder(scratch)
            scratch.replace(folder)
            _sync_folder(folder.parent)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise


def _sync_file(path: pathlib.Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _scratch(path: pathlib.Path) -> pathlib.Path:
    return path.with_name(f".{path.name}.{os.getpid()}.tmp")


def _sync_folder(folder: pathlib.Path) -> None:
    """Makes a rename survive a power cut, where folders can be synced."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
