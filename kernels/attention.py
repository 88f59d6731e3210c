"""Causal attention within each sentence of a packed batch, without a T × T mask.

Sentences of a batch lie sorted by length, so those of equal length adjoin and each run of them is one ordinary
rectangular batch that is a view of the packed tensors: no gather, no padding. On a GPU in half precision the
whole batch is one FlashAttention call over variable lengths.

Cost: sum of length² over the sentences, in one call a distinct length (or one in all, on a GPU).

Shapes: `T` packed tokens, `H` heads, `G` key/value heads, `D` head width, `N` sentences of one length `n`.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_VARLEN_HEAD_WIDTHS = range(8, 257, 8)


@dataclass(frozen=True)
class Packing:
    """Where the sentences of a packed batch lie: `bounds` [S + 1] on the device, int32, and their lengths' runs."""

    bounds: Tensor
    longest: int
    runs: tuple[tuple[int, int, int], ...]  # (first token, sentences, length of each)


def packed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    packing: Packing,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Attend causally within each sentence: query [H, T, D], key and value [G, T, D] → [T, H, D].

    `window` keeps each token's last `window` keys, itself included; `softcap` bounds the scores as Gemma 2 does.
    """
    if uses_varlen(query, softcap):
        return _attention_varlen(query, key, value, packing, scale, window)
    return _attention_by_length(query, key, value, packing, scale, window, softcap)


def uses_varlen(query: Tensor, softcap: float | None = None) -> bool:
    """Whether this query takes the one-call FlashAttention path."""
    half = query.dtype in (torch.bfloat16, torch.float16)
    fits = query.shape[-1] in _VARLEN_HEAD_WIDTHS
    return query.is_cuda and half and fits and softcap is None


@cache
def _varlen() -> tuple[Any, bool]:
    """torch's variable-length FlashAttention, imported late (it takes a second), and if it knows grouped heads."""
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn, "enable_gqa" in inspect.signature(varlen_attn).parameters


def _attention_varlen(
    query: Tensor, key: Tensor, value: Tensor, packing: Packing, scale: float | None, window: int | None
) -> Tensor:
    varlen_attn, knows_groups = _varlen()
    groups = query.shape[0] // key.shape[0]
    options = {"enable_gqa": True} if groups > 1 and knows_groups else {}
    if groups > 1 and not knows_groups:
        key, value = key.repeat_interleave(groups, dim=0), value.repeat_interleave(groups, dim=0)
    out: Tensor = varlen_attn(
        query.transpose(0, 1),
        key.transpose(0, 1),
        value.transpose(0, 1),
        packing.bounds,
        packing.bounds,
        packing.longest,
        packing.longest,
        scale=scale,
        window_size=(-1 if window is None else window - 1, 0),
        **options,
    )
    return out


def _attention_by_length(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    packing: Packing,
    scale: float | None,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    heads, total, _ = query.shape
    out = query.new_empty(total, heads, value.shape[-1])
    for first, count, length in packing.runs:
        stop = first + count * length
        q, k, v = (x[:, first:stop].view(x.shape[0], count, length, -1).transpose(0, 1) for x in (query, key, value))
        if softcap is not None:
            attended = _attention_softcap(q, k, v, scale, window, softcap)
        elif window is not None and length > window:
            mask = _window_mask(length, window, query.device)
            attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True)
        else:
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
        out[first:stop].view(count, length, heads, -1).copy_(attended.transpose(1, 2))
    return out


def _window_mask(length: int, window: int | None, device: torch.device) -> Tensor:
    """Which keys each query of one sentence sees [n, n]: itself and what came before, within the window."""
    position = torch.arange(length, device=device)
    distance = position[:, None] - position[None, :]
    seen = distance >= 0
    return seen if window is None else seen & (distance < window)


def _attention_softcap(
    query: Tensor, key: Tensor, value: Tensor, scale: float | None, window: int | None, softcap: float
) -> Tensor:
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    scores = query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scale is None else scale)
    scores = torch.tanh(scores / softcap) * softcap
    seen = _window_mask(query.shape[2], window, query.device)
    return scores.masked_fill(~seen, -torch.inf).softmax(-1, dtype=torch.float32).to(query.dtype) @ value
