"""The gather kernel against its plain twin, and the twin against loops in numpy.

Without a GPU the kernel runs in Triton's interpreter, in float32 and float16 (it truncates to bfloat16 where a GPU
rounds); with one, the same cases run on it, and bfloat16 too.

| regime | the bug it would catch |
|---|---|
| widths 1, 63, 500, 1000, 1025, 1500 | a missing column mask; the second program of a row (above 1,024) misplaced |
| 1, 2, 7, 300 sentences, rows shuffled over two blocks | rows in batch order; a row written past its block of 256 |
| hidden rows lie in a wider buffer | width taken for the stride |
| one-token sentences, with `skip_first` | a vector of no tokens: 0 ÷ 0 |
| NaN in tokens that do not count: left out by `skip_first`, not the last for `last` | reading them: 0 · NaN is NaN |
| NaN in the whole slab and around it, compared bit by bit | a write to another row, layer, or outside the slab |
| layers 0, 1, 16 of 17 | `layer` compiled in where it is 1 or a multiple of 16 |
| float16 at 65,504 and just above, NaN, infinities | counting before the cast; a count at another layer |
| (GPU) more than 2³¹ elements in front of the row | 32-bit addresses |

Tolerances. `last` only casts, once, rounding to nearest even on both sides: equal bit by bit. The others sum at most
12 float32 values of about unit size in different orders: the error stays below 12 · 2⁻²⁴ · 12 (weights of a sum),
about 1e-5; a stored half-precision number adds one unit in the last place where that tips a rounding (2⁻¹⁰ in
float16, 2⁻⁷ in bfloat16).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from permafrost.kernels import POOLS, Pool
from permafrost.kernels.gather import gather, gather_triton
from permafrost.kernels.gather_naive import gather_naive

R = 256
GUARD = 64  # poisoned elements before and after the slab
SHAPES = [(1, 1), (7, 1), (2, 63), (7, 500), (1, 1000), (7, 1025), (2, 1500)]
DTYPES = [(torch.float32, torch.float32), (torch.float16, torch.float16), (torch.float32, torch.float16)]
BFLOAT16 = [
    (torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.float32),
    (torch.float32, torch.bfloat16),
]
BITS = {torch.float32: torch.int32, torch.float16: torch.int16, torch.bfloat16: torch.int16}

interpreted = pytest.mark.skipif(
    torch.cuda.is_available() or importlib.util.find_spec("triton") is None,
    reason="Triton's interpreter is for machines without a GPU",
)
devices = pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=interpreted), pytest.param("cuda", marks=pytest.mark.gpu)]
)
shapes = pytest.mark.parametrize(("sentences", "width"), SHAPES)
pools = pytest.mark.parametrize("pool", POOLS)
skips = pytest.mark.parametrize("skip_first", [False, True], ids=["all", "skip_first"])

Gather = Callable[[Tensor, Tensor, Tensor, Tensor, int, Tensor, Pool, bool], None]


def show(value: Any) -> str | None:
    """Test ids as `float16-float32`."""
    return "-".join(str(d).removeprefix("torch.") for d in value) if isinstance(value, tuple) else None


@dataclass
class Batch:
    """A packed batch on one device: what `gather` takes, beside the slab."""

    hidden: Tensor
    bounds: Tensor
    rows: Tensor

    @property
    def lengths(self) -> list[int]:
        return (self.bounds[1:] - self.bounds[:-1]).tolist()


def make_batch(
    sentences: int, width: int, dtype: torch.dtype, pool: Pool, skip_first: bool, device: str, seed: int = 0
) -> Batch:
    """Random hidden states, every third sentence of one token, NaN wherever a token must not be read."""
    generator = np.random.default_rng(seed)
    lengths = generator.integers(2, 6, sentences)
    lengths[::3] = 1
    lengths[sentences // 2] = 12 if 1 < sentences < 300 else 3
    bounds = np.concatenate([[0], np.cumsum(lengths)])
    values = generator.standard_normal((bounds[-1], width)).astype(np.float32)
    for start, stop in pairwise(bounds.tolist()):
        if pool == "last":
            values[start : stop - 1] = np.nan
        elif skip_first and stop - start > 1:
            values[start] = np.nan
    buffer = torch.full((len(values), width + 5), torch.nan)
    buffer[:, :width] = torch.from_numpy(values)
    rows = generator.permutation(2 * R)[:sentences]
    return Batch(
        buffer.to(device, dtype)[:, :width],
        torch.from_numpy(bounds.astype(np.int32)).to(device),
        torch.from_numpy(rows.astype(np.int32)).to(device),
    )


class PoisonedSlab:
    """A slab [blocks, layers, 256, width] in the midst of a buffer; all of it NaN with a payload of its own."""

    def __init__(self, layers: int, width: int, dtype: torch.dtype, device: str, blocks: int = 2) -> None:
        count = blocks * layers * R * width
        self.poison = {torch.float32: 0x7FE12345, torch.float16: 0x7F01, torch.bfloat16: 0x7FE1}[dtype]
        self._bits = torch.full((count + 2 * GUARD,), self.poison, dtype=BITS[dtype], device=device)
        self.slab = self._bits.view(dtype)[GUARD:-GUARD].view(blocks, layers, R, width)
        self.nonfinite = torch.zeros(layers, dtype=torch.int32, device=device)

    def rows(self, batch: Batch, layer: int) -> Tensor:
        """The batch's rows as they were written [S, D], on the host."""
        at = batch.rows.long()
        return self.slab[at // R, layer, at % R].cpu()

    def untouched_elsewhere(self, batch: Batch, layer: int) -> bool:
        """Whether every other element, around the slab too, still holds the poison, bit by bit."""
        bits = self._bits.clone()
        at = batch.rows.long()
        bits[GUARD:-GUARD].view(self.slab.shape)[at // R, layer, at % R] = self.poison
        return bool((bits == self.poison).all())


def run(
    how: Gather, batch: Batch, dtype: torch.dtype, pool: Pool, skip_first: bool, layer: int = 1, layers: int = 3
) -> tuple[Tensor, list[int]]:
    """The batch's rows and the counts after one gather into a fresh slab, which must be else untouched."""
    target = PoisonedSlab(layers, batch.hidden.shape[1], dtype, str(batch.hidden.device))
    how(batch.hidden, batch.bounds, batch.rows, target.slab, layer, target.nonfinite, pool, skip_first)
    assert target.untouched_elsewhere(batch, layer)
    return target.rows(batch, layer), target.nonfinite.tolist()


def by_loop(batch: Batch, pool: Pool, skip_first: bool) -> NDArray[np.float64]:
    """What pooling means, in plain loops and double precision [S, D]."""
    hidden = batch.hidden.cpu().double().numpy()
    vectors, start = [], 0
    for length in batch.lengths:
        tokens = list(hidden[start : start + length])
        start += length
        if pool == "last":
            vectors.append(tokens[-1])
            continue
        if skip_first and len(tokens) > 1:
            tokens = tokens[1:]
        weights = [float(i) if pool == "weighted_mean" else 1.0 for i in range(1, len(tokens) + 1)]
        total = sum(w * token for w, token in zip(weights, tokens, strict=True))
        vectors.append(total if pool == "sum" else total / sum(weights))
    return np.array(vectors)


def assert_near(actual: Tensor, expected: Tensor, pool: Pool) -> None:
    """Equal bit by bit for `last`; else within summation order and one unit in the last place."""
    if pool == "last":
        assert torch.equal(actual.view(BITS[actual.dtype]), expected.view(BITS[expected.dtype]))
        return
    ulp = {torch.float32: 0.0, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}[actual.dtype]
    torch.testing.assert_close(actual, expected, rtol=1e-5 + ulp, atol=1e-5)


@pytest.mark.parametrize(("sentences", "width"), [*SHAPES, (300, 63), (300, 1025)])
@pools
@skips
def test_naive_gives_what_loops_give(sentences: int, width: int, pool: Pool, skip_first: bool) -> None:
    for source, stored in DTYPES:
        batch = make_batch(sentences, width, source, pool, skip_first, "cpu")
        found, counts = run(gather_naive, batch, stored, pool, skip_first)
        expected = torch.from_numpy(by_loop(batch, pool, skip_first)).to(stored)
        assert_near(found, expected, pool)
        assert counts == [0, 0, 0]


@devices
@shapes
@pools
@skips
@pytest.mark.parametrize("dtypes", DTYPES, ids=show)
def test_kernel_equals_naive(
    sentences: int,
    width: int,
    pool: Pool,
    skip_first: bool,
    dtypes: tuple[torch.dtype, torch.dtype],
    device: str,
) -> None:
    source, stored = dtypes
    batch = make_batch(sentences, width, source, pool, skip_first, device)
    found, counts = run(gather_triton, batch, stored, pool, skip_first)
    expected, expected_counts = run(gather_naive, batch, stored, pool, skip_first)
    assert_near(found, expected, pool)
    assert counts == expected_counts == [0, 0, 0]


@devices
@pools
def test_kernel_equals_naive_where_rows_cross_a_block(pool: Pool, device: str) -> None:
    """300 shuffled rows over two blocks; few combinations, for the interpreter takes a second for each."""
    width = 1025 if device == "cuda" else 63
    batch = make_batch(300, width, torch.float16, pool, True, device)
    found, counts = run(gather_triton, batch, torch.float32, pool, True)
    expected, _ = run(gather_naive, batch, torch.float32, pool, True)
    assert_near(found, expected, pool)
    assert counts == [0, 0, 0]


@pytest.mark.gpu
@shapes
@pools
@skips
@pytest.mark.parametrize("dtypes", BFLOAT16, ids=show)
def test_kernel_equals_naive_in_bfloat16(
    sentences: int, width: int, pool: Pool, skip_first: bool, dtypes: tuple[torch.dtype, torch.dtype]
) -> None:
    source, stored = dtypes
    batch = make_batch(sentences, width, source, pool, skip_first, "cuda")
    found, counts = run(gather_triton, batch, stored, pool, skip_first)
    expected, _ = run(gather_naive, batch, stored, pool, skip_first)
    assert_near(found, expected, pool)
    assert counts == [0, 0, 0]


@devices
@pools
def test_kernel_takes_long_indices(pool: Pool, device: str) -> None:
    """int64 bounds and rows give the same as int32 ones."""
    batch = make_batch(7, 63, torch.float32, pool, False, device)
    wide = Batch(batch.hidden, batch.bounds.long(), batch.rows.long())
    assert torch.equal(
        run(gather_triton, batch, torch.float32, pool, False)[0],
        run(gather_triton, wide, torch.float32, pool, False)[0],
    )


@devices
@pytest.mark.parametrize("how", [gather_naive, gather_triton])
def test_each_layer_is_written_at_its_own_place(how: Gather, device: str) -> None:
    """Several layers into one slab, in turn: each call leaves what the others wrote, and the counts stay apart."""
    target = PoisonedSlab(17, 63, torch.float32, device)
    layers = (16, 0, 1)
    batches = {layer: make_batch(7, 63, torch.float32, "last", False, device, seed=layer) for layer in layers}
    rows = batches[0].rows
    for layer, batch in batches.items():
        batch.hidden[batch.bounds[1].long() - 1, :layer] = torch.inf
        how(batch.hidden, batch.bounds, rows, target.slab, layer, target.nonfinite, "last", False)
    for layer, batch in batches.items():
        at = rows.long()
        assert torch.equal(target.slab[at // R, layer, at % R], batch.hidden[batch.bounds[1:].long() - 1])
    others = [layer for layer in range(17) if layer not in layers]
    assert target.slab[:, others].isnan().all()
    assert target.nonfinite.tolist() == [16 if layer == 16 else 1 if layer == 1 else 0 for layer in range(17)]


def nonfinite_batch(device: str, width: int = 1500) -> Batch:
    """Three one-token sentences: the first with four values that float16 cannot hold and two that round to 65,504,
    the second with NaN and both infinities, in both programs of the row, the third finite."""
    hidden = torch.zeros(3, width)
    hidden[0, :6] = torch.tensor([65520.0, -65520.0, 1e6, -3e38, 65519.0, 65504.0])
    hidden[1, [0, 1023, 1024, width - 1]] = torch.tensor([torch.nan, torch.inf, -torch.inf, torch.nan])
    return Batch(hidden.to(device), torch.arange(4, device=device), torch.tensor([300, 0, 256], device=device))


@devices
@pytest.mark.parametrize("how", [gather_naive, gather_triton])
@pools
@pytest.mark.parametrize(("stored", "count"), [(torch.float32, 4), (torch.float16, 8)], ids=["float32", "float16"])
@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
def test_values_are_counted_that_are_not_finite_as_stored(
    how: Gather, pool: Pool, stored: torch.dtype, count: int, device: str
) -> None:
    found, counts = run(how, nonfinite_batch(device), stored, pool, False, layer=2, layers=4)
    assert counts == [0, 0, count, 0]
    assert int((~found.isfinite()).sum()) == count
    assert found[0, 5] == 65504


@devices
@pytest.mark.parametrize("how", [gather_naive, gather_triton])
def test_counts_add_up_over_batches(how: Gather, device: str) -> None:
    batch = nonfinite_batch(device)
    target = PoisonedSlab(2, 1500, torch.float32, device)
    for layer in (1, 1, 0):
        how(batch.hidden, batch.bounds, batch.rows, target.slab, layer, target.nonfinite, "last", False)
    assert target.nonfinite.tolist() == [4, 8]


@devices
@pytest.mark.parametrize("how", [gather_naive, gather_triton])
@pools
def test_an_infinite_token_counts_only_where_it_is_pooled(how: Gather, pool: Pool, device: str) -> None:
    """A huge first token (seen in SmolLM2) that `skip_first` leaves out makes nothing infinite; kept, it does."""
    hidden = torch.ones(5, 7, device=device)
    hidden[0] = torch.inf
    batch = Batch(hidden, torch.tensor([0, 4, 5], device=device), torch.tensor([1, 0], device=device))
    found, counts = run(how, batch, torch.float32, pool, True)
    assert counts == [0, 0, 0]
    assert torch.equal(found[0], torch.full((7,), 3.0 if pool == "sum" else 1.0))
    _, counts = run(how, batch, torch.float32, pool, False)
    assert counts == [0, 0 if pool == "last" else 7, 0]


@pytest.mark.gpu
def test_addresses_pass_two_to_the_31() -> None:
    """Hidden rows and slab rows beyond 2³¹ elements: a 32-bit product would wrap and read or write elsewhere."""
    width, tokens, blocks, layers = 32768, 65536 + 64, 17, 17
    if torch.cuda.mem_get_info()[0] < 24 << 30:
        pytest.skip("needs 24 GiB of GPU memory")
    hidden = torch.zeros(tokens, width, dtype=torch.bfloat16, device="cuda")
    slab = torch.zeros(blocks, layers, R, width, dtype=torch.bfloat16, device="cuda")
    assert min(hidden[:-32].numel(), slab[:-1].numel()) > 2**31
    hidden[-32] = 1.0
    hidden[-1] = 2.0
    bounds = torch.tensor([0, tokens - 31, tokens], dtype=torch.int32, device="cuda")
    rows = torch.tensor([blocks * R - 1, 0], dtype=torch.int32, device="cuda")
    nonfinite = torch.zeros(layers, dtype=torch.int32, device="cuda")
    gather_triton(hidden, bounds, rows, slab, layers - 1, nonfinite)
    assert (slab[-1, -1, -1] == 1).all()
    assert (slab[0, -1, 0] == 2).all()
    assert slab.count_nonzero() == 2 * width


@pytest.mark.gpu
@pools
@skips
@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_gather_takes_the_kernel_on_a_gpu(pool: Pool, skip_first: bool, stored: torch.dtype) -> None:
    batch = make_batch(7, 500, torch.float32, pool, skip_first, "cuda")
    found, _ = run(gather, batch, stored, pool, skip_first)
    assert torch.equal(found, run(gather_triton, batch, stored, pool, skip_first)[0])


@pools
@skips
def test_gather_takes_the_twin_on_the_cpu(pool: Pool, skip_first: bool) -> None:
    batch = make_batch(7, 500, torch.float32, pool, skip_first, "cpu")
    found, _ = run(gather, batch, torch.float16, pool, skip_first)
    assert torch.equal(found, run(gather_naive, batch, torch.float16, pool, skip_first)[0])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pool": "max"}, "pool is 'max', expected one of last, mean, weighted_mean, sum"),
        ({"hidden": torch.zeros(1, 9, 6)}, r"expected hidden \[T, D\]"),
        ({"hidden": torch.zeros(9, 5)}, r"got \[9, 5\] and \[2, 3, 256, 6\]"),
        ({"slab": torch.zeros(3, R, 6)}, r"slab \[B, L, R, D\]"),
        ({"bounds": torch.tensor([0, 9])}, "2 rows need 3 bounds, got 2"),
        ({"rows": torch.tensor([0, 1, 2])}, "3 rows need 4 bounds, got 3"),
        ({"hidden": torch.zeros(6, 9).T}, "contiguous"),
        ({"slab": torch.zeros(2, R, 3, 6).transpose(1, 2)}, "contiguous"),
        ({"layer": 3}, "layer 3 is outside the slab's 3 layers"),
        ({"layer": -1}, "layer -1 is outside the slab's 3 layers"),
    ],
)
def test_wrong_arguments_are_refused_and_nothing_is_written(changes: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {
        "hidden": torch.zeros(9, 6),
        "bounds": torch.tensor([0, 4, 9]),
        "rows": torch.tensor([0, 1]),
        "slab": torch.full((2, 3, R, 6), torch.nan),
        "layer": 1,
        "nonfinite": torch.zeros(3, dtype=torch.int32),
    }
    arguments |= changes
    before = arguments["slab"].clone()
    with pytest.raises(ValueError, match=message):
        gather(**arguments)
    assert torch.equal(arguments["slab"].view(torch.int32), before.view(torch.int32))
