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
    """As few batches of contiguous rows as the budget allows, none above it, of near-equal token counts.

    The first pass fills each batch to the brim, which needs the fewest; then each edge moves as near to an equal share
    as it may without making one more necessary. Cost: O(batches · log rows).
    """
    _check(lengths, budget)
    ends = np.concatenate([[0], np.cumsum(lengths)])  # tokens before each edge
    latest = [0]
    while latest[-1] < len(lengths):
        latest.append(_edge_after(ends, latest[-1], budget))
    count = len(latest) - 1
    earliest = [len(lengths)]
    for _ in range(count):
        earliest.append(int(np.searchsorted(ends, ends[earliest[-1]] - budget)))
    earliest.reverse()
    middles = ends[:-1] + lengths / 2
    edges = [0]
    for k in range(1, count):
        nearest = int(np.searchsorted(middles, ends[-1] * k / count))
        low, high = max(earliest[k], edges[-1] + 1), min(latest[k], _edge_after(ends, edges[-1], budget))
        edges.append(min(max(nearest, low), high))
    edges.append(len(lengths))
    return [_by_length(np.arange(a, b), lengths) for a, b in pairwise(edges)]


def _edge_after(ends: Ints, edge: int, budget: int) -> int:
    """The last edge that a batch from this one can reach."""
    return int(np.searchsorted(ends, ends[edge] + budget, side="right")) - 1


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
