"""What proves that a step of a checkpoint folder is damaged, and what does not.

A step is *damaged* if its own files show that it cannot be read back as it was written. Everything else that may happen
while it is read says nothing about the files: a disk that is gone, no permission, no memory, a library that changed.
Taking such a thing for damage would set good checkpoints aside. So only `DamageError` does.

Nothing outside the step's folder is opened, nothing but plain files, and no size that a file claims is believed.
"""

import errno
import hashlib
import json
import math
import os
import pathlib
import re
import stat
from collections.abc import Iterator
from typing import Any

import jax
import tensorstore

from mod_jax import buckets
from mod_jax.errors import ModJaxError, StorageError
from mod_jax.outputs import canonical
from mod_jax.paths import Folder

RECORD = "record/metadata"  # of a step: Orbax's name for the JSON item `record`
METADATA_BYTES = 2**28  # files but those in folders d/ are read whole, so no more than this


class DamageError(Exception):
    """A step's own files prove that it cannot be read back as it was written."""


class VanishedError(Exception):
    """A step is no longer there: the run that writes here has removed it."""


def judge(error: Exception, step: Folder) -> Exception:
    """What an error says that arose while `step` was read.

    Returns:
      DamageError if the step's own files are to blame, VanishedError if the step is gone, StorageError for anything
      else; errors that have a meaning of their own come back as they are.
    """
    if isinstance(error, DamageError | ModJaxError | jax.errors.JaxRuntimeError):
        return error
    try:
        _look(step)
        if isinstance(error, FileNotFoundError | NotADirectoryError | IsADirectoryError):
            return DamageError(f"{error.filename or one_line(error)} is missing")
        if isinstance(error, MemoryError) or buckets.is_failure(error) or not _absent(_os_error_in(error)):
            return StorageError(f"{step}: could not be read, and was left as it is: {one_line(error)}")
        check_files(step)
        _read_all(step)
    except DamageError as damage:
        return damage
    except FileNotFoundError:
        return VanishedError(f"{step} is no longer there")
    except Exception as unreadable:
        return StorageError(f"{step}: could not be read, and was left as it is: {one_line(unreadable)}")
    return DamageError(one_line(error))  # every byte can be read, and they make no sense


def check_files(step: Folder) -> None:
    """Looks at every entry of a step without opening any. In a bucket there are plain files only.

    Raises:
      DamageError: one is neither a plain file nor a folder (opening a FIFO hangs, a link leads elsewhere), or is larger
        than what may be read whole.
      OSError: the file system does not answer.
    """
    if buckets.is_bucket(step):
        for name, size in buckets.sizes(step).items():
            _check_size(step / name, size)
        return
    _check_entry(step)
    for folder, folders, files in os.walk(step, onerror=_raise):
        for name in (*folders, *files):
            _check_entry(pathlib.Path(folder, name))


def read_record(step: Folder) -> dict[str, Any]:
    """The record of a step: its number, metadata, metrics, and shape, dtype and digest of every leaf.

    Raises:
      DamageError: it is not what was written.
      OSError: it cannot be read.
    """
    try:
        record = json.loads((step / RECORD).read_bytes())
        checksum = record.pop("sha256")
        known = {"metadata", "metrics", "leaves"} <= record.keys()
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamageError(f"the record is not JSON as it was written: {one_line(error)}") from error
    if not known or checksum != record_checksum(record):
        raise DamageError("the record does not match its checksum")
    if str(record.get("step", step.name)) != step.name:  # older records do not say
        raise DamageError(f"the record is that of step {record['step']}")
    return record


def record_checksum(record: dict[str, Any]) -> str:
    as_read = json.loads(canonical(record))
    return hashlib.sha256(canonical(as_read).encode()).hexdigest()


def check_arrays(item: Folder, leaves: dict[str, dict[str, Any]]) -> None:
    """Checks that every array of an item is there, with the shape of its record and all its pieces. Reads the index.

    Args:
      item: folder of one item of a step, params or rest.
      leaves: of the record, those that are stored in this item.

    Raises:
      DamageError: an array is absent or incomplete, or claims a size that it does not have.
      ValueError: the index cannot be read; see `judge`.
    """
    if not (item / "manifest.ocdbt").exists():
        raise DamageError(f"{item.name}/manifest.ocdbt is missing")
    base = f"{item}/" if buckets.is_bucket(item) else {"driver": "file", "path": f"{item}/"}
    store = tensorstore.KvStore.open({"driver": "ocdbt", "base": base}).result()
    pieces: dict[str, int] = {}
    for key in store.list().result():
        array, _, name = key.decode(errors="replace").rpartition("/")
        pieces[array] = pieces.get(array, 0) + (name != ".zarray")
    for path, leaf in leaves.items():
        header = store.read(f"{path}/.zarray").result()
        if header.state != "value":
            raise DamageError(f"{item.name} holds no array {path}")
        try:
            stored = json.loads(header.value)
            shape, chunks = [int(n) for n in stored["shape"]], [int(n) for n in stored["chunks"]]
            count = math.prod(-(-size // chunk) for size, chunk in zip(shape, chunks, strict=True))
        except (ValueError, KeyError, TypeError, ZeroDivisionError) as error:
            raise DamageError(f"{item.name}, array {path}: its header makes no sense: {one_line(error)}") from error
        expected = leaf["shape"]
        if shape[: len(expected)] != expected or any(
            c > n for c, n in zip(chunks, shape, strict=True)
        ):  # a key has more
            raise DamageError(f"{item.name}, array {path}: claims shape {shape} in pieces of {chunks}, not {expected}")
        if pieces[path] != count:
            raise DamageError(f"{item.name}, array {path}: {pieces[path]} of {count} pieces are there")


def one_line(error: BaseException, ends: int = 200) -> str:
    """Type and message on one line. Of a long one, both ends: its cause may stand at either."""
    error = _chain(error)[-1] if not isinstance(error, DamageError) else error
    text = " ".join(str(error).split())
    if not isinstance(error, DamageError):
        text = f"{type(error).__name__}: {text}"
    return text if len(text) <= 2 * ends else f"{text[:ends]} ... {text[-ends:]}"


def _check_entry(path: pathlib.Path) -> None:
    status = path.lstat()
    if stat.S_ISDIR(status.st_mode):
        return
    if not stat.S_ISREG(status.st_mode):
        raise DamageError(f"{path} is neither a file nor a folder")
    _check_size(path, status.st_size)


def _check_size(path: Folder, size: int) -> None:
    if path.parent.name != "d" and size > METADATA_BYTES:
        raise DamageError(f"{path} has {size:,} bytes, which no such file needs")


def _look(step: Folder) -> None:
    """Raises FileNotFoundError if a step is gone, another error if the disk or the bucket does not answer."""
    if not buckets.is_bucket(step):
        step.lstat()
    elif not buckets.sizes(step):
        raise FileNotFoundError(f"{step} is gone")


def _read_all(step: Folder) -> None:
    """Reads every file of a step, to see whether the disk gives it; a sparse one is read no further than 1 GiB."""
    for path in _files(step):
        with path.open("rb") as file:
            for _ in range(1024):
                if not file.read(2**20):
                    break


def _files(step: Folder) -> Iterator[Folder]:
    if buckets.is_bucket(step):
        yield from (step / name for name in buckets.sizes(step))
        return
    for folder, _, files in os.walk(step, onerror=_raise):
        yield from (pathlib.Path(folder, name) for name in files)


def _os_error_in(error: BaseException) -> int | None:
    """What the file system said, if TensorStore passes it on as text: "... Permission denied [os_error_code='13']"."""
    texts = " ".join(map(str, _chain(error)))
    found = re.findall(r"os_error_code='(\d+)'|OS error (\d+)", texts)
    return int("".join(found[-1])) if found else None


def _chain(error: BaseException) -> list[BaseException]:
    """The error, what caused it, what caused that: Orbax wraps what TensorStore says in a page about the array."""
    chain = [error]
    while chain[-1].__cause__ is not None and chain[-1].__cause__ not in chain:
        chain.append(chain[-1].__cause__)
    return chain


def _absent(code: int | None) -> bool:
    return code in (None, errno.ENOENT, errno.ENOTDIR, errno.EISDIR)


def _raise(error: OSError) -> None:
    raise error
