"""The digest index against a plain dict: many adds of any size, repeats within and between them, across several growths
of the table, and digests made to collide (equal first words, so that all of them probe along one run of slots).

Also its memory at a million rows, from the arrays' own sizes: the issue allows 40 bytes a distinct row.
"""

from __future__ import annotations

from hashlib import blake2b

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from permafrost.extractor.dedup import DIGEST_BYTES, DigestIndex, digest


class DictIndex:
    """The naive twin."""

    def __init__(self) -> None:
        self.known: dict[bytes, int] = {}

    def add(self, digests: list[bytes]) -> list[int]:
        return [self.known.setdefault(d, len(self.known)) for d in digests]


def digests_of(numbers: np.ndarray[tuple[int], np.dtype[np.uint64]]) -> list[bytes]:
    """A well-mixed digest for each number (an odd multiplier maps 64-bit words one to one)."""
    words = np.stack([numbers * np.uint64(0x9E3779B97F4A7C15) ^ np.uint64(0x5851F42D4C957F2D), numbers], axis=1)
    data = np.ascontiguousarray(words).tobytes()
    return [data[i : i + DIGEST_BYTES] for i in range(0, len(data), DIGEST_BYTES)]


def index_bytes(index: DigestIndex) -> int:
    """Bytes of all arrays that the index holds."""
    return sum(value.nbytes for value in vars(index).values() if isinstance(value, np.ndarray))


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(0, 30).map(lambda n: digest(str(n))), max_size=20), max_size=12))
def test_the_index_numbers_digests_as_a_dict_does(adds: list[list[bytes]]) -> None:
    index, naive = DigestIndex(), DictIndex()
    for digests in adds:
        assert index.add(digests) == naive.add(digests)
        assert index.rows == len(naive.known)


@settings(deadline=None)
@given(st.lists(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 40)), max_size=30), max_size=10))
def test_digests_that_share_a_slot_are_told_apart(adds: list[list[tuple[int, int]]]) -> None:
    """First words that differ only above the table's mask, or not at all; second words as little as possible."""
    index, naive = DigestIndex(), DictIndex()
    for pairs in adds:
        digests = [(high << 60 | 0x3FFF).to_bytes(8, "little") + low.to_bytes(8, "little") for high, low in pairs]
        assert index.add(digests) == naive.add(digests)


@pytest.mark.parametrize("sizes", [[1] * 200, [5000] * 40, [16384, 1, 16384, 3, 100_000], [150_000]])
def test_rows_stay_right_across_growths_of_the_table(sizes: list[int]) -> None:
    """Half of each add was seen before; the last add is everything again."""
    index, naive = DigestIndex(), DictIndex()
    rng = np.random.default_rng(0)
    top = 0
    for size in sizes:
        top += size
        digests = digests_of(rng.integers(0, top, size, dtype=np.uint64))
        assert index.add(digests) == naive.add(digests)
    every = list(naive.known)
    assert index.add(every) == list(range(len(every)))
    assert index.rows == len(every)


def test_an_add_of_nothing_changes_nothing() -> None:
    index = DigestIndex()
    assert index.add([]) == []
    assert index.add([digest("a")]) == [0]
    assert index.add([]) == []
    assert index.rows == 1


def test_a_million_distinct_rows_take_at_most_40_bytes_each() -> None:
    index = DigestIndex()
    for first in range(0, 1_000_000, 50_000):
        added = index.add(digests_of(np.arange(first, first + 50_000, dtype=np.uint64)))
        assert (added[0], added[-1]) == (first, first + 49_999)
        if first >= 100_000:
            assert index_bytes(index) <= 40 * index.rows
    assert index.rows == 1_000_000
    assert 16 * index.rows <= index_bytes(index) <= 40 * index.rows
    assert index.add(digests_of(np.array([999_999, 0, 1_000_000], np.uint64))) == [999_999, 0, 1_000_000]


@pytest.mark.parametrize("text", ["", "a", "naïve – 猫", "a\x00b", "\U0001f9ca"])
def test_a_digest_is_the_blake2b_128_of_the_utf8_bytes(text: str) -> None:
    assert digest(text) == blake2b(text.encode("utf-8"), digest_size=16).digest()
    assert len(digest(text)) == DIGEST_BYTES
