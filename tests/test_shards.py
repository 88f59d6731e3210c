"""Shards and resume: what is left, as a table of cases (nothing, some, all done, numbers that are none), and shard
sizes at the edges of 256 rows; properties over random stores for the cover."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from permafrost.extractor.shards import BLOCK_ROWS, Shard, all_shards, ranges, rows_per_shard, shards_left

KIB, MIB = 1 << 10, 1 << 20


@pytest.mark.parametrize(
    ("rows", "shard_rows", "done", "left"),
    [
        (1000, 256, set(), [(0, 0, 256), (1, 256, 512), (2, 512, 768), (3, 768, 1000)]),
        (1000, 256, {0, 1, 2, 3}, []),
        (1000, 256, {0, 1}, [(2, 512, 768), (3, 768, 1000)]),
        (1000, 256, {3}, [(0, 0, 256), (1, 256, 512), (2, 512, 768)]),
        (1000, 256, {0, 2}, [(1, 256, 512), (3, 768, 1000)]),
        (1000, 256, {2, 7, 99}, [(0, 0, 256), (1, 256, 512), (3, 768, 1000)]),
        (256, 256, set(), [(0, 0, 256)]),
        (257, 256, {0}, [(1, 256, 257)]),
        (1, 256, set(), [(0, 0, 1)]),
        (1, 4096, {0}, []),
        (0, 256, set(), []),
    ],
)
def test_what_is_left(rows: int, shard_rows: int, done: set[int], left: list[tuple[int, int, int]]) -> None:
    assert shards_left(rows, shard_rows, done) == [Shard(*span) for span in left]


@pytest.mark.parametrize("kind", [set, list, tuple, frozenset])
def test_what_is_done_may_come_in_any_collection(kind: type) -> None:
    assert [shard.index for shard in shards_left(1024, 256, kind([2, 0]))] == [1, 3]


@settings(deadline=None)
@given(rows=st.integers(0, 5000), blocks=st.integers(1, 5), done=st.sets(st.integers(0, 25)))
def test_left_and_done_together_cover_each_row_once(rows: int, blocks: int, done: set[int]) -> None:
    every = all_shards(rows, blocks * BLOCK_ROWS)
    left = shards_left(rows, blocks * BLOCK_ROWS, done)
    assert [row for shard in every for row in range(shard.start, shard.stop)] == list(range(rows))
    assert left == [shard for shard in every if shard.index not in done]
    assert [shard.index for shard in every] == list(range(len(every)))


@settings(deadline=None)
@given(rows=st.integers(1, 5000), blocks=st.integers(1, 5))
def test_all_shards_but_the_last_are_full(rows: int, blocks: int) -> None:
    *full, last = all_shards(rows, blocks * BLOCK_ROWS)
    assert all(shard.rows == blocks * BLOCK_ROWS for shard in full)
    assert 1 <= last.rows <= blocks * BLOCK_ROWS


@pytest.mark.parametrize(
    ("row_bytes", "shard_bytes", "rows"),
    [
        (24 * 1024 * 4, 128 * MIB, 1280),
        (30 * 576 * 4, 128 * MIB, 1792),
        (1 * KIB, 256 * KIB, 256),
        (1 * KIB, 512 * KIB, 512),
        (1 * KIB, 512 * KIB - 1, 256),
        (1 * KIB, 1, 256),
        (64 * MIB, 128 * MIB, 256),
        (1, 64 * KIB, 65536),
    ],
)
def test_a_shard_is_the_largest_multiple_of_256_rows_within_its_bytes(
    row_bytes: int, shard_bytes: int, rows: int
) -> None:
    assert rows_per_shard(row_bytes, shard_bytes) == rows


@settings(deadline=None)
@given(row_bytes=st.integers(1, 10**7), shard_bytes=st.integers(1, 10**10))
def test_a_shard_holds_whole_blocks_and_one_more_would_not_fit(row_bytes: int, shard_bytes: int) -> None:
    rows = rows_per_shard(row_bytes, shard_bytes)
    assert rows % BLOCK_ROWS == 0 and rows >= BLOCK_ROWS
    assert rows == BLOCK_ROWS or rows * row_bytes <= shard_bytes
    assert (rows + BLOCK_ROWS) * row_bytes > shard_bytes


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ([], ""),
        ([7], "7"),
        ([0, 1, 2, 3, 7], "0-3, 7"),
        ([4, 2, 3, 9, 0], "0, 2-4, 9"),
        ([1, 1, 2, 2], "1-2"),
        ({10, 12, 14}, "10, 12, 14"),
        (range(1000), "0-999"),
    ],
)
def test_ranges_read_as_people_write_them(numbers: list[int], text: str) -> None:
    assert ranges(numbers) == text


@settings(deadline=None)
@given(numbers=st.sets(st.integers(0, 60)))
def test_ranges_name_exactly_their_numbers(numbers: set[int]) -> None:
    named: list[int] = []
    for part in ranges(numbers).split(", ") if numbers else []:
        first, _, last = part.partition("-")
        named += range(int(first), int(last or first) + 1)
    assert named == sorted(numbers)
