"""From a source to a corpus: tokenised once, one flat token file per split, each document preceded by the separator.

A corpus lies in the cache, in a folder keyed by everything that the tokens depend on, and is memory-mapped. Beside it
lies its tokenizer, and for each held-out token the number of bytes of text that it stands for. A source too large for
that is prepared beforehand (`shards`) and opened here; what reads a corpus cannot tell.
"""

import collections
import contextlib
import dataclasses
import errno
import hashlib
import json
import os
import pathlib
import re
import shlex
import shutil
import uuid
from typing import Any

import numpy as np
from absl import logging

from mod_jax import outputs, paths
from mod_jax.config import DataConfig
from mod_jax.data import cache, inputs, prepared, sources, tokenizers
from mod_jax.data.files import printable
from mod_jax.data.shards import token_dtype
from mod_jax.data.token_files import Numbers, TokenFile
from mod_jax.data.tokenizers import Tokenizer
from mod_jax.errors import ConfigError, DataError, StorageError

FORMAT = 2  # of a corpus on disk; part of every key
TOKENIZER = "tokenizer"  # folder in a corpus
LARGEST = 5e9  # bytes of a source that is prepared unasked
CHECKED_BYTES = 2**20  # of validation text, for whether decoding gives it back


@dataclasses.dataclass(frozen=True)
class Corpus:
    """A tokenised source. Losses are comparable only between equal digests.

    Attributes:
      train_parts: the tokens of each source of a mixture; most often there is one.
      shares: of the training rows, that come from each; they sum to 1.
    """

    source: str
    tokenizer: tokenizers.Tokenizer
    directory: paths.Folder
    digest: str  # sha256 of the tokens of both splits
    train_parts: tuple[Numbers, ...]
    shares: tuple[float, ...]
    validation_tokens: Numbers
    num_train_documents: int
    num_train_bytes: int
    validation_names: tuple[str, ...]  # none of a prepared corpus
    validation_starts: np.ndarray  # where each validation document's separator stands
    validation_bytes: Numbers  # bytes of text that each validation token stands for
    num_validation_bytes: int
    num_also_in_train: int  # validation documents whose text is that of a train document too
    num_altered: int  # of the first validation documents, those that decoding does not give back
    num_checked: int  # how many those first ones are

    @property
    def num_train_tokens(self) -> int:
        return sum(part.size for part in self.train_parts)


def prepare_corpus(data: DataConfig, tokenizer: Tokenizer | None = None) -> Corpus:
    """Returns the tokenised corpus of `data.source`, from the cache if it is there.

    Args:
      tokenizer: of a run, to be used in place of the one that `data.tokenizer` would give now.

    Raises:
      ConfigError: if source or tokenizer is misspelt.
      DataError: if the source cannot be read or has nothing for one of the splits, or is too large to be prepared now;
        or if the cache cannot be written.
    """
    if prepared.is_prepared(data.source):
        return _of_parts(data, prepared.open_parts(data), tokenizer)
    if data.shards:
        raise ConfigError(f"config.data.shards = {data.shards}: is for a source tokens:FOLDER, not {data.source!r}")
    root = cache.cache_root(data)
    asked = tokenizers.identity(data.tokenizer) if tokenizer is None else tokenizer.digest
    source = sources.load(data, root)
    directory = _directory(root, data, source, asked)
    if tokenizer is not None and tokenizers.needs_training(data.tokenizer):
        # Most often it was trained on this very corpus, which is then there under the name of its training.
        trained_here = _directory(root, data, source, tokenizers.identity(data.tokenizer))
        corpus = _open(data, trained_here)
        if corpus is not None and corpus.tokenizer.digest == tokenizer.digest:
            return corpus

    corpus = _open(data, directory)
    if corpus is None:
        _refuse_large(data)
        with cache.naming_the_cache(root), cache.scratch_folder(directory) as scratch:
            _write(data, source, tokenizer, scratch)
            _publish(data, scratch, directory)
        corpus = _open(data, directory)
        if corpus is None:
            raise DataError(f"{source.name}: {directory} vanished while it was being prepared")
        logging.info("%s", describe_corpus(corpus))
    return corpus


def known_vocab_size(data: DataConfig) -> int | None:
    """Like `tokenizers.known_vocab_size`, where the tokenizer may lie with the corpus."""
    return None if prepared.is_prepared(data.source) else tokenizers.known_vocab_size(data.tokenizer)


def _of_parts(data: DataConfig, parts: list[prepared.Part], tokenizer: Tokenizer | None) -> Corpus:
    """Prepared corpora as one. Its held-out text is that of all of them, one after another."""
    own = parts[0].tokenizer
    if tokenizer is not None and tokenizer.digest != own.digest:
        raise DataError(
            f"{data.source}: was prepared with {own.name} of digest {own.digest[:12]}, and the run has "
            f"{tokenizer.name} of digest {tokenizer.digest[:12]}"
        )
    tokens = [part.numbers("validation", part.dtype) for part in parts]
    for part, held in zip(parts, tokens, strict=True):
        if not held.size or not part.total("train", "tokens"):
            raise DataError(f"{part.folder}: no text in one of the splits of these {len(part.shards)} shards")
    starts, before = [], 0
    for part in parts:
        in_shard = part.numbers("starts", "<i8").all()
        counts = [shard["validation"]["documents"] for shard in part.shards]
        sizes = np.array([shard["validation"]["tokens"] for shard in part.shards], np.int64)
        starts.append(before + in_shard + np.repeat(np.cumsum(sizes) - sizes, counts))
        before += int(sizes.sum())

    def total(split: str, name: str) -> int:
        return sum(part.total(split, name) for part in parts)

    return Corpus(
        source=data.source,
        tokenizer=own,
        directory=parts[0].folder,
        digest=prepared.digest(parts),
        train_parts=tuple(part.numbers("train", part.dtype) for part in parts),
        shares=tuple(part.share for part in parts),
        validation_tokens=Numbers(file for held in tokens for file in held.files),
        num_train_documents=total("train", "documents"),
        num_train_bytes=total("train", "bytes"),
        validation_names=(),
        validation_starts=np.concatenate(starts),
        validation_bytes=Numbers(file for part in parts for file in part.numbers("bytes", "<i4").files),
        num_validation_bytes=total("validation", "bytes"),
        num_also_in_train=0,
        num_altered=sum(shard["altered"] for part in parts for shard in part.shards),
        num_checked=sum(shard["checked"] for part in parts for shard in part.shards),
    )


def _refuse_large(data: DataConfig) -> None:
    """Raises DataError, with what to type, for a source that would take every process of a run hours to prepare."""
    if data.source.partition(":")[0] not in ("jsonl", "parquet", "text", "tfds"):
        return
    size = sum(one.size for one in inputs.find_inputs(data.source, data.text_key))
    if size > LARGEST:
        raise DataError(
            f"{data.source}: {size / 1e9:,.1f} GB, and train prepares no more than {LARGEST / 1e9:,.1f} GB by itself; "
            f"run: python -m mod_jax.prepare --source={shlex.quote(data.source)} "
            f"--tokenizer={shlex.quote(data.tokenizer)} --text_key={shlex.quote(data.text_key)} --out=FOLDER; "
            "then train with --config.data.source=tokens:FOLDER"
        )


def describe_corpus(corpus: Corpus) -> str:
    """One line about a corpus, for a person."""
    notes = f", {corpus.num_also_in_train:,} of them also in train" if corpus.num_also_in_train else ""
    if corpus.num_altered:
        notes += f"; the tokenizer alters {corpus.num_altered:,} of {corpus.num_checked:,} documents (normalisation)"
    return (
        f"{corpus.source} as {corpus.tokenizer.name} ({corpus.tokenizer.vocab_size} ids): "
        f"train {corpus.num_train_tokens:,} tokens ({corpus.num_train_bytes:,} bytes, {corpus.num_train_documents:,} "
        f"documents), validation {corpus.validation_tokens.size:,} tokens ({corpus.num_validation_bytes:,} bytes, "
        f"{len(corpus.validation_starts):,} documents{notes}), digest {corpus.digest[:12]}"
    )


def _directory(root: pathlib.Path, data: DataConfig, source: sources.Source, tokenizer_identity: str) -> pathlib.Path:
    identity = f"{FORMAT}\n{source.identity}\n{tokenizer_identity}".encode(errors="surrogateescape")
    slug = "-".join(re.sub(r"\W+", "_", spec, flags=re.ASCII)[-40:] for spec in (data.source, data.tokenizer))
    return root / f"{slug}-{hashlib.sha256(identity).hexdigest()[:16]}"


def _open(data: DataConfig, directory: pathlib.Path) -> Corpus | None:
    """Memory-maps a prepared corpus; None if it is absent or is not what its own meta.json says."""
    if not directory.exists():
        return None
    try:
        meta = json.loads((directory / "meta.json").read_text())
        tokenizer = tokenizers.load(directory / TOKENIZER)
        if tokenizer is None:
            raise ValueError("its tokenizer is gone")
        tokens = {split: np.load(directory / f"{split}.npy", mmap_mode="r") for split in sources.SPLITS}
        tokens["validation_bytes"] = np.load(directory / "validation_bytes.npy", mmap_mode="r")
        starts = np.array(meta["validation"]["starts"], np.int64)
        names = tuple(meta["validation"]["names"])
        for split in sources.SPLITS:
            array = tokens[split]
            if array.size != meta[split]["tokens"] or array.dtype != token_dtype(tokenizer):
                raise ValueError(f"{split}.npy has {array.size} tokens of type {array.dtype}")
        if tokens["validation_bytes"].size != tokens["validation"].size:
            raise ValueError(f"validation_bytes.npy has {tokens['validation_bytes'].size} numbers")
        if not len(starts) == len(names) == meta["validation"]["documents"] or meta["format"] != FORMAT:
            raise ValueError("meta.json contradicts itself")
        if tokenizer.vocab_size != meta["vocab_size"]:
            raise ValueError(f"the tokenizer has {tokenizer.vocab_size} ids")
        numbers = {
            name: Numbers([TokenFile(str(directory / f"{name}.npy"), array.size, array.dtype.str)])
            for name, array in tokens.items()
        }
        return Corpus(
            source=data.source,
            tokenizer=tokenizer,
            directory=directory,
            digest=meta["digest"],
            train_parts=(numbers["train"],),
            shares=(1.0,),
            validation_tokens=numbers["validation"],
            num_train_documents=meta["train"]["documents"],
            num_train_bytes=meta["train"]["bytes"],
            validation_names=names,
            validation_starts=starts,
            validation_bytes=numbers["validation_bytes"],
            num_validation_bytes=meta["validation"]["bytes"],
            num_also_in_train=meta["train"]["also_held_out"],
            num_altered=meta["validation"]["altered"],
            num_checked=meta["validation"]["checked"],
        )
    except (OSError, StorageError, ValueError, KeyError, TypeError) as error:
        logging.warning("rebuilding the damaged corpus in %s: %s", directory, error)
        return None


def _publish(data: DataConfig, scratch: pathlib.Path, directory: pathlib.Path) -> None:
    """Renames the finished corpus into place, unless another process was first with a good one."""
    while not _renamed(scratch, directory) and _open(data, directory) is None:
        damaged = directory.with_name(f"{directory.name}.{uuid.uuid4().hex}")
        _renamed(directory, damaged)
        shutil.rmtree(damaged, ignore_errors=True)


def _renamed(source: pathlib.Path, target: pathlib.Path) -> bool:
    """Renames a folder. False if the target is there already, or if another process took the source away."""
    try:
        os.rename(source, target)
        return True
    except OSError as error:
        if error.errno in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOENT, errno.ENOTDIR):
            return False
        raise


def _write(data: DataConfig, source: sources.Source, tokenizer: Tokenizer | None, directory: pathlib.Path) -> None:
    if tokenizer is None:
        tokenizer = tokenizers.make(data.tokenizer, (text for _, text in source.documents("train")))
    tokenizers.save(tokenizer, directory / TOKENIZER)
    # Validation first: its texts are few enough to be remembered while the train documents pass.
    held_out: dict[bytes, int] = collections.Counter()
    validation, validation_digest = _write_split(source, "validation", tokenizer, directory, held_out)
    train, train_digest = _write_split(source, "train", tokenizer, directory, held_out)
    meta = dict(format=FORMAT, source=data.source, identity=source.identity, tokenizer=data.tokenizer)
    meta |= dict(vocab_size=tokenizer.vocab_size, train=train, validation=validation)
    meta |= dict(digest=hashlib.sha256(train_digest + validation_digest).hexdigest())
    (directory / "meta.json").write_text(outputs.to_json(meta))


def _write_split(
    source: sources.Source, split: str, tokenizer: Tokenizer, directory: pathlib.Path, held_out: dict[bytes, int]
) -> tuple[dict[str, Any], bytes]:
    """Streams a split's tokens, and of validation the bytes of each, to disk.

    Args:
      held_out: how many validation documents have the text of this digest: filled from validation, used up by train.

    Returns:
      The split's part of meta.json, and the sha256 of its tokens.
    """
    digest = hashlib.sha256()
    meta = dict(tokens=0, documents=0, bytes=0)
    meta |= dict(starts=[], names=[], checked=0, altered=0) if split == "validation" else dict(also_held_out=0)
    with contextlib.ExitStack() as files:
        tokens_file = files.enter_context(_ArrayFile(directory / f"{split}.npy", token_dtype(tokenizer)))
        if split == "validation":
            bytes_file = files.enter_context(_ArrayFile(directory / "validation_bytes.npy", np.dtype("<i4")))
        for name, text in source.documents(split):
            place = f"{source.name}, split {split}, document {printable(name)}"
            ids = tokenizers.encode_document(tokenizer, text, place)
            text_digest = hashlib.sha256(text).digest()
            if split == "train":
                meta["also_held_out"] += held_out.pop(text_digest, 0)
            else:
                held_out[text_digest] += 1
                meta["starts"].append(meta["tokens"])
                meta["names"].append(name)
                bytes_file.append(np.append(np.int32(0), tokenizer.count_bytes(text, ids)))
                if meta["bytes"] + len(text) <= CHECKED_BYTES:
                    meta["checked"] += 1
                    meta["altered"] += tokenizer.decode(ids) not in (text, b" " + text)
            digest.update(tokens_file.append(np.append(np.int32(tokenizer.separator_id), ids)))
            meta["tokens"] += ids.size + 1
            meta["documents"] += 1
            meta["bytes"] += len(text)
    return meta, digest.digest()


class _ArrayFile:
    """An .npy file of one dimension that is written piece by piece."""

    def __init__(self, path: pathlib.Path, dtype: np.dtype):
        self._file, self._dtype, self._size = path.open("wb"), dtype, 0
        self._write_header()

    def append(self, values: np.ndarray) -> bytes:
        """Writes the values; returns what was written."""
        written = values.astype(self._dtype).tobytes()
        self._file.write(written)
        self._size += values.size
        return written

    def _write_header(self) -> None:
        # NumPy pads the header so that it has the same length for every size: it can be written again at the end.
        header = dict(descr=self._dtype.str, fortran_order=False, shape=(self._size,))
        np.lib.format.write_array_header_1_0(self._file, header)

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        with self._file:
            if kind is None:
                self._file.seek(0)
                self._write_header()
                self._file.flush()
                os.fsync(self._file.fileno())
