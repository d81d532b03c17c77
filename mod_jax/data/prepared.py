"""Opens corpora that `python -m mod_jax.prepare` wrote, one or a weighted mixture: tokens:FOLDER[@WEIGHT],tokens:...

Nothing is copied: token files are read where they lie, in a folder or in a bucket. Tokenizer and field come from the
index.
"""

import hashlib
import math
import os
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from mod_jax import buckets, outputs, paths
from mod_jax.config import DataConfig
from mod_jax.data import shards, tokenizers
from mod_jax.data.preparation import TOKENIZER
from mod_jax.data.token_files import Numbers, TokenFile
from mod_jax.data.tokenizers import Tokenizer
from mod_jax.errors import ConfigError, DataError
from mod_jax.paths import Folder

PREFIX = "tokens:"


class Part(NamedTuple):
    """One prepared corpus of a mixture. `share`: of the training rows, in (0, 1]."""

    folder: Folder
    tokenizer: Tokenizer
    shards: list[dict[str, Any]]
    dtype: str
    share: float

    def numbers(self, part: str, dtype: str) -> Numbers:
        return Numbers(self._files(part, dtype))

    def _files(self, part: str, dtype: str) -> Iterator[TokenFile]:
        for shard in self.shards:
            yield TokenFile(
                f"{self.folder}/{shard['files'][part]}", shard[part]["size"] // np.dtype(dtype).itemsize, dtype
            )

    def total(self, split: str, name: str) -> int:
        return sum(shard[split][name] for shard in self.shards)


def is_prepared(source: str) -> bool:
    return source.startswith(PREFIX)


def open_parts(data: DataConfig) -> list[Part]:
    """The corpora that `data.source` names.

    Raises:
      ConfigError: it is misspelt, or contradicts what lies there; or the parts have not one tokenizer.
      DataError, StorageError: a corpus is not there, not finished, or damaged.
    """
    named = list(_parse(data.source))
    total = math.fsum(weight for _, weight in named)
    parts = [_open(data, address, weight / total) for address, weight in named]
    digests = {part.tokenizer.digest: part.folder for part in parts}
    if len(digests) > 1:
        (one, first), (two, second), *_ = digests.items()
        raise ConfigError(
            f"config.data.source = {data.source!r}: {first} and {second} have different tokenizers, of digest "
            f"{one[:12]} and {two[:12]}; a mixture needs one"
        )
    return parts


def digest(parts: list[Part]) -> str:
    """Of the tokens and, where there are several corpora, of their shares."""
    own = [shards.digest(part.shards) for part in parts]
    if len(parts) == 1:
        return own[0]
    facts = [[one, part.share] for one, part in zip(own, parts, strict=True)]
    return hashlib.sha256(outputs.canonical(facts).encode()).hexdigest()


def _parse(source: str) -> Iterator[tuple[str, float]]:
    """(folder, weight) of each part. A comma in the name of a folder is one as long as no `tokens:` follows."""
    for text in re.split(rf",(?={PREFIX})", source):
        address, at, weight = text.removeprefix(PREFIX).rpartition("@")
        if not at or "/" in weight:  # an @ in the name of a folder
            address, weight = text.removeprefix(PREFIX), "1"
        try:
            number = float(weight)
        except ValueError:
            number = math.nan
        if not address or not (0 < number < math.inf):
            raise ConfigError(
                f"config.data.source = {source!r}: must be tokens:FOLDER, or tokens:FOLDER@WEIGHT,tokens:FOLDER@WEIGHT "
                "with weights > 0"
            )
        yield address, number


def _open(data: DataConfig, address: str, share: float) -> Part:
    folder = paths.folder_to_read("config.data.source", address)
    with buckets.naming_failure(folder, "read"):
        index = shards.read_json(folder / "index.json")
        if index is None:
            begun = shards.read_json(folder / "plan.json") is not None
            how = f"is not finished; see python -m mod_jax.prepare --status --out={folder}"
            raise DataError(f"{folder}: {how if begun else 'holds no prepared corpus: there is no index.json'}")
        there = shards.sizes(folder)
    try:
        if index["format"] != shards.FORMAT:
            raise DataError(f"{folder}: has format {index['format']}, this version reads {shards.FORMAT}")
        listed = index["shards"]
        chosen = listed[: data.shards or len(listed)]
        if data.shards > len(listed):
            raise ConfigError(f"config.data.shards = {data.shards}: {folder} has {len(listed)}")
        for shard in chosen:
            for part, name in shard["files"].items():
                if os.path.basename(name) != name or there.get(name) != shard[part]["size"]:
                    found = "is missing" if name not in there else f"has {there[name]:,} bytes"
                    raise DataError(f"{folder}/{name} {found}, and should have {shard[part]['size']:,}")
        if shards.digest(listed) != index["digest"]:
            raise ValueError("its digest is not that of its shards")
        tokenizer = tokenizers.load(folder / TOKENIZER)
        if tokenizer is None or tokenizer.digest != index["tokenizer_digest"]:
            raise DataError(f"{folder / TOKENIZER}: is not the tokenizer {index['tokenizer']} of the corpus")
        if index["dtype"] != shards.token_dtype(tokenizer).str:
            raise ValueError(f"dtype {index['dtype']!r}")
        for name, default in (("tokenizer", "bytes"), ("text_key", "text")):
            given, used = getattr(data, name), index[name]
            kind, other_kind = used.split(":")[0], given.split(":")[0]
            has_file = kind == other_kind and kind in ("sentencepiece", *tokenizers.PRETRAINED)
            if given not in (default, used) and not has_file:  # which may lie elsewhere by now
                raise ConfigError(f"config.data.{name} = {given!r}: {folder} was prepared with {used!r}")
        return Part(folder, tokenizer, chosen, index["dtype"], share)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, ConfigError):
            raise
        raise DataError(f"{folder}/index.json is damaged: {type(error).__name__}: {error}") from None
