"""Sentence lengths and a token budget → batches: pure arithmetic, no padding anywhere.

A shard's batches are a function of its rows' lengths and the budget alone: whoever computes the shard, whenever,
runs the same batches and so gets the same bits. Inside a batch sentences lie sorted by length, so that those of
equal length adjoin (the attention works on each run of them as a rectangle); the gather puts each row back at its
own place.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Batch:
    """Sentences that are computed together: their rows within the shard, in packed order, and their lengths."""

    rows: Ints
    lengths: Ints

    @property
    def tokens(self) -> int:
        return int(self.lengths.sum())

    @property
    def bounds(self) -> Ints:
        """First token of each sentence, and the end [S + 1]."""
        return np.concatenate([[0], np.cumsum(self.lengths)])

    @property
    def positions(self) -> Ints:
        """Each packed token's position in its sentence [T]."""
        return np.arange(self.tokens) - np.repeat(self.bounds[:-1], self.lengths)

    @property
    def runs(self) -> tuple[tuple[int, int, int], ...]:
        """Runs of equal length: (first token, sentences, length of each)."""
        lengths, first, counts = np.unique(self.lengths, return_index=True, return_counts=True)
        starts = self.bounds[first]
        return tuple((int(s), int(c), int(n)) for s, c, n in zip(starts, counts, lengths, strict=True))


def pack(lengths: Ints, budget: int) -> list[Batch]:
    """Contiguous rows of near-equal token counts, ceil(tokens ÷ budget) batches where rows allow it, none above it."""
    _check(lengths, budget)
    ends = np.cumsum(lengths)
    total = int(ends[-1])
    count = -(-total // budget)
    while True:
        # Cut where the running total is nearest to an equal share.
        share = total * np.arange(1, count) / count
        cuts = np.searchsorted(ends - lengths / 2, share)
        edges = np.unique(np.concatenate([[0], cuts, [len(lengths)]]))
        batches = [_by_length(np.arange(a, b), lengths) for a, b in pairwise(edges)]
        if all(batch.tokens <= budget for batch in batches):
            return batches
        count += 1


def pack_equal(lengths: Ints, budget: int) -> list[Batch]:
    """Batches of sentences of one length each, for models whose blocks would see across packed sentences."""
    _check(lengths, budget)
    batches = []
    for length in np.unique(lengths):
        rows = np.flatnonzero(lengths == length)
        pieces = -(-len(rows) // max(1, budget // int(length)))
        batches += [_by_length(piece, lengths) for piece in np.array_split(rows, pieces)]
    return batches


def _by_length(rows: Ints, lengths: Ints) -> Batch:
    order = np.argsort(lengths[rows], kind="stable")
    return Batch(rows[order], lengths[rows][order])


def _check(lengths: Ints, budget: int) -> None:
    if len(lengths) == 0 or lengths.min() < 1:
        raise ValueError("every sentence needs a token, and a shard a sentence")
    if lengths.max() > budget:
        raise ValueError(f"a sentence of {lengths.max()} tokens is above the budget of {budget}")
