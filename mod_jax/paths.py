"""Folders that a person names: what is refused at the door, and what a file system's errors become."""

import contextlib
import os
import pathlib
import re
from collections.abc import Iterator

from mod_jax.errors import ConfigError, StorageError


def local_folder(name: str, value: str | os.PathLike) -> pathlib.Path:
    """The absolute path of a folder that a person named. Touches no disk.

    Args:
      name: what the person called it, for the message: "--workdir", "config.data.cache_dir".
      value: what they gave. A leading ~ is the home folder.

    Raises:
      ConfigError: it is no path, empty, in a bucket, or has characters that no file of ours can live with.
    """
    if not isinstance(value, str | bytes | os.PathLike):
        raise ConfigError(f"{name} = {value!r}: must name a folder")
    text = os.fsdecode(value)
    if not text.strip():
        raise ConfigError(f"{name} = {text!r}: must name a folder")
    if scheme := re.match(r"[A-Za-z][\w+.-]+:/", text):  # one slash: a pathlib.Path has lost the other
        raise ConfigError(
            f"{name} = {text!r}: must be a folder of a file system; {scheme[0]}/ is not supported, but a bucket that "
            "is mounted (gcsfuse, s3fs) is"
        )
    try:
        path = pathlib.Path(text).expanduser().absolute()
    except RuntimeError as error:  # no such home
        raise ConfigError(f"{name} = {text!r}: {error}") from None
    if not str(path).isprintable():
        raise ConfigError(f"{name} = {text!r}: {str(path)!r} has characters that cannot be printed")
    return path


def folder_to_write(name: str, value: str | os.PathLike) -> pathlib.Path:
    """Like `local_folder`, for a folder that checkpoints will be written to. Creates nothing yet.

    Raises:
      ConfigError: as for `local_folder`, and where Orbax would take the path for a pattern and lose what it writes.
      StorageError: it is a file, or below one, or may not be written.
    """
    path = local_folder(name, value)
    if special := sorted(set(str(path)) & set("*?[\\")):
        raise ConfigError(
            f"{name} = {os.fsdecode(value)!r}: {path} must not contain {' '.join(special)}: checkpoints written there "
            "could not be found again"
        )
    with writing(path):
        existing = _nearest_existing(path)
        if not existing.is_dir():
            raise StorageError(f"{path}: cannot be written: {existing} is not a folder")
        if not os.access(existing, os.W_OK | os.X_OK):
            raise StorageError(f"{path}: cannot be written: no permission in {existing}, or a read-only file system")
    return path


def _nearest_existing(path: pathlib.Path) -> pathlib.Path:
    """The path, or the nearest folder above it that is there. Any other error of the file system is raised."""
    try:
        path.lstat()
        return path
    except (FileNotFoundError, NotADirectoryError):
        return _nearest_existing(path.parent)


@contextlib.contextmanager
def writing(path: str | os.PathLike) -> Iterator[None]:
    """Turns an error of the file system inside into a StorageError that names `path`."""
    try:
        yield
    except OSError as error:
        where = f" ({error.filename})" if error.filename and str(error.filename) != str(path) else ""
        raise StorageError(f"{path}: cannot be written: {error.strerror or error}{where}") from error
