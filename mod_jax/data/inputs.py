"""The files that a large source consists of, each read on its own: what `python -m mod_jax.prepare` shares out.

An *input* becomes one shard of a prepared corpus: a JSONL or Parquet file, a group of text files, or a shard of a TFDS
dataset. Files may lie in a bucket.
"""

import dataclasses
import re
from collections.abc import Iterable, Iterator

from mod_jax import buckets, paths
from mod_jax.data import sources, tfds_files
from mod_jax.data.files import JSON_LINES, SPLITS, Document, find_files, printable, read_file, read_lines, read_parquet
from mod_jax.errors import ConfigError, DataError

GROUP_BYTES = 2**26  # of text files that become one shard
IN_NAME = re.compile(r"(?:^|[/._-])(train|validation)(?:[/._-]|$)")


@dataclasses.dataclass(frozen=True)
class Input:
    """One or more files, by name below the folder that was named, or documents [first, end) of a split of TFDS.

    Attributes:
      name: unique among the inputs of a source, whatever folder they lie in.
      split: to which all documents belong; None: each is held out, or not, by its name.
    """

    kind: str
    name: str
    files: tuple[tuple[str, str], ...]  # name, path
    size: int  # in bytes, as they lie there
    split: str | None = None
    documents: tuple[int, int] = (0, 0)

    def read(self, source: str, text_key: str) -> Iterator[Document]:
        """Yields its documents that hold any text.

        Raises:
          DataError: one cannot be read; the message names the place.
        """
        for name, text in self._read(source, text_key):
            if text:
                yield name, text

    def _read(self, source: str, text_key: str) -> Iterator[Document]:
        if self.kind == "tfds":
            [(stored, directory)] = self.files
            yield from tfds_files.documents(source, directory, stored, text_key, range(*self.documents))
            return
        for name, address in self.files:
            path = paths.as_folder(address)
            if self.kind == "jsonl":
                for number, line in enumerate(read_lines(source, path), start=1):
                    if line.strip():
                        place = f"{source}: {printable(path)}, line {number}"
                        yield f"{name}:{number}", sources.json_text(place, line, text_key)
            elif self.kind == "parquet":
                for number, text in enumerate(read_parquet(source, path, text_key), start=1):
                    yield f"{name}:{number}", text
            else:
                text = read_file(source, path)
                why_not = sources.why_not_text(text)
                if why_not not in (None, "empty"):
                    raise DataError(f"{source}: {printable(path)} is {why_not}")
                yield name, text


def find_inputs(source: str, text_key: str) -> list[Input]:
    """The inputs of `kind:PATH`, sorted by name.

    Folders train/ and validation/, or these words in the names of all files, say to which split a file belongs. Those
    of validation then come first, so that the first few inputs are a corpus too.

    Raises:
      ConfigError: the source is misspelt.
      DataError, StorageError: nothing is there, or it cannot be read.
    """
    kind, _, argument = source.partition(":")
    if not argument or kind not in ("jsonl", "parquet", "text", "tfds"):
        raise ConfigError(f"--source = {source!r}: must be jsonl:PATH, parquet:PATH, text:PATH or tfds:NAME")
    if kind == "tfds":
        shards = list(tfds_files.shards(argument))
        told = len({stored for _, stored, *_ in shards}) == 2
        return _validation_first(
            Input(kind, f"{stored}-{i:05d}", ((stored, str(directory)),), size, stored if told else None, (first, end))
            for directory, stored, i, first, end, size in shards
        )
    suffixes = {"jsonl": JSON_LINES, "parquet": (".parquet",), "text": ("",)}[kind]
    sized = _sized_files(source, argument, suffixes)
    found = {name: IN_NAME.findall(name) for name, _, _ in sized}
    told = all(len(set(words)) == 1 for words in found.values()) and {words[0] for words in found.values()} == {*SPLITS}
    splits = {name: words[0] if told else None for name, words in found.items()}
    if kind != "text":
        return _validation_first(Input(kind, name, ((name, path),), size, splits[name]) for name, path, size in sized)
    return _validation_first(_groups(sized, splits))


def _validation_first(found: Iterable[Input]) -> list[Input]:
    return sorted(found, key=lambda one: one.split != "validation")


def _groups(sized: list[tuple[str, str, int]], splits: dict[str, str | None]) -> Iterator[Input]:
    """Text files in groups of about GROUP_BYTES, each of one split."""
    group: list[tuple[str, str, int]] = []
    for file in [*sized, None]:
        full = group and (
            file is None or sum(f[2] for f in group) >= GROUP_BYTES or splits[file[0]] != splits[group[0][0]]
        )
        if full:
            files = tuple((name, path) for name, path, _ in group)
            yield Input("text", group[0][0], files, sum(size for _, _, size in group), splits[group[0][0]])
            group = []
        if file is not None:
            group.append(file)


def _sized_files(source: str, argument: str, suffixes: tuple[str, ...]) -> list[tuple[str, str, int]]:
    """(name, path, size) of every file, sorted by name."""
    if not buckets.is_bucket(argument):
        try:
            return [(name, str(path), path.stat().st_size) for name, path in find_files(source, argument, suffixes)]
        except OSError as error:
            raise DataError(f"{source}: cannot read {printable(error.filename)} ({error.strerror})") from None
    root = paths.folder_to_read("--source", argument)
    with buckets.naming_failure(root, "read"):
        sizes = buckets.sizes(root)
        if not sizes and root.exists():  # one object
            return [(root.name, str(root), root.stat().length)]
    kept = sorted(
        name
        for name in sizes
        if name.endswith(suffixes) and not any(part.startswith(".") for part in name.split("/")) and sizes[name]
    )
    if not kept:
        raise DataError(f"{source}: no {' or '.join(filter(None, suffixes)) or 'visible'} file below {root}")
    return [(name, f"{root}/{name}", sizes[name]) for name in kept]
