"""TFDS datasets as they lie on disk: only what is prepared already, in a format that needs no TensorFlow."""

import json
import os
import pathlib
import re
from collections.abc import Iterator

from mod_jax import paths
from mod_jax.data.files import SPLITS, Document, one_line
from mod_jax.errors import ConfigError, DataError


def documents(
    source: str, directory: str | os.PathLike, stored: str, text_key: str, chosen: range | None = None
) -> Iterator[Document]:
    """Yields the documents of a stored split, or those at the indices `chosen`, named by split and index."""
    builder = open_builder(source, directory)
    if text_key not in builder.info.features:
        raise DataError(f"{source}: no field data.text_key = {text_key!r}; it has {sorted(builder.info.features)}")
    try:
        examples = builder.as_data_source(stored)
    except (NotImplementedError, ValueError):
        raise DataError(
            f"{source}: {directory} is not in the array_record format, all that can be read without TensorFlow; "
            f"remove it, then {_how_to_prepare(source.removeprefix('tfds:'))}"
        ) from None
    for i in range(len(examples)) if chosen is None else chosen:
        document = f"{stored}[{i}]"
        try:
            text = examples[i][text_key]
        except Exception as error:  # whatever a damaged file raises
            raise DataError(f"{source}: cannot read {document} in {directory}: {one_line(error)}") from None
        if not isinstance(text, bytes | str):
            raise DataError(f"{source}: data.text_key = {text_key!r} holds {type(text).__name__}, not text")
        yield document, text if isinstance(text, bytes) else text.encode()


def shards(name: str) -> Iterator[tuple[pathlib.Path, str, int, int, int, int]]:
    """Yields (folder, split, number, first document, end, bytes) of every shard of a prepared dataset."""
    directory = prepared_directory(name)
    builder = open_builder(f"tfds:{name}", directory)
    for split in SPLITS:
        if split in builder.info.splits:
            info, first = builder.info.splits[split], 0
            for i, length in enumerate(info.shard_lengths):
                share = info.num_bytes * length // max(1, info.num_examples)
                yield directory, split, i, first, first + length, share
                first += length


def open_builder(source: str, directory: str | os.PathLike):
    import tensorflow_datasets as tfds

    directory = pathlib.Path(directory)
    _refuse_foreign_features(source, directory)
    try:
        builder = tfds.builder_from_directory(directory)
    except Exception as error:  # whatever a damaged description raises
        raise DataError(f"{source}: {directory} is no prepared dataset: {one_line(error)}") from None
    if "train" not in builder.info.splits:
        raise DataError(f"{source}: no split 'train' in {directory}, only {sorted(builder.info.splits)}")
    return builder


def prepared_directory(name: str) -> pathlib.Path:
    """The folder of the newest version of dataset `name` on disk."""
    match = re.fullmatch(r"(\w+)(?:/([\w.+-]+))?(?::(\d+\.\d+\.\d+))?", name)
    if not match:
        raise ConfigError(f"config.data.source = 'tfds:{name}': must be tfds:NAME[/CONFIG][:VERSION]")
    dataset, config, version = match.groups()
    root = paths.local_folder("TFDS_DATA_DIR", os.environ.get("TFDS_DATA_DIR") or "~/tensorflow_datasets")
    versions: dict[str, list[tuple[int, ...]]] = {}  # of each config ("" for none) that is on disk
    try:
        found_infos = list((root / dataset).glob("**/dataset_info.json"))
    except OSError as error:
        raise DataError(f"tfds:{name}: cannot read {root / dataset} ({error.strerror})") from None
    for info in found_infos:
        *found_config, found = info.parent.relative_to(root / dataset).parts or [""]
        wanted = config in (None, "/".join(found_config)) and version in (None, found)
        if wanted and len(found_config) <= 1 and re.fullmatch(r"\d+\.\d+\.\d+", found):
            versions.setdefault("/".join(found_config), []).append(tuple(map(int, found.split("."))))
    if not versions:
        raise DataError(f"tfds:{name}: nothing prepared below {root / dataset}; {_how_to_prepare(name)}")
    if len(versions) > 1:
        raise DataError(f"tfds:{name}: several configs below {root / dataset}; name one of {sorted(versions)}")
    [(found_config, found_versions)] = versions.items()
    return root / dataset / found_config / ".".join(map(str, max(found_versions)))


def _refuse_foreign_features(source: str, directory: pathlib.Path) -> None:
    """Raises DataError if features.json names a class outside TFDS: reading the dataset would import its module."""
    path = directory / "features.json"
    try:
        unread = [json.loads(path.read_bytes())]
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{source}: cannot read {path}: {one_line(error)}") from None
    while unread:
        value = unread.pop()
        if isinstance(value, dict):
            for key in ("pythonClassName", "type"):
                named = value.get(key)
                if isinstance(named, str) and "." in named and not named.startswith("tensorflow_datasets."):
                    raise DataError(f"{source}: {path} names the class {named!r}, which is not of tensorflow_datasets")
            unread += value.values()
        elif isinstance(value, list):
            unread += value


def _how_to_prepare(name: str) -> str:
    return (
        'where there is a network, with tensorflow installed, run: python -c "import tensorflow_datasets.text, '
        f"tensorflow_datasets as tfds; tfds.builder('{name}', file_format='array_record').download_and_prepare()\""
    )
