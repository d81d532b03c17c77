"""Folders in a bucket of Google Cloud Storage: who may use them, and what a disk does that a bucket does not.

A path is an `epath.Path`, which has the methods of a `pathlib.Path`. What differs:

- There are no folders: one is there as long as an object lies in it, and need not be made.
- An object appears whole or not at all, so it is written in one go. Nothing can be appended to it.
- A folder cannot be renamed. `move` and `remove` take many steps; a *mark*, one object, says whether a folder is whole.

Nothing is remembered of what lies in a bucket: another host may have changed it.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import logging
import os
import re
import uuid
from collections.abc import Iterator
from typing import Any

from etils import epath

from mod_jax.errors import ConfigError, StorageError

GCS = "gs://"
TIMEOUT = 20.0  # seconds for one answer, where a person waits for it
LIBRARIES = {"aiohttp", "asyncio", "fsspec", "gcsfs", "google", "requests", "urllib3"}  # their errors are of the bucket
REFUSED = "*?[]#%\\"  # characters of a pattern, a generation, a quotation
NO_CREDENTIALS = (
    "no Google credentials were found; set GOOGLE_APPLICATION_CREDENTIALS, or run gcloud auth application-default login"
)


def is_bucket(path: str | os.PathLike) -> bool:
    """Whether a path lies in a bucket. One slash counts too: a `pathlib.Path` has lost the other."""
    return bool(re.match(r"gs:/", os.fsdecode(path)))


def folder(name: str, text: str) -> epath.Path:
    """The path of gs://BUCKET/FOLDER, as a person wrote it. Asks nobody.

    Raises:
      ConfigError: it names no folder in a bucket, or a package is missing; the message begins with `name`.
    """
    bucket, _, inside = re.sub("^gs:/+", "", text).partition("/")
    parts = [part for part in inside.split("/") if part]
    if not re.fullmatch(r"[a-z0-9][a-z0-9._-]+", bucket) or not parts:
        raise ConfigError(f"{name} = {text!r}: must be {GCS}BUCKET/FOLDER")
    if not inside.isprintable() or {".", ".."} & {*parts} or {*REFUSED} & {*inside}:
        raise ConfigError(f"{name} = {text!r}: must not contain . or .. as a part, nor any of {' '.join(REFUSED)}")
    if not importlib.util.find_spec("gcsfs"):
        raise ConfigError(f"{name} = {text!r}: needs an extra: pip install -e '.[gcs]'")
    _prepare_libraries()
    return epath.Path(f"{GCS}{bucket}/{'/'.join(parts)}")


def check_access(path: epath.Path, *, writing: bool = False) -> None:
    """Makes sure, in seconds and by one try, that a folder can be read and, if asked, written.

    The libraries that read and write later try again for minutes, which is right in the middle of a run.

    Raises:
      StorageError: it cannot; the message says why.
    """
    with naming_failure(path, "used"):
        storage = client()
        bucket, prefix = _split(path)
        try:
            list(storage.list_blobs(bucket, prefix=f"{prefix}/", max_results=1, timeout=TIMEOUT, retry=None))
            if writing:
                probe = storage.bucket(bucket).blob(f"{prefix}/.probe-{uuid.uuid4().hex[:12]}")
                probe.upload_from_string(b"", timeout=TIMEOUT, retry=None)
                probe.delete(timeout=TIMEOUT, retry=None)
        except Exception as error:
            refused = getattr(error, "code", None) in (401, 403) or type(error).__module__.startswith("google.auth")
            if refused and _credentials() is None:
                raise StorageError(f"{path}: cannot be used: {NO_CREDENTIALS}") from error
            raise


@functools.cache
def client() -> Any:
    """Of google.cloud.storage. Without credentials an anonymous one, which may read what is public."""
    from google.cloud import storage

    if os.environ.get("STORAGE_EMULATOR_HOST"):
        return storage.Client(project="none")
    credentials = _credentials()
    if credentials is None:
        return storage.Client.create_anonymous_client()
    return storage.Client(project="none", credentials=credentials)


@functools.cache
def _credentials() -> Any:
    """What this machine identifies itself by; None if nothing is found."""
    import google.auth

    try:
        return google.auth.default(scopes=["https://www.googleapis.com/auth/devstorage.read_write"])[0]
    except google.auth.exceptions.DefaultCredentialsError:
        return None


def blob(path: epath.Path) -> Any:
    """The object at `path`, for what needs its generation."""
    bucket, name = _split(path)
    return client().bucket(bucket).blob(name)


@contextlib.contextmanager
def naming_failure(path: os.PathLike, what: str) -> Iterator[None]:
    """Turns an error of a bucket inside into a StorageError of one line: "PATH: cannot be WHAT: cause"."""
    try:
        yield
    except Exception as error:
        if not is_failure(error):
            raise
        raise StorageError(f"{path}: cannot be {what}: {cause(error)}") from error


def is_failure(error: BaseException) -> bool:
    """Whether an error says something of a bucket, or of the way to it, and not of our own code."""
    return isinstance(error, OSError) or type(error).__module__.split(".")[0] in LIBRARIES


def cause(error: BaseException) -> str:
    """What a failure says, on one line and without the address that was asked."""
    code = getattr(error, "code", None)
    known = {401: "the credentials are not accepted", 403: "no permission", 404: "there is no such bucket"}
    if code in known:
        return known[code]
    if type(error).__name__ in ("ConnectionError", "ConnectTimeout", "ReadTimeout", "ClientConnectorError"):
        return "Google Cloud Storage cannot be reached"
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 200 else f"{text[:200]} ..."


def sizes(path: epath.Path) -> dict[str, int]:
    """The size in bytes of every object below `path`, by its name from there on."""
    found = _file_system().find(os.fspath(path), detail=True)
    start = len(os.fspath(path).removeprefix(GCS)) + 1
    return {name[start:]: entry["size"] for name, entry in found.items() if name[start:]}


def read_ranges(ranges: list[tuple[str, int, int]]) -> list[bytes]:
    """The bytes [first, end) of objects, (address, first, end) each, fetched together."""
    addresses, firsts, ends = zip(*ranges, strict=True)
    return _file_system().cat_ranges(list(addresses), list(firsts), list(ends), on_error="raise")


def upload(file: str | os.PathLike, path: epath.Path) -> None:
    """Writes an object from a local file."""
    _file_system().put_file(os.fspath(file), os.fspath(path))


def move(source: epath.Path, target: epath.Path, mark: str) -> None:
    """Moves a folder. Killed at any moment, one of the two is whole, and has its `mark`.

    Copies all, the mark last; then takes the source's mark away, and what is left of the source.
    """
    names = sorted(sizes(source), key=lambda name: (name == mark, name))
    for some in ([name for name in names if name != mark], [name for name in names if name == mark]):
        if some:
            _file_system().copy([f"{source}/{name}" for name in some], [f"{target}/{name}" for name in some])
    remove(source, mark)


def remove(path: epath.Path, mark: str) -> None:
    """Deletes a folder, its mark first."""
    (path / mark).unlink(missing_ok=True)
    if names := sizes(path):
        _file_system().rm([f"{path}/{name}" for name in names])


def _split(path: epath.Path) -> tuple[str, str]:
    bucket, _, name = os.fspath(path).removeprefix(GCS).partition("/")
    return bucket, name


def _file_system() -> Any:
    import fsspec

    return fsspec.filesystem("gcs", finalize_on_close=True)  # the one that epath uses


def _prepare_libraries() -> None:
    import fsspec

    os.environ.setdefault("EPATH_USE_TF", "false")  # else epath takes TensorFlow, where it is installed
    fsspec.config.conf.setdefault("gcs", {})["use_listings_cache"] = False
    logging.getLogger("gcsfs").setLevel(logging.CRITICAL)  # it logs a traceback of what it raises
    logging.getLogger("google.auth").setLevel(logging.ERROR)  # it warns of each place without credentials
