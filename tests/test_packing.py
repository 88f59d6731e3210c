"""Packed batches, over random lengths and budgets: one sentence, one token, all equal, the budget itself as a length,
and shards whose lengths lie so near the budget that hardly any two rows share a batch.

The rules under test are what determinism stands on: every row once, none over budget, a pure function of the lengths.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from permafrost.extractor.packing import Batch, Ints, pack, pack_equal

Packer = Callable[[Ints, int], list[Batch]]
both = pytest.mark.parametrize("packer", [pack, pack_equal])


@st.composite
def shards(draw: st.DrawFn) -> tuple[Ints, int]:
    """Lengths, and a budget from the longest sentence to more than all of them."""
    lengths = np.array(draw(st.lists(st.integers(1, 40), min_size=1, max_size=60)), np.int64)
    budget = int(lengths.max()) + draw(st.sampled_from([0, 1, 7, 40, 200, 3000]))
    return lengths, budget


def ceil_batches(lengths: Ints, budget: int) -> int:
    return -(-int(lengths.sum()) // budget)


def fewest_batches(lengths: Ints, budget: int) -> int:
    """The fewest contiguous batches there can be: fill each up in turn."""
    count, filled = 1, 0
    for length in lengths.tolist():
        if filled + length > budget:
            count, filled = count + 1, 0
        filled += length
    return count


@both
@settings(deadline=None)
@given(shard=shards())
def test_every_row_is_in_exactly_one_batch(packer: Packer, shard: tuple[Ints, int]) -> None:
    lengths, budget = shard
    batches = packer(lengths, budget)
    assert sorted(np.concatenate([b.rows for b in batches]).tolist()) == list(range(len(lengths)))
    for batch in batches:
        assert np.array_equal(batch.lengths, lengths[batch.rows])


@both
@settings(deadline=None)
@given(shard=shards())
def test_no_batch_is_empty_or_over_budget(packer: Packer, shard: tuple[Ints, int]) -> None:
    lengths, budget = shard
    assert all(0 < batch.tokens <= budget for batch in packer(lengths, budget))


@both
@settings(deadline=None)
@given(shard=shards())
def test_batches_are_a_pure_function_of_lengths_and_budget(packer: Packer, shard: tuple[Ints, int]) -> None:
    lengths, budget = shard
    before = lengths.copy()
    first, second = packer(lengths, budget), packer(lengths.copy(), budget)
    assert np.array_equal(lengths, before)
    assert [b.rows.tolist() for b in first] == [b.rows.tolist() for b in second]


@settings(deadline=None)
@given(shard=shards())
def test_packed_batches_hold_contiguous_rows_in_row_order(shard: tuple[Ints, int]) -> None:
    lengths, budget = shard
    in_order = np.concatenate([np.sort(batch.rows) for batch in pack(lengths, budget)])
    assert in_order.tolist() == list(range(len(lengths)))


@settings(deadline=None)
@given(shard=shards())
def test_tokens_are_spread_evenly_where_rows_are_short_beside_the_share(shard: tuple[Ints, int]) -> None:
    """Each cut is off its equal share by at most half a sentence, so a batch by at most one."""
    lengths, budget = shard
    batches = pack(lengths, budget)
    share = lengths.sum() / ceil_batches(lengths, budget)
    if share + lengths.max() <= budget:
        assert len(batches) == ceil_batches(lengths, budget)
        assert all(abs(batch.tokens - share) <= lengths.max() for batch in batches)


@settings(deadline=None)
@given(shard=shards())
@example(shard=(np.array([7, 11, 3, 4, 17, 18, 10, 18, 19]), 21))
@example(shard=(np.array([2, 4, 1, 1, 1, 2, 2, 3, 3, 3, 3, 4, 3, 4, 2, 1, 2, 4, 1, 1]), 9))
def test_there_are_ceil_tokens_over_budget_batches_wherever_rows_allow_it(shard: tuple[Ints, int]) -> None:
    lengths, budget = shard
    if fewest_batches(lengths, budget) == ceil_batches(lengths, budget):
        assert len(pack(lengths, budget)) == ceil_batches(lengths, budget)


@pytest.mark.parametrize("lengths", [[1, 512], [300, 512, 256, 490]])
def test_a_shard_of_sentences_that_hardly_share_a_batch_is_packed_in_moments(lengths: list[int]) -> None:
    """A search that tries one batch more at a time over all rows takes seconds here, minutes at 8,192 rows: real
    at `--tokens-per-batch 512` on documents cut at 512 tokens. One pass takes milliseconds of CPU time."""
    shard = np.tile(np.array(lengths, np.int64), 1024 // len(lengths))
    began = time.process_time()
    batches = pack(shard, 512)
    assert time.process_time() - began < 1
    assert all(batch.tokens <= 512 for batch in batches)


@settings(deadline=None)
@given(shard=shards())
def test_equal_batches_hold_one_length_each_and_no_more_batches_than_needed(shard: tuple[Ints, int]) -> None:
    lengths, budget = shard
    batches = pack_equal(lengths, budget)
    assert all(len(set(batch.lengths.tolist())) == 1 for batch in batches)
    for length, count in zip(*np.unique(lengths, return_counts=True), strict=True):
        own = [len(batch.rows) for batch in batches if batch.lengths[0] == length]
        assert len(own) == -(-int(count) // (budget // int(length)))
        assert max(own) - min(own) <= 1


@both
@settings(deadline=None)
@given(shard=shards())
def test_runs_cover_the_batch_without_gap_one_for_each_length(packer: Packer, shard: tuple[Ints, int]) -> None:
    for batch in packer(*shard):
        at = 0
        for first, sentences, length in batch.runs:
            assert first == at and sentences > 0
            at += sentences * length
        assert at == batch.tokens
        widths = [length for _, _, length in batch.runs]
        assert widths == sorted(set(widths))
        assert np.repeat(widths, [count for _, count, _ in batch.runs]).tolist() == batch.lengths.tolist()


@both
@settings(deadline=None)
@given(shard=shards())
def test_bounds_and_positions_restart_at_each_sentence(packer: Packer, shard: tuple[Ints, int]) -> None:
    for batch in packer(*shard):
        assert np.array_equal(np.diff(batch.bounds), batch.lengths) and batch.bounds[0] == 0
        assert batch.positions.tolist() == [p for n in batch.lengths.tolist() for p in range(n)]


def test_rows_of_equal_length_keep_their_order() -> None:
    (batch,) = pack(np.array([3, 1, 3, 1, 3]), 100)
    assert batch.rows.tolist() == [1, 3, 0, 2, 4]


@both
@pytest.mark.parametrize(
    ("lengths", "budget", "says"),
    [([], 8, "a shard a sentence"), ([2, 0], 8, "needs a token"), ([3, 9], 8, "9 tokens is above the budget of 8")],
)
def test_what_cannot_be_packed_is_refused(packer: Packer, lengths: list[int], budget: int, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        packer(np.array(lengths, np.int64), budget)
