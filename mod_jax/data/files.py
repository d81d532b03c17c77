"""Files that a person points at: finding them, knowing them by their content, and reading them.

Whatever lies there, what comes out is text, or a DataError of one line that names the place: no pipe or device is
opened, and no line is read without end.
"""

import contextlib
import errno
import gzip
import hashlib
import importlib
import io
import os
import pathlib
import stat
import zlib
from collections.abc import Callable, Iterator
from typing import Any

from absl import logging

from mod_jax import buckets, paths
from mod_jax.errors import DataError
from mod_jax.outputs import canonical

JSON_LINES = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".json", ".json.gz", ".json.zst")
HASHED_BYTES = 2**26  # files of no more than this, all together, are known by their content, larger ones by their times
MAX_LINE = 2**26  # bytes

SPLITS = ("train", "validation")
Document = tuple[str, bytes]  # name, text
Files = list[tuple[str, pathlib.Path]]  # (name relative to the folder that was named, path), sorted by name


def find_files(source: str, path: str, suffixes: tuple[str, ...] = ("",)) -> Files:
    """The file at `path`, or all files below it that end in one of `suffixes` and are not hidden, sorted by name."""
    root = paths.local_folder("config.data.source", path)
    try:
        mode = root.stat().st_mode
    except FileNotFoundError:
        raise DataError(f"{source}: {root} does not exist; data.source needs a file or a folder") from None
    except OSError as error:
        raise DataError(f"{source}: cannot open {root} ({error.strerror})") from None
    if stat.S_ISREG(mode):
        return [(root.name, root)]
    if not stat.S_ISDIR(mode):
        raise DataError(f"{source}: {root} is a pipe, socket or device; data.source needs a file or a folder")
    files = walk(source, root, lambda part: part.startswith("."), suffixes, follow_links=True)
    if not files:
        kind = " or ".join(suffix for suffix in suffixes if suffix) or "visible"
        raise DataError(f"{source}: no {kind} file below {root}")
    return files


def walk(
    source: str, root: pathlib.Path, skipped: Callable[[str], bool], suffixes: tuple[str, ...], *, follow_links: bool
) -> Files:
    """Every file below `root` with one of the suffixes, unless it or a folder that it lies in is skipped by name.

    A folder that links reach twice, or reach from within itself, is entered once.
    """

    def refuse(error: OSError):
        raise DataError(f"{source}: cannot read {printable(error.filename)} ({error.strerror})")

    files, left_out, entered = [], [], set()
    for folder, folders, names in os.walk(root, onerror=refuse, followlinks=follow_links):
        status = os.stat(folder)
        if (status.st_dev, status.st_ino) in entered:
            folders.clear()
            continue
        entered.add((status.st_dev, status.st_ino))
        folders[:] = sorted(name for name in folders if not skipped(name))
        for name in names:
            path = pathlib.Path(folder, name)
            if not name.endswith(suffixes) or skipped(name):
                continue
            try:
                regular = stat.S_ISREG(path.stat().st_mode)
            except OSError as error:
                if error.errno not in (errno.ENOENT, errno.ELOOP):  # a link to nothing, or to itself
                    refuse(error)
                regular = False
            (files if regular else left_out).append((path.relative_to(root).as_posix(), path))
    if left_out:
        first = printable(min(left_out)[0])
        logging.warning(
            "%s: left out %d broken links, pipes, sockets or devices, first %s", source, len(left_out), first
        )
    return sorted(files)


def identify_files(source: str, files: Files) -> str:
    """A digest that changes when the files may have.

    Of small files the content decides, since an edit in place can leave size and time as they were.
    """
    digest = hashlib.sha256()
    try:
        stats = [path.stat() for _, path in files]
        small = sum(status.st_size for status in stats) <= HASHED_BYTES
        for (name, path), status in zip(files, stats, strict=True):
            if small:
                facts, content = (name,), path.read_bytes()
            else:
                facts, content = (name, str(path), status.st_mtime_ns, status.st_ctime_ns), b""
            digest.update(canonical([*facts, status.st_size, len(content)]).encode() + content)
    except OSError as error:
        raise DataError(f"{source}: cannot read {printable(error.filename)} ({error.strerror})") from None
    return digest.hexdigest()


def read_file(source: str, path: paths.Folder) -> bytes:
    try:
        return path.read_bytes()
    except Exception as error:
        if not buckets.is_failure(error):
            raise
        cause = getattr(error, "strerror", None) or buckets.cause(error)
        raise DataError(f"{source}: cannot read {printable(path)} ({cause})") from None


def read_lines(source: str, path: paths.Folder) -> Iterator[bytes]:
    """The lines of a file, which may be compressed: .gz or .zst."""
    place = printable(path)
    try:
        with _opened(source, path) as file:
            number = 0
            while line := file.readline(MAX_LINE + 1):
                number += 1
                if len(line) > MAX_LINE:
                    raise DataError(f"{source}: {place}, line {number}: longer than {MAX_LINE:,} bytes; is it JSONL?")
                yield line
    except Exception as error:
        damaged = isinstance(error, EOFError | zlib.error) or type(error).__name__ == "ZstdError"
        if not damaged and not buckets.is_failure(error):
            raise
        raise DataError(f"{source}: cannot read {place}: {error}") from None


@contextlib.contextmanager
def _opened(source: str, path: paths.Folder) -> Iterator[io.BufferedIOBase]:
    with path.open("rb") as raw:
        if path.suffix == ".gz":
            with gzip.open(raw) as file:
                yield file
        elif path.suffix == ".zst":
            decompressor = _import("zstandard", "zst", source).ZstdDecompressor()
            with io.BufferedReader(_Zstandard(raw, decompressor), 2**20) as file:
                yield file
        else:
            yield io.BufferedReader(raw, 2**20)  # of a bucket, the library's own reads lines of any length


class _Zstandard(io.RawIOBase):
    """What a .zst file holds. The library's own reader takes a file that was cut off for one that ends there."""

    def __init__(self, raw: io.BufferedIOBase, decompressor: Any):
        self._raw, self._decompressor = raw, decompressor
        self._frame, self._ready, self._unread = None, b"", b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:
        while not self._ready:
            given = self._unread or self._raw.read(2**17)
            self._unread = b""
            if not given:
                if self._frame is not None:
                    raise EOFError("the file was cut off")
                return 0
            self._frame = self._frame or self._decompressor.decompressobj()
            self._ready = self._frame.decompress(given)
            if self._frame.eof:
                self._unread, self._frame = self._frame.unused_data, None
        count = min(len(buffer), len(self._ready))
        buffer[:count], self._ready = self._ready[:count], self._ready[count:]
        return count


def read_parquet(source: str, path: paths.Folder, text_key: str) -> Iterator[bytes]:
    """The texts in one column of a Parquet file, a few rows at a time. A row without text is empty."""
    _import("pyarrow", "parquet", source)
    from pyarrow import parquet

    place = printable(path)
    try:
        with path.open("rb") as raw:
            file = parquet.ParquetFile(raw)
            names = file.schema_arrow.names
            kind = str(file.schema_arrow.field(text_key).type) if text_key in names else None
            if kind not in ("string", "large_string", "binary", "large_binary"):
                found = f"it is {kind}" if kind else f"found {sorted(names)[:10]}"
                raise DataError(f"{source}: {place}: no text in column data.text_key = {text_key!r}; {found}")
            for batch in file.iter_batches(batch_size=256, columns=[text_key], use_threads=False):
                for text in batch.column(0).to_pylist():
                    yield text.encode() if isinstance(text, str) else text or b""
    except DataError:
        raise
    except Exception as error:
        if not buckets.is_failure(error) and not type(error).__module__.startswith("pyarrow"):
            raise
        raise DataError(f"{source}: cannot read {place}: {one_line(error)}") from None


def _import(module: str, extra: str, source: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        raise DataError(f"{source}: needs an extra: pip install -e '.[{extra}]'") from None


def printable(name: str | os.PathLike) -> str:
    """A name as it may stand in a message of one line, whatever bytes it has."""
    text = os.fspath(name)
    return text if text.isprintable() else ascii(text)


def one_line(error: Exception) -> str:
    """What an error of a library says, short enough for a message of one line."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) <= 200 else f"{text[:200]} ..."
