"""From a source to batches, in two stages.

Stage 1, `prepare`: source -> tokenise once -> one flat token file per split, each document preceded by the separator,
in a cache folder keyed by everything that the tokens depend on. The result, a `Corpus`, is memory-mapped.

Stage 2, `train_batches`: the tokens are cut into chunks of T + 1 that overlap by one token, and nothing but chunk *ids*
is shuffled, repeated and batched. So the stream is a pure function of (seed, step), whatever the number of processes,
workers and resumes. `eval_batches` gives fixed held-out windows, spread so that no large document decides the metric.

Every batch is a dict of arrays; a row has T positions, B rows make a batch:
  tokens_BT       int32
  targets_BT      int32  the next token; at the end of a document, the next one's separator
  positions_BT    int32  from 0 at the start of the row and at each separator
  segment_ids_BT  int32  1 for the row's first document, 2 for the second, ...; 0 is padding and counts for nothing
  example_ids_B   int64  the chunk (train) or window (eval); -1 for a row of padding
"""

import dataclasses
import hashlib
import json
import math
import os
import pathlib
import re
import shutil
import uuid
from collections.abc import Iterator

import grain
import numpy as np
from absl import flags, logging

from mod_jax.config import DataConfig
from mod_jax.data import sources, tokenizers
from mod_jax.data.sources import DataError

FORMAT = 1  # of the cache; part of every key
MIN_EVAL_DOCUMENTS = 10  # so that none has more than a tenth of the windows
READ_OPTIONS = grain.ReadOptions(num_threads=2, prefetch_buffer_size=16)  # the default is 16 threads, 500 batches

Batch = dict[str, np.ndarray]


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


def prepare(data: DataConfig) -> Corpus:
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
        logging.info("%s", describe(corpus))
    return corpus


def describe(corpus: Corpus) -> str:
    """One line about a corpus, for a person."""
    return (
        f"{corpus.source} as {corpus.tokenizer.name} ({corpus.tokenizer.vocab_size} ids): "
        f"train {corpus.train_tokens.size:,} tokens ({corpus.num_train_bytes:,} bytes, {corpus.num_train_documents:,} "
        f"documents), validation {corpus.validation_tokens.size:,} tokens ({corpus.num_validation_bytes:,} bytes, "
        f"{len(corpus.validation_names):,} documents), digest {corpus.digest[:12]}"
    )


def train_batches(
    corpus: Corpus,
    *,
    seq_len: int,
    batch_size: int,
    seed: int,
    start_step: int = 0,
    rows: slice = slice(None),
    workers: int = 0,
) -> Iterator[Batch]:
    """Yields the training batches of steps start_step, start_step + 1, ... without end, each epoch in a new order.

    Args:
      batch_size: rows of the whole step, over all processes.
      rows: which rows of each batch to load; a process passes its own.
      workers: processes that prepare batches; each re-imports __main__, so scripts need their `__name__` guard.

    Raises:
      DataError: if the train split is shorter than one chunk; while iterating, if it holds an unknown token id.
    """
    num_chunks = (corpus.train_tokens.size - 1) // seq_len
    if num_chunks < 1:
        raise DataError(
            f"{corpus.source}: {corpus.train_tokens.size} train tokens; one row needs data.seq_len + 1 = {seq_len + 1}"
        )
    windows = _Windows(corpus, "train", seq_len)
    chunk_ids = grain.MapDataset.range(num_chunks).seed(seed).shuffle().repeat().batch(batch_size)
    batches = chunk_ids.map(lambda ids_B: windows.cut(ids_B[rows], ids_B[rows] * seq_len))
    dataset = batches[start_step:].to_iter_dataset(READ_OPTIONS)
    if workers:
        if not flags.FLAGS.is_parsed():  # grain reads flags here, which outside absl.app.run nobody has parsed
            flags.FLAGS.mark_as_parsed()
        dataset = dataset.mp_prefetch(grain.MultiprocessingOptions(num_workers=workers, per_worker_buffer_size=4))
    return iter(dataset)


def eval_batches(corpus: Corpus, *, seq_len: int, num_windows: int, batch_size: int) -> list[Batch]:
    """Returns the windows of `eval_window_starts` in batches of one shape; the last one is filled up with padding."""
    starts, _ = eval_window_starts(corpus, seq_len, num_windows)
    windows = _Windows(corpus, "validation", seq_len)
    batches = []
    for first in range(0, starts.size, batch_size):
        ids_B = np.arange(first, min(first + batch_size, starts.size))
        batch = windows.cut(ids_B, starts[ids_B])
        for name, array in batch.items():
            padding = [(0, batch_size - ids_B.size)] + [(0, 0)] * (array.ndim - 1)
            batch[name] = np.pad(array, padding, constant_values=-1 if name == "example_ids_B" else 0)
        batches.append(batch)
    return batches


def eval_window_starts(corpus: Corpus, seq_len: int, num_windows: int) -> tuple[np.ndarray, np.ndarray]:
    """Chooses the held-out windows: returns where each starts, and the index of the document it comes from.

    A window is seq_len + 1 tokens. Every document that holds one gets the same number of windows, as far as it has room
    for them without overlap, evenly spaced within it; none gets more than a tenth of all (nor, if there are fewer than
    ten, more than one). So there may be fewer windows than asked for. Where fewer than ten documents hold a window, no
    choice keeps that promise: then windows are evenly spaced over the whole split, across document boundaries.
    """
    starts, size = corpus.validation_starts, corpus.validation_tokens.size
    if size <= seq_len:
        raise DataError(f"{corpus.source}: {size} validation tokens; one window needs data.seq_len + 1 = {seq_len + 1}")
    lengths = np.diff(starts, append=size)
    counts = _windows_per_document((lengths - 1) // seq_len, num_windows)
    if counts is None:
        windows = _evenly_spaced(0, size, min(num_windows, (size - 1) // seq_len), seq_len)
        return windows, np.searchsorted(starts, windows, side="right") - 1
    spaced = [_evenly_spaced(*document, seq_len) for document in zip(starts, lengths, counts, strict=True)]
    return np.concatenate(spaced), np.repeat(np.arange(counts.size), counts)


def bits_per_byte(total_nats: float, total_bytes: int) -> float:
    """Comparable between tokenizers: the summed loss in nats over the bytes that its targets stand for."""
    return total_nats / math.log(2) / total_bytes


def _windows_per_document(room: np.ndarray, num_windows: int) -> np.ndarray | None:
    """Deals windows round by round to the documents with room left; None if fewer than ten have any."""
    if np.count_nonzero(room) < MIN_EVAL_DOCUMENTS:
        return None
    counts = np.zeros_like(room)
    while counts.sum() < num_windows:
        takers = np.flatnonzero(room > counts)
        missing = num_windows - counts.sum()
        if takers.size > missing:  # the last round goes to documents evenly spread over the split
            takers = takers[np.arange(missing) * takers.size // missing]
        dealt = counts.copy()
        dealt[takers] += 1
        if not takers.size or dealt.max() > max(1, dealt.sum() // MIN_EVAL_DOCUMENTS):
            break
        counts = dealt
    return counts


def _evenly_spaced(start: int, length: int, count: int, seq_len: int) -> np.ndarray:
    """Starts of `count` windows, each in the middle of its equal share of [start, start + length)."""
    shares = np.arange(count)
    middles_doubled = (2 * shares + 1) * (length - 1) // max(count, 1)
    return start + (middles_doubled - seq_len) // 2


class _Windows:
    """Cuts windows out of a split. Sent to a worker it reopens the file, for a memory map would be copied whole."""

    def __init__(self, corpus: Corpus, split: str, seq_len: int):
        self.path = corpus.directory / f"{split}.npy"
        self.place = f"{corpus.source}, split {split}"
        self.vocab_size = corpus.tokenizer.vocab_size
        self.separator = corpus.tokenizer.separator_id
        self.seq_len = seq_len
        self.tokens = np.load(self.path, mmap_mode="r")

    def __getstate__(self):
        return {name: value for name, value in vars(self).items() if name != "tokens"}

    def __setstate__(self, state):
        vars(self).update(state, tokens=np.load(state["path"], mmap_mode="r"))

    def cut(self, ids_B: np.ndarray, starts_B: np.ndarray) -> Batch:
        """Returns the batch of windows `ids_B`, which start at tokens `starts_B`."""
        windows = self.tokens[starts_B[:, None] + np.arange(self.seq_len + 1)].astype(np.int32)
        tokenizers.refuse_unknown_ids(windows, self.vocab_size, self.place, DataError)
        tokens_BT, targets_BT = windows[:, :-1], windows[:, 1:]
        is_start_BT = tokens_BT == self.separator
        is_start_BT[:, 0] = True
        offsets_T = np.arange(self.seq_len, dtype=np.int32)
        start_offsets_BT = np.maximum.accumulate(np.where(is_start_BT, offsets_T, 0), axis=1)
        return dict(
            tokens_BT=np.ascontiguousarray(tokens_BT),
            targets_BT=np.ascontiguousarray(targets_BT),
            positions_BT=offsets_T - start_offsets_BT,
            segment_ids_BT=np.cumsum(is_start_BT, axis=1, dtype=np.int32),
            example_ids_B=ids_B.astype(np.int64),
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
    (directory / "meta.json").write_text(json.dumps(meta | dict(digest=digest.hexdigest())))


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
