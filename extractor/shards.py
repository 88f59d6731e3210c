"""Which rows make which shard, and which shards are left: pure arithmetic, and the whole of resume.

A shard is a contiguous range of rows that is computed by one worker and written once, whole. Its size depends on
the row's bytes alone, so that the same store has the same shards whoever computes it.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

BLOCK_ROWS = 256  # rows of an inner chunk: one layer of a block is read without the others


@dataclass(frozen=True)
class Shard:
    """Rows `start` to `stop` of the store."""

    index: int
    start: int
    stop: int

    @property
    def rows(self) -> int:
        return self.stop - self.start


def rows_per_shard(row_bytes: int, shard_bytes: int) -> int:
    """The largest multiple of 256 rows within `shard_bytes`, and at least 256."""
    return max(1, shard_bytes // (row_bytes * BLOCK_ROWS)) * BLOCK_ROWS


def all_shards(rows: int, shard_rows: int) -> list[Shard]:
    """The shards of a store, in row order; the last may be short."""
    return [Shard(i, start, min(start + shard_rows, rows)) for i, start in enumerate(range(0, rows, shard_rows))]


def shards_left(rows: int, shard_rows: int, done: Collection[int]) -> list[Shard]:
    """What a run still has to compute, in row order."""
    return [shard for shard in all_shards(rows, shard_rows) if shard.index not in done]


def ranges(indices: Collection[int]) -> str:
    """Numbers as people write them: `0-3, 7`."""
    spans: list[list[int]] = []
    for i in sorted(set(indices)):
        if spans and i == spans[-1][1] + 1:
            spans[-1][1] = i
        else:
            spans.append([i, i])
    return ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in spans)
