"""Which sentences were seen before: 16-byte digests in flat arrays, about 32 bytes a distinct sentence.

An open-addressing table of row numbers (uint32, at most 70% full, freed before it is rebuilt larger) points into
one array of digests that grows in place by an eighth. A Python set of the texts would take about 156 bytes each.
Two texts are held to be equal if their BLAKE2b-128 digests are.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

DIGEST_BYTES = 16
_MAX_LOAD = 0.7
_REBUILD = 1 << 16  # digests put back at a time when the table grows; a million at once took 18 bytes a row more


def digest(text: str) -> bytes:
    """BLAKE2b-128 of the text's UTF-8 bytes."""
    return blake2b(text.encode(), digest_size=DIGEST_BYTES).digest()


class DigestIndex:
    """Numbers distinct digests in order of first appearance."""

    def __init__(self) -> None:
        self.rows = 0
        self._digests: NDArray[np.uint64] = np.empty((1 << 12, 2), np.uint64)
        self._table: NDArray[np.uint32] = np.zeros(1 << 14, np.uint32)  # row + 1; 0 is free

    def add(self, digests: Sequence[bytes]) -> list[int]:
        """The row of each digest; those not seen before get the next numbers in order."""
        distinct = dict.fromkeys(digests)
        words = np.frombuffer(b"".join(distinct), np.uint64).reshape(-1, 2)
        found = self._find(words)
        new = found < 0
        found[new] = np.arange(self.rows, self.rows + int(new.sum()))
        self._append(words[new])
        row_of = dict(zip(distinct, found.tolist(), strict=True))
        return [row_of[d] for d in digests]

    def _find(self, words: NDArray[np.uint64]) -> NDArray[np.int64]:
        """Row of each digest, -1 where it is not there; one probe of all open ones a round."""
        found = np.full(len(words), -1, np.int64)
        mask = np.uint64(len(self._table) - 1)
        slot = words[:, 0] & mask
        open_ = np.arange(len(words))
        while len(open_):
            at = self._table[slot[open_]]
            taken = at != 0
            open_, row = open_[taken], at[taken].astype(np.int64) - 1
            same = (self._digests[row] == words[open_]).all(axis=1)
            found[open_[same]] = row[same]
            open_ = open_[~same]
            slot[open_] = (slot[open_] + np.uint64(1)) & mask
        return found

    def _append(self, words: NDArray[np.uint64]) -> None:
        start, self.rows = self.rows, self.rows + len(words)
        if self.rows > len(self._digests):
            # In place: realloc moves pages instead of copying them, so that the old array never stands beside it.
            self._digests.resize((max(self.rows, len(self._digests) * 9 // 8), 2), refcheck=False)
        self._digests[start : self.rows] = words
        if self.rows > _MAX_LOAD * len(self._table):
            size = len(self._table)
            while self.rows > _MAX_LOAD * size:
                size *= 2
            del self._table
            self._table = np.zeros(size, np.uint32)
            start = 0
        for first in range(start, self.rows, _REBUILD):
            self._insert(np.arange(first, min(first + _REBUILD, self.rows)))

    def _insert(self, rows: NDArray[np.int64]) -> None:
        mask = np.uint64(len(self._table) - 1)
        slot = self._digests[rows, 0] & mask
        entry = (rows + 1).astype(np.uint32)
        while len(rows):
            free = self._table[slot] == 0
            # Several may claim one free slot; the last write stands, the others go on to the next slot.
            self._table[slot[free]] = entry[free]
            lost = self._table[slot] != entry
            rows, slot, entry = rows[lost], (slot[lost] + np.uint64(1)) & mask, entry[lost]
