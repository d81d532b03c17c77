"""Where text comes from: turns `data.source` into named documents in two splits.

Vocabulary. A *document* is a pair (name, text as bytes). The *splits* are "train" and "validation"; whole documents are
held out, by a hash of their name, so that one stays on its side whatever else is added or removed. The *identity* of a
source is a string that changes whenever its documents may have: prepared corpora are cached under it.
"""

import collections
import dataclasses
import functools
import hashlib
import json
import os
import pathlib
import sysconfig
from collections.abc import Callable, Iterator

import numpy as np
from absl import logging

from mod_jax.config import DataConfig
from mod_jax.data import tfds_files
from mod_jax.data.files import (
    JSON_LINES,
    SPLITS,
    Document,
    Files,
    find_files,
    identify_files,
    printable,
    read_file,
    read_lines,
    read_parquet,
    walk,
)
from mod_jax.errors import ConfigError, DataError

SHOWN = 10  # fields of a record in a message
MIN_STDLIB_FILES = 200
STDLIB_EXCLUDED = ("test", "tests", "idlelib", "turtledemo", "lib2to3", "pydoc_data", "ensurepip", "encodings") + (
    "site-packages", "dist-packages", "__pycache__"
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Source:
    """Documents in two splits; `read(split)` yields them in a fixed order."""

    name: str
    identity: str
    read: Callable[[str], Iterator[Document]]

    def documents(self, split: str) -> Iterator[Document]:
        """Yields the split's documents that hold any text; there is at least one.

        Raises:
          DataError: if there is none, or if a document cannot be read.
        """
        found = False
        for name, text in self.read(split):
            if text:
                found = True
                yield name, text
        if not found:
            raise DataError(f"{self.name}: no text in split {split!r}; about one document in ten is held out: add more")


def load(data: DataConfig, directory: pathlib.Path) -> Source:
    """Returns the source that `data.source` names; `directory` is where one that is built locally keeps its files.

    Raises:
      ConfigError: if the name is not of a known form.
      DataError: if there is nothing to read.
    """
    kind, _, argument = data.source.partition(":")
    if data.source == "python_stdlib":
        return _python_stdlib(directory)
    if data.source == "synthetic":
        return Source("synthetic", f"synthetic {SYNTHETIC}", _read_synthetic)
    if kind == "tfds" and argument:
        return _tfds(argument, data.text_key)
    if kind == "text" and argument:
        return _text(data.source, find_files(data.source, argument))
    if kind == "jsonl" and argument:
        return _jsonl(data.source, _json_files(data.source, argument), data.text_key)
    if kind == "parquet" and argument:
        return _parquet(data.source, find_files(data.source, argument, (".parquet",)), data.text_key)
    raise ConfigError(
        f"config.data.source = {data.source!r}: must be python_stdlib, synthetic, tfds:NAME, text:PATH, jsonl:PATH, "
        "parquet:PATH or tokens:FOLDER[@WEIGHT],..."
    )


def held_out(name: str, one_in: int = 10) -> bool:
    """Whether the document of this name belongs to the validation split: one in ten does, or one in `one_in`."""
    return _name_hash(name) % one_in == 0


def _name_hash(name: str) -> int:
    return int.from_bytes(hashlib.md5(os.fsencode(name)).digest())


# Python's own standard library: real code, on every machine, no download.


def stdlib_files() -> Files:
    """The .py files of the running interpreter's standard library, without tests, tables and vendored packages."""
    root = pathlib.Path(sysconfig.get_paths()["stdlib"])
    files = walk("python_stdlib", root, lambda part: part in STDLIB_EXCLUDED, (".py",), follow_links=False)
    if len(files) < MIN_STDLIB_FILES:
        raise DataError(
            f"python_stdlib: {root} has {len(files)} .py files, need {MIN_STDLIB_FILES} (is this interpreter frozen or "
            "zipped?); point data.source at a folder instead: text:PATH"
        )
    return files


def stdlib_documents() -> Iterator[Document]:
    """Yields every file of `stdlib_files` with LF line ends."""
    for name, path in stdlib_files():
        yield name, read_file("python_stdlib", path).replace(b"\r\n", b"\n")


def _python_stdlib(directory: pathlib.Path) -> Source:
    digest = hashlib.sha256()
    for name, text in stdlib_documents():  # two builds of one Python version differ, so the text is the identity
        digest.update(f"{name} {len(text)}\n".encode(errors="surrogateescape") + text)

    def read(split):
        from mod_jax.data import python_stdlib  # imports tensorflow_datasets: seconds, spared when the corpus is cached

        for example in python_stdlib.prepare(directory / f"python_stdlib-{digest.hexdigest()[:12]}", split):
            yield example["path"].decode(), example["text"]

    return Source("python_stdlib", f"python_stdlib {digest.hexdigest()}", read)


# Synthetic text: needs no disk, and a small model learns it in minutes.

SYNTHETIC = dict(seed=0, documents=1024, lines=32, line_length=64, letters=16, copied=0.3)


def _read_synthetic(split: str) -> Iterator[Document]:
    for i, text in enumerate(_synthetic_text(**SYNTHETIC)):
        name = f"synthetic/{i:04d}"
        if held_out(name) == (split == "validation"):
            yield name, text


def _synthetic_text(seed, documents, lines, line_length, letters, copied) -> list[bytes]:
    """Lines of an order-2 Markov chain over `letters`, some of which repeat the line before.

    The next letter depends on the last two (four successors each, likeliest first); a repeated line can be predicted
    only by looking one line back. So counting, short-range and long-range attention each have something to find.
    """
    rng = np.random.default_rng(seed)
    successors = np.stack([rng.permutation(letters)[:4] for _ in range(letters**2)])
    choices = rng.choice(4, size=(line_length - 1, documents * lines), p=(0.7, 0.15, 0.1, 0.05))
    chain = [*rng.integers(letters, size=(2, documents * lines))]
    for choice in choices[2:]:
        chain.append(successors[chain[-2] * letters + chain[-1], choice])
    text = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz"[:letters], np.uint8)[np.stack(chain, axis=-1)]
    text = text.reshape(documents, lines, line_length - 1)
    for line in range(1, lines):
        repeats = rng.random(documents) < copied
        text[repeats, line] = text[repeats, line - 1]
    newlines = np.full((documents, lines, 1), ord("\n"), np.uint8)
    return [document.tobytes() for document in np.concatenate([text, newlines], axis=-1)]


# Files: text:PATH and jsonl:PATH.


def _has_split_folders(files: Files) -> bool:
    """Whether there are files below train/ and below validation/: then these are the splits, and the rest is unused."""
    return all(any(name.startswith(f"{split}/") for name, _ in files) for split in SPLITS)


def _text(source: str, files: Files) -> Source:
    """One document per file. One file alone gives its last tenth for validation."""

    @functools.cache
    def usable() -> tuple[Files, str]:
        """The files that are text, and in words why the others are not."""
        kept, left_out = [], collections.defaultdict(list)
        for name, path in files:
            if why := why_not_text(read_file(source, path)):
                left_out[why].append(name)
            else:
                kept.append((name, path))
        reasons = ", ".join(f"{len(names)} {why} (first {printable(names[0])})" for why, names in left_out.items())
        if not kept:
            raise DataError(
                f"{source}: none of {len(files)} files is UTF-8 text: {reasons}; to convert one: "
                "iconv -f LATIN1 -t UTF-8 OLD > NEW"
            )
        if reasons:
            logging.warning("%s: skipped %d of %d files: %s", source, len(files) - len(kept), len(files), reasons)
        return kept, reasons

    def read(split):
        texts, reasons = usable()
        if _has_split_folders(files):
            chosen = [(name, path) for name, path in texts if name.startswith(f"{split}/")]
            if not chosen:
                raise DataError(f"{source}: no text in split {split!r}; of all files, {reasons}")
        elif len(texts) == 1:
            [(name, path)] = texts
            yield name, _cut_at_nine_tenths(read_file(source, path))[split == "validation"]
            return
        else:
            held = _held_out_names([name for name, _ in texts])
            chosen = [(name, path) for name, path in texts if (name in held) == (split == "validation")]
        for name, path in chosen:
            yield name, read_file(source, path)

    return Source(source, f"text {identify_files(source, files)}", read)


def _held_out_names(names: list[str]) -> set[str]:
    held = {name for name in names if held_out(name)}
    if names and len(held) in (0, len(names)):  # a handful of files: hold out exactly one
        held = {min(names, key=_name_hash)}
    return held


def _cut_at_nine_tenths(text: bytes) -> tuple[bytes, bytes]:
    cut = len(text) * 9 // 10
    while cut < len(text) and text[cut] & 0xC0 == 0x80:  # inside a character
        cut += 1
    return text[:cut], text[cut:]


def why_not_text(text: bytes) -> str | None:
    if not text:
        return "empty"
    if b"\0" in text:
        return "with NUL bytes, so binary or UTF-16"
    try:
        text.decode()
    except UnicodeDecodeError:
        return "not UTF-8"
    return None


def _json_files(source: str, argument: str) -> Files:
    """Of endings that came later, only where there is none of the first: a corpus stays what it was."""
    try:
        return find_files(source, argument, (".jsonl", ".jsonl.gz"))
    except DataError:
        return find_files(source, argument, JSON_LINES)


def _parquet(source: str, files: Files, text_key: str) -> Source:
    """One document per row, the text in column `text_key`."""
    split_by_folder = _has_split_folders(files)

    def read(split):
        for name, path in files:
            if split_by_folder and not name.startswith(f"{split}/"):
                continue
            for number, text in enumerate(read_parquet(source, path, text_key), start=1):
                document = f"{name}:{number}"
                if split_by_folder or held_out(document) == (split == "validation"):
                    yield document, text

    return Source(source, f"parquet {text_key} {identify_files(source, files)}", read)


def _jsonl(source: str, files: Files, text_key: str) -> Source:
    """One document per line, an object whose field `text_key` is the text."""
    split_by_folder = _has_split_folders(files)

    def read(split):
        for name, path in files:
            if split_by_folder and not name.startswith(f"{split}/"):
                continue
            for number, line in enumerate(read_lines(source, path), start=1):
                document = f"{name}:{number}"
                chosen = split_by_folder or held_out(document) == (split == "validation")
                if chosen and line.strip():
                    yield document, json_text(f"{source}: {printable(path)}, line {number}", line, text_key)

    return Source(source, f"jsonl {text_key} {identify_files(source, files)}", read)


def json_text(place: str, line: bytes, text_key: str) -> bytes:
    """The text of one line. Of a field that is there twice, the last counts, as for every reader of JSON."""
    try:
        record = json.loads(line)
    except RecursionError:
        raise DataError(f"{place}: not JSON that can be read: nested too deeply") from None
    except ValueError as error:
        raise DataError(f"{place}: not JSON: {error}") from None
    text = record.get(text_key) if isinstance(record, dict) else None
    if not isinstance(text, str):
        found = f"fields {sorted(record)[:SHOWN]}" if isinstance(record, dict) else f"a {type(record).__name__}"
        raise DataError(f"{place}: no string under data.text_key = {text_key!r}; found {found}")
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{place}: not Unicode text: {error.reason}") from None


# TFDS: only what already lies on disk, in a format that needs no TensorFlow.


def _tfds(name: str, text_key: str) -> Source:
    """`name` is NAME, NAME/CONFIG, NAME:VERSION or NAME/CONFIG:VERSION, prepared below TFDS_DATA_DIR."""
    source = f"tfds:{name}"
    directory = tfds_files.prepared_directory(name)
    prepared = find_files(source, str(directory))

    def read(split):
        builder = tfds_files.open_builder(source, directory)
        own_split = "validation" in builder.info.splits
        stored = split if own_split else "train"
        for document, text in tfds_files.documents(source, directory, stored, text_key):
            if own_split or held_out(document) == (split == "validation"):
                yield document, text

    return Source(source, f"tfds {text_key} {identify_files(source, prepared)}", read)
