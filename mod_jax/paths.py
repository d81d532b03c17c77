"""Folders that a person names: what is refused at the door, and what a file system's errors become.

The folder of a run may lie in a bucket of Google Cloud Storage (`mod_jax.buckets`); every other lies on a disk.
"""

import contextlib
import os
import pathlib
import re
from collections.abc import Iterator

from etils import epath

from mod_jax import buckets
from mod_jax.errors import ConfigError, StorageError

Folder = pathlib.Path | epath.Path  # of a run
NAME_BYTES, PATH_BYTES = 255, 4000  # the most, on the file systems that people have; a workdir needs room below it
SCHEME = r"[A-Za-z][\w+.-]+:/"  # one slash: a pathlib.Path has lost the other


def local_folder(name: str, value: str | os.PathLike) -> pathlib.Path:
    """The absolute path of a folder that a person named. Touches no disk.

    Args:
      name: what the person called it, for the message: "--workdir", "config.data.cache_dir".
      value: what they gave. A leading ~ is the home folder.

    Raises:
      ConfigError: it is no path, empty, in a bucket, too long, or has characters that no file of ours can live with.
    """
    text = _text(name, value)
    if scheme := re.match(SCHEME, text):
        raise ConfigError(
            f"{name} = {text!r}: must be a folder of a file system; {scheme[0]}/ is not supported, but a bucket that "
            "is mounted (gcsfuse, s3fs) is"
        )
    try:
        path = pathlib.Path(text).expanduser().absolute()
    except RuntimeError as error:  # no such home
        raise ConfigError(f"{name} = {text!r}: {error}") from None
    if longest := [part for part in path.parts if len(os.fsencode(part)) > NAME_BYTES]:
        raise ConfigError(f"{name} = {text!r}: {longest[0]!r} is longer than a name may be, {NAME_BYTES} bytes")
    if len(os.fsencode(path)) > PATH_BYTES:
        raise ConfigError(f"{name} = {text[:80]!r}...: is longer than a path may be, {PATH_BYTES} bytes")
    if not str(path).isprintable():
        raise ConfigError(f"{name} = {text!r}: {str(path)!r} has characters that cannot be printed")
    return path


def run_folder(name: str, value: str | os.PathLike) -> Folder:
    """Like `local_folder`, for the workdir of a run, which may also be gs://BUCKET/FOLDER. Touches no disk or bucket.

    Raises:
      ConfigError: as for `local_folder`; or it is in a bucket where no checkpoint can lie.
    """
    text = _text(name, value)
    if buckets.is_bucket(text):
        return buckets.folder(name, text)
    if scheme := re.match(SCHEME, text):
        why = "Orbax cannot write checkpoints there" if scheme[0] == "s3:/" else "nothing here knows such an address"
        raise ConfigError(
            f"{name} = {text!r}: must be a folder of a file system or {buckets.GCS}BUCKET/FOLDER; {scheme[0]}/ is not "
            f"supported, since {why}, but a bucket that is mounted as a folder is"
        )
    return local_folder(name, value)


def folder_to_read(name: str, value: str | os.PathLike) -> Folder:
    """Like `run_folder`; of a bucket it also makes sure that it can be read. A folder need not exist.

    Raises:
      ConfigError: as for `run_folder`.
      StorageError: the bucket cannot be read.
    """
    path = run_folder(name, value)
    if buckets.is_bucket(path):
        buckets.check_access(path)
    return path


def folder_to_write(name: str, value: str | os.PathLike) -> Folder:
    """Like `run_folder`, for a folder that checkpoints will be written to. Creates nothing yet.

    Raises:
      ConfigError: as for `run_folder`, and where Orbax would take the path for a pattern and lose what it writes.
      StorageError: it is a file, or below one, or may not be written.
    """
    path = run_folder(name, value)
    if buckets.is_bucket(path):
        buckets.check_access(path, writing=True)
        return path
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


def as_folder(path: str | os.PathLike) -> Folder:
    """A path that was checked before, as what it is: of a disk, absolute, or in a bucket."""
    if buckets.is_bucket(path):
        return buckets.folder("path", os.fspath(path))
    return pathlib.Path(path).expanduser().absolute()


def make_folder(path: Folder) -> None:
    """Makes a folder with those above it, unless it is there. In a bucket nothing need be made."""
    if not buckets.is_bucket(path):
        path.mkdir(parents=True, exist_ok=True)


def _text(name: str, value: str | os.PathLike) -> str:
    if not isinstance(value, str | bytes | os.PathLike):
        raise ConfigError(f"{name} = {value!r}: must name a folder")
    text = os.fsdecode(value)
    if not text.strip():
        raise ConfigError(f"{name} = {text!r}: must name a folder")
    return text


def _nearest_existing(path: pathlib.Path) -> pathlib.Path:
    """The path, or the nearest folder above it that is there. Any other error of the file system is raised."""
    try:
        path.lstat()
        return path
    except (FileNotFoundError, NotADirectoryError):
        return _nearest_existing(path.parent)


@contextlib.contextmanager
def writing(path: str | os.PathLike) -> Iterator[None]:
    """Turns an error of the file system, or of the bucket, inside into a StorageError that names `path`."""
    if buckets.is_bucket(path):
        with buckets.naming_failure(path, "written"):
            yield
        return
    try:
        yield
    except OSError as error:
        where = f" ({error.filename})" if error.filename and str(error.filename) != str(path) else ""
        raise StorageError(f"{path}: cannot be written: {error.strerror or error}{where}") from error
