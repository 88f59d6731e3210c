"""Fused gather: pool, cast and lay out one layer of a packed batch in one pass over what it needs.

One program handles one sentence and up to 1,024 columns: it reads the sentence's kept tokens (the last alone for
`last`), sums in float32, casts, counts values that are not finite, and writes the row at its place in the slab
[row ÷ R, layer, row mod R, width], which is the shard file's own layout. Nothing is written in between, and no
tensor of all tokens and all layers ever exists.

Cost: S · D reads (T · D when pooling over tokens) and S · D writes; bandwidth-bound. `gather_naive` is the twin
that defines it; without Triton or without a GPU, `gather` is that twin.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from permafrost.kernels import POOLS, Pool
from permafrost.kernels.gather_naive import gather_naive

if TYPE_CHECKING:
    triton: Any = None
    tl: Any = None
else:
    try:
        import triton
        import triton.language as tl
    except ImportError:  # no GPU, or not Linux: the twin serves
        triton = None

MAX_COLUMNS = 1024

if triton is not None:
    # One kernel for all layers: `layer` would else be compiled in where it is 1 or a multiple of 16.
    @triton.jit(do_not_specialize=["layer"])
    def _gather_kernel(
        hidden,
        bounds,
        rows,
        slab,
        nonfinite,
        layer,
        width,
        hidden_stride,
        slab_block_stride,
        slab_layer_stride,
        block_rows,
        POOL: tl.constexpr,
        SKIP_FIRST: tl.constexpr,
        COLUMNS: tl.constexpr,
    ):
        sentence = tl.program_id(0)
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        inside = column < width
        # int64 addresses: T · D passes 2^31 at 65,536 tokens of width 32,768.
        start = tl.load(bounds + sentence).to(tl.int64)
        stop = tl.load(bounds + sentence + 1).to(tl.int64)
        row = tl.load(rows + sentence).to(tl.int64)

        if POOL == "last":
            value = tl.load(hidden + (stop - 1) * hidden_stride + column, mask=inside, other=0.0).to(tl.float32)
        else:
            if SKIP_FIRST and stop - start > 1:
                start += 1
            value = tl.zeros([COLUMNS], dtype=tl.float32)
            for token in range(start, stop):
                x = tl.load(hidden + token * hidden_stride + column, mask=inside, other=0.0).to(tl.float32)
                if POOL == "weighted_mean":
                    x *= (token - start + 1).to(tl.float32)
                value += x
            count = (stop - start).to(tl.float32)
            if POOL == "mean":
                value /= count
            if POOL == "weighted_mean":
                value /= count * (count + 1) / 2

        stored = value.to(slab.dtype.element_ty)
        out = slab + (row // block_rows) * slab_block_stride + layer.to(tl.int64) * slab_layer_stride
        tl.store(out + (row % block_rows) * width + column, stored, mask=inside)
        seen = stored.to(tl.float32)
        bad = tl.sum((inside & ((seen != seen) | (tl.abs(seen) == float("inf")))).to(tl.int32), axis=0)
        if bad > 0:
            tl.atomic_add(nonfinite + layer, bad)


def gather_triton(
    hidden: Tensor,
    bounds: Tensor,
    rows: Tensor,
    slab: Tensor,
    layer: int,
    nonfinite: Tensor,
    pool: Pool = "last",
    skip_first: bool = False,
) -> None:
    """`gather_naive` as one kernel launch; all tensors on one device (or on the CPU, in Triton's interpreter)."""
    _, _, block_rows, width = slab.shape
    sentences = rows.numel()
    columns = min(MAX_COLUMNS, triton.next_power_of_2(width))
    _gather_kernel[(sentences, triton.cdiv(width, columns))](
        hidden,
        bounds,
        rows,
        slab,
        nonfinite,
        layer,
        width,
        hidden.stride(0),
        slab.stride(0),
        slab.stride(1),
        block_rows,
        POOL=pool,
        SKIP_FIRST=skip_first,
        COLUMNS=columns,
        num_warps=4,
    )


def gather(
    hidden: Tensor,
    bounds: Tensor,
    rows: Tensor,
    slab: Tensor,
    layer: int,
    nonfinite: Tensor,
    pool: Pool = "last",
    skip_first: bool = False,
) -> None:
    """Pool `hidden` [T, D] by sentence and write it into the slab [B, L, R, D]; see `gather_naive` for the meaning.

    The Triton kernel on a GPU, its twin elsewhere. Checks what would make the kernel write out of bounds.
    """
    if pool not in POOLS:
        raise ValueError(f"pool is {pool!r}, expected one of {', '.join(POOLS)}")
    if hidden.ndim != 2 or slab.ndim != 4 or hidden.shape[1] != slab.shape[3]:
        raise ValueError(f"expected hidden [T, D] and slab [B, L, R, D], got {[*hidden.shape]} and {[*slab.shape]}")
    if bounds.numel() != rows.numel() + 1:
        raise ValueError(f"{rows.numel()} rows need {rows.numel() + 1} bounds, got {bounds.numel()}")
    if hidden.stride(1) != 1 or not slab.is_contiguous():
        raise ValueError("hidden must be contiguous along its width, and the slab contiguous")
    if not 0 <= layer < slab.shape[1]:
        raise ValueError(f"layer {layer} is outside the slab's {slab.shape[1]} layers")
    run = gather_triton if hidden.is_cuda and triton is not None else gather_naive
    run(hidden, bounds, rows, slab, layer, nonfinite, pool, skip_first)
