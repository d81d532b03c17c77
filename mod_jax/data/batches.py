"""From a corpus to batches: the training stream, and fixed held-out windows.

`train_batches` cuts the tokens into chunks of T + 1 that overlap by one token; nothing but chunk *ids* is shuffled,
repeated, mixed and batched. So the stream is a pure function of (seed, step), whatever the number of processes, workers
and resumes. Of a mixture every corpus gives its share of the rows, exact at any step. `eval_batches` gives fixed
held-out windows, spread so that no large document decides the metric.

Every batch is a dict of arrays; a row has T positions, B rows make a batch:
  tokens_BT       int32
  targets_BT      int32  the next token; at the end of a document, the next one's separator
  positions_BT    int32  from 0 at the start of the row and at each separator
  segment_ids_BT  int32  1 for the row's first document, 2 for the second, ...; 0 is padding and counts for nothing
  example_ids_B   int64  the chunk (train) or window (eval); -1 for a row of padding
An evaluation batch has one more:
  target_bytes_BT int32  bytes of text that each target stands for; 0 for separators and padding
"""

import math
from collections.abc import Iterator

import grain
import numpy as np
from absl import flags

from mod_jax import host
from mod_jax.data import tokenizers
from mod_jax.data.corpus import Corpus
from mod_jax.data.token_files import Numbers
from mod_jax.errors import DataError

MIN_EVAL_DOCUMENTS = 10  # so that none has more than a tenth of the windows
READ_OPTIONS = grain.ReadOptions(num_threads=2, prefetch_buffer_size=16)  # the default is 16 threads, 500 batches

Batch = dict[str, np.ndarray]
MODEL_INPUTS = ("tokens_BT", "targets_BT", "positions_BT", "segment_ids_BT")  # what a train step reads of it


def train_batches(
    corpus: Corpus,
    *,
    seq_len: int,
    batch_size: int,
    seed: int,
    start_step: int = 0,
    rows: np.ndarray | slice = slice(None),
    workers: int = 0,
) -> Iterator[Batch]:
    """Yields the training batches of steps start_step, start_step + 1, ... without end, each epoch in a new order.

    Args:
      batch_size: rows of the whole step, over all processes.
      rows: which rows of each batch to load, a slice or their indices; a process passes its own.
      workers: processes that prepare batches; each re-imports __main__, so scripts need their `__name__` guard.

    Raises:
      DataError: if the train split is shorter than one chunk; while iterating, if it holds an unknown token id.
    """
    nums_chunks = [(part.size - 1) // seq_len for part in corpus.train_parts]
    if min(nums_chunks) < 1:
        size = min(part.size for part in corpus.train_parts)
        raise DataError(f"{corpus.source}: {size} train tokens; one row needs data.seq_len + 1 = {seq_len + 1}")
    chunk_ids, ends = _mixed_ids(nums_chunks, corpus.shares, seed), np.cumsum(nums_chunks)
    windows = [_Windows(corpus, "train", part, seq_len) for part in corpus.train_parts]  # of each corpus of a mixture

    def cut(ids_B: np.ndarray) -> Batch:
        if len(windows) == 1:
            return windows[0].cut(ids_B, ids_B * seq_len)
        parts_B = np.searchsorted(ends, ids_B, side="right")
        firsts_B = ids_B - (ends - nums_chunks)[parts_B]
        at = [np.flatnonzero(parts_B == part) for part in range(len(windows))]
        cuts = [window.cut(ids_B[i], firsts_B[i] * seq_len) for window, i in zip(windows, at, strict=True)]
        order = np.argsort(np.concatenate(at))
        return {name: np.concatenate([cut[name] for cut in cuts])[order] for name in cuts[0]}

    batches = chunk_ids.batch(batch_size).map(lambda ids_B: cut(ids_B[rows]))
    dataset = batches[start_step:].to_iter_dataset(READ_OPTIONS)
    if workers:
        if not flags.FLAGS.is_parsed():  # grain reads flags here, which outside absl.app.run nobody has parsed
            flags.FLAGS.mark_as_parsed()
        options = grain.MultiprocessingOptions(num_workers=workers, per_worker_buffer_size=4)
        dataset = dataset.mp_prefetch(options, worker_init_fn=lambda index, count: host.follow_parent())
    return iter(dataset)


def _mixed_ids(nums_chunks: list[int], shares: tuple[float, ...], seed: int) -> grain.MapDataset:
    """The ids of chunks without end, each corpus in an order of its own; ids count on from corpus to corpus."""
    firsts = np.cumsum(nums_chunks) - nums_chunks
    orders = [
        grain.MapDataset.range(int(first), int(first) + count).seed((seed + k) % 2**32).shuffle().repeat()
        for k, (first, count) in enumerate(zip(firsts, nums_chunks, strict=True))
    ]
    return orders[0] if len(orders) == 1 else grain.MapDataset.mix(orders, shares)


def eval_batches(corpus: Corpus, *, seq_len: int, num_windows: int, batch_size: int) -> list[Batch]:
    """Returns the windows of `eval_window_starts` in batches of one shape; the last one is filled up with padding."""
    starts, _ = eval_window_starts(corpus, seq_len, num_windows)
    windows = _Windows(corpus, "validation", corpus.validation_tokens, seq_len)
    batches = []
    for first in range(0, starts.size, batch_size):
        ids_B = np.arange(first, min(first + batch_size, starts.size))
        batch = windows.cut(ids_B, starts[ids_B])
        batch["target_bytes_BT"] = corpus.validation_bytes.windows(starts[ids_B] + 1, seq_len).astype(np.int32)
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
    chosen = np.flatnonzero(counts)  # few, of perhaps millions
    spaced = [_evenly_spaced(starts[i], lengths[i], counts[i], seq_len) for i in chosen]
    return np.concatenate(spaced), np.repeat(chosen, counts[chosen])


def bits_per_byte(total_nats: float, total_bytes: int) -> float:
    """Comparable between tokenizers: the summed loss in nats over the bytes of text that its targets stand for."""
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
    """Cuts windows out of the tokens of a split."""

    def __init__(self, corpus: Corpus, split: str, tokens: Numbers, seq_len: int):
        self.place = f"{corpus.source}, split {split}"
        self.vocab_size = corpus.tokenizer.vocab_size
        self.separator = corpus.tokenizer.separator_id
        self.seq_len = seq_len
        self.tokens = tokens

    def cut(self, ids_B: np.ndarray, starts_B: np.ndarray) -> Batch:
        """Returns the batch of windows `ids_B`, which start at tokens `starts_B`."""
        windows = self.tokens.windows(starts_B, self.seq_len + 1).astype(np.int32)
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
