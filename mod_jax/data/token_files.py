"""Tokens on disk or in a bucket, as one sequence over many files: how every corpus is read.

A local file is memory-mapped. Of one in a bucket the ranges that a batch needs are fetched, all at once.
"""

import dataclasses
import os
from collections.abc import Iterable
from typing import Any

import numpy as np

from mod_jax import buckets, paths


@dataclasses.dataclass(frozen=True)
class TokenFile:
    """One file of numbers: `size` of them, of `dtype`. A .npy file says both itself, and has a header."""

    path: str
    size: int
    dtype: str

    def open(self) -> np.ndarray:
        """The numbers of a local file, memory-mapped.

        Raises:
          OSError, ValueError: it cannot be read, or is not of this size.
        """
        if self.path.endswith(".npy"):
            return np.load(self.path, mmap_mode="r")
        if not self.size:  # an empty file cannot be mapped
            return np.zeros(0, self.dtype)
        return np.memmap(self.path, self.dtype, "r", shape=(self.size,))


class Numbers:
    """The numbers of several files, one after another. Sent to a worker it opens the files again."""

    def __init__(self, files: Iterable[TokenFile]):
        self.files = tuple(files)
        self._ends = np.cumsum([file.size for file in self.files], dtype=np.int64)
        self.size = int(self._ends[-1]) if self.files else 0
        self._maps: dict[int, np.ndarray] = {}

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_maps": {}}  # a memory map would be copied whole

    def windows(self, starts_B: np.ndarray, length: int) -> np.ndarray:
        """Returns [B, length], the numbers from each start on; all must lie within [0, size)."""
        if len(self.files) == 1 and not buckets.is_bucket(self.files[0].path):
            return self._map(0)[starts_B[:, None] + np.arange(length)]
        if not len(starts_B):
            return np.zeros((0, length), self.files[0].dtype)
        pieces = [piece for start in starts_B for piece in self._pieces(int(start), length)]
        return np.concatenate(self._read(pieces)).reshape(len(starts_B), length)

    def all(self) -> np.ndarray:
        """Every number, in memory."""
        read = self._read([(i, 0, file.size) for i, file in enumerate(self.files) if file.size])
        return np.concatenate(read) if read else np.zeros(0, np.int64)

    def _pieces(self, start: int, length: int) -> list[tuple[int, int, int]]:
        """(file, first, end) of the parts of a window: more than one where it crosses the end of a file."""
        pieces, i = [], int(np.searchsorted(self._ends, start, side="right"))
        while length:
            first = start - (int(self._ends[i]) - self.files[i].size)
            taken = min(length, self.files[i].size - first)
            if taken:
                pieces.append((i, first, first + taken))
            start, length, i = start + taken, length - taken, i + 1
        return pieces

    def _read(self, pieces: list[tuple[int, int, int]]) -> list[np.ndarray]:
        if not pieces or not buckets.is_bucket(self.files[0].path):
            return [self._map(i)[first:end] for i, first, end in pieces]
        dtypes = [np.dtype(self.files[i].dtype) for i, _, _ in pieces]
        ranges = [
            (self.files[i].path, first * dtype.itemsize, end * dtype.itemsize)
            for (i, first, end), dtype in zip(pieces, dtypes, strict=True)
        ]
        folder = paths.as_folder(os.path.dirname(self.files[0].path))
        with buckets.naming_failure(folder, "read"):
            answers = buckets.read_ranges(ranges)
        return [np.frombuffer(answer, dtype) for answer, dtype in zip(answers, dtypes, strict=True)]

    def _map(self, i: int) -> np.ndarray:
        if i not in self._maps:
            self._maps[i] = self.files[i].open()
        return self._maps[i]
