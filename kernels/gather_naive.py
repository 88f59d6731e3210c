"""Plain twin of the gather kernel: pool each sentence of a packed batch and lay it into the slab.

Defines what `gather` must give, and is what runs on the CPU. Pooling sums in float32 whatever the input's dtype.
Cost: `last` reads S rows; the other modes read all T rows once and hold one float32 copy of them.

Shapes: `T` packed tokens, `S` sentences, `D` width, `B` row blocks of the slab, `L` layers, `R` rows a block.
"""

from __future__ import annotations

import torch
from torch import Tensor

from permafrost.kernels import Pool


def first_kept(bounds: Tensor, skip_first: bool) -> Tensor:
    """First pooled token of each sentence [S]: the second where the first is left out and there is a second."""
    starts, stops = bounds[:-1], bounds[1:]
    return torch.where(stops - starts > 1, starts + 1, starts) if skip_first else starts


def token_weights(bounds: Tensor, pool: Pool, skip_first: bool) -> Tensor:
    """Each token's weight in its sentence's vector [T], float32; a token that is left out has weight 0.

    `weighted_mean` is SGPT's: the i-th pooled token of n has weight i / (1 + 2 + … + n).
    """
    total = int(bounds[-1])
    sentence = torch.repeat_interleave(bounds[1:] - bounds[:-1], output_size=total)
    position = torch.arange(total, device=bounds.device) - first_kept(bounds, skip_first)[sentence] + 1
    count = (bounds[1:] - first_kept(bounds, skip_first))[sentence].float()
    weight = {
        "last": (position == count).float(),
        "mean": 1 / count,
        "weighted_mean": position * 2 / (count * (count + 1)),
        "sum": torch.ones_like(count),
    }[pool]
    return torch.where(position > 0, weight, 0.0)


def pool_naive(hidden: Tensor, bounds: Tensor, pool: Pool, skip_first: bool) -> Tensor:
    """One vector a sentence [S, D] from packed hidden states [T, D]; float32, but `last` keeps the input's dtype."""
    if pool == "last":
        return hidden[bounds[1:].long() - 1]
    weight = token_weights(bounds, pool, skip_first)[:, None]
    # A left-out token must not count even where it is infinite: 0 · inf is NaN.
    weighted = torch.where(weight == 0, 0.0, hidden.float() * weight)
    return torch.segment_reduce(weighted, "sum", lengths=(bounds[1:] - bounds[:-1]).long(), axis=0, unsafe=True)


def gather_naive(
    hidden: Tensor,
    bounds: Tensor,
    rows: Tensor,
    slab: Tensor,
    layer: int,
    nonfinite: Tensor,
    pool: Pool = "last",
    skip_first: bool = False,
) -> None:
    """Pool `hidden` [T, D] by sentence, cast, and write sentence s to row `rows[s]` of the slab [B, L, R, D].

    `bounds` [S + 1] are the sentences' first tokens and the end. `nonfinite[layer]` grows by the number of
    values that are NaN or infinite after the cast.
    """
    pooled = pool_naive(hidden, bounds, pool, skip_first).to(slab.dtype)
    nonfinite[layer] += (~pooled.isfinite()).sum()
    block = slab.shape[2]
    at = rows.long()
    slab[at // block, layer, at % block] = pooled
