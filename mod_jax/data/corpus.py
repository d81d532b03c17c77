"""From a source to a corpus: tokenised once, one flat token file per split, each document preceded by the separator.

A corpus lies in a cache folder keyed by everything that the tokens depend on, and is memory-mapped.
"""

import dataclasses
import hashlib
import json
import os
import pathlib
import re
import shutil
import uuid

import numpy as np
from absl import logging

from mod_jax import outputs
from mod_jax.config import DataConfig
from mod_jax.data import sources, tokenizers
from mod_jax.errors import DataError

FORMAT = 1  # of the cache; part of every key


@dataclasses.dataclass(frozen=True)
class Corpus:
    """A tokenised source. Losses are comparable only between equal digests."""

    source: str
    tokenizer: tokenizers.Tokenizer
    directory: pathlib.Path
    digest: str  # sha256 of the tokens of both splits
    train_tokens: np.ndarray  # memory-mapped, as is the next
    validation_tokens: np.ndarray
    num_train_documents: int
    num_train_bytes: int
    validation_names: tuple[str, ...]
    validation_starts: np.ndarray  # where each validation document's separator stands
    num_validation_bytes: int


def prepare_corpus(data: DataConfig) -> Corpus:
    """Returns the tokenised corpus of `data.source`, from the cache if it is there.

    Raises:
      ConfigError: if source or tokenizer is misspelt.
      DataError: if the source cannot be read or has nothing for one of the splits.
    """
    root = cache_root(data)
    tokenizer_identity = tokenizers.identity(data.tokenizer)
    source = sources.load(data, root)
    key = hashlib.sha256(f"{FORMAT}\n{source.identity}\n{tokenizer_identity}".encode()).hexdigest()[:16]
    slug = "-".join(re.sub(r"\W+", "_", spec)[-40:] for spec in (data.source, data.tokenizer))
    directory = root / f"{slug}-{key}"

    corpus = _open(data, directory)
    if corpus is None:
        scratch = directory.with_name(f"{directory.name}.{uuid.uuid4().hex}")
        scratch.mkdir()
        try:
            _write(data, source, scratch)
            _publish(data, scratch, directory)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
        corpus = _open(data, directory)
        if corpus is None:
            raise DataError(f"{source.name}: {directory} vanished while it was being prepared")
        logging.info("%s", describe_corpus(corpus))
    return corpus


def describe_corpus(corpus: Corpus) -> str:
    """One line about a corpus, for a person."""
    return (
        f"{corpus.source} as {corpus.tokenizer.name} ({corpus.tokenizer.vocab_size} ids): "
        f"train {corpus.train_tokens.size:,} tokens ({corpus.num_train_bytes:,} bytes, {corpus.num_train_documents:,} "
        f"documents), validation {corpus.validation_tokens.size:,} tokens ({corpus.num_validation_bytes:,} bytes, "
        f"{len(corpus.validation_names):,} documents), digest {corpus.digest[:12]}"
    )


# The cache.


def cache_root(data: DataConfig) -> pathlib.Path:
    """The folder of everything that can be made again: the key, or $MOD_JAX_CACHE, or ~/.cache/mod_jax."""
    root = pathlib.Path(data.cache_dir or os.environ.get("MOD_JAX_CACHE") or "~/.cache/mod_jax").expanduser().absolute()
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"cannot create {root} ({error.strerror}); set data.cache_dir or MOD_JAX_CACHE") from None
    return root


def _open(data: DataConfig, directory: pathlib.Path) -> Corpus | None:
    """Memory-maps a prepared corpus; None if it is absent or is not what its own meta.json says."""
    if not directory.exists():
        return None
    try:
        meta = json.loads((directory / "meta.json").read_text())
        tokenizer = tokenizers.load(data.tokenizer, directory)
        tokens = {split: np.load(directory / f"{split}.npy", mmap_mode="r") for split in sources.SPLITS}
        starts = np.array(meta["validation"]["starts"], np.int64)
        names = tuple(meta["validation"]["names"])
        for split, array in tokens.items():
            if array.size != meta[split]["tokens"] or array.dtype != _token_dtype(tokenizer):
                raise ValueError(f"{split}.npy has {array.size} tokens of type {array.dtype}")
        if not len(starts) == len(names) == meta["validation"]["documents"] or meta["format"] != FORMAT:
            raise ValueError("meta.json contradicts itself")
        if tokenizer.vocab_size != meta["vocab_size"]:
            raise ValueError(f"the tokenizer has {tokenizer.vocab_size} ids")
        return Corpus(
            source=data.source,
            tokenizer=tokenizer,
            directory=directory,
            digest=meta["digest"],
            train_tokens=tokens["train"],
            validation_tokens=tokens["validation"],
            num_train_documents=meta["train"]["documents"],
            num_train_bytes=meta["train"]["bytes"],
            validation_names=names,
            validation_starts=starts,
            num_validation_bytes=meta["validation"]["bytes"],
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        logging.warning("rebuilding the damaged corpus in %s: %s", directory, error)
        return None


def _publish(data: DataConfig, scratch: pathlib.Path, directory: pathlib.Path) -> None:
    """Renames the finished corpus into place, unless another process was first with a good one."""
    try:
        os.rename(scratch, directory)
    except OSError:
        if _open(data, directory) is None:
            shutil.rmtree(directory, ignore_errors=True)
            os.rename(scratch, directory)


def _write(data: DataConfig, source: sources.Source, directory: pathlib.Path) -> None:
    if tokenizers.needs_training(data.tokenizer):
        tokenizers.train_bpe(data.tokenizer, (text for _, text in source.documents("train")), directory)
    tokenizer = tokenizers.load(data.tokenizer, directory)
    meta = dict(format=FORMAT, source=data.source, identity=source.identity, tokenizer=data.tokenizer)
    meta |= dict(vocab_size=tokenizer.vocab_size)
    digest = hashlib.sha256()
    for split in sources.SPLITS:
        meta[split], split_digest = _write_split(source, split, tokenizer, directory / f"{split}.npy")
        digest.update(split_digest)
    del meta["train"]["starts"], meta["train"]["names"]
    outputs.write_json(directory / "meta.json", meta | dict(digest=digest.hexdigest()))


def _write_split(source: sources.Source, split: str, tokenizer: tokenizers.Tokenizer, path: pathlib.Path):
    """Streams the split's tokens to an .npy file. Returns its part of meta.json, and the sha256 of the tokens."""
    dtype = _token_dtype(tokenizer)
    digest = hashlib.sha256()
    size = num_bytes = 0
    starts, names = [], []
    with path.open("wb") as file:
        _write_npy_header(file, 0, dtype)
        for name, text in source.documents(split):
            place = f"{source.name}, split {split}, document {name}"
            try:
                ids = tokenizer.encode(text)
            except UnicodeDecodeError as error:
                raise DataError(f"{place}: {tokenizer.name} needs UTF-8 text: {error}") from None
            tokenizers.refuse_unknown_ids(ids, tokenizer.vocab_size, place, DataError)
            tokens = np.concatenate([[tokenizer.separator_id], ids]).astype(dtype).tobytes()
            file.write(tokens)
            digest.update(tokens)
            starts.append(size)
            names.append(name)
            size += ids.size + 1
            num_bytes += len(text)
        file.seek(0)
        _write_npy_header(file, size, dtype)
        file.flush()
        os.fsync(file.fileno())
    meta = dict(tokens=size, documents=len(names), bytes=num_bytes, starts=starts, names=names)
    return meta, digest.digest()


def _write_npy_header(file, size: int, dtype: np.dtype) -> None:
    """NumPy pads the header so that it has the same length for every size: it can be written again at the end."""
    np.lib.format.write_array_header_1_0(file, dict(descr=dtype.str, fortran_order=False, shape=(size,)))


def _token_dtype(tokenizer: tokenizers.Tokenizer) -> np.dtype:
    return np.dtype("<u2" if tokenizer.vocab_size <= 2**16 else "<u4")
