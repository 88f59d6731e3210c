"""Our packed attention, registered with transformers: one function that every model built on its attention interface
can be told to use, and a mask function that makes no mask.

Which sentences lie where is set around each forward (`packed`), because models differ in what they pass through.
A keyword that the function does not honour raises: a model that needs it then runs in batches of equal length with
its own attention. Models that do not use the interface at all are noticed by its never being called.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from permafrost.extractor.model import quiet_transformers
from permafrost.kernels.attention import Packing, packed_attention, uses_varlen

NAME = "permafrost_packed"
# What models pass along that says nothing about the scores.
_HARMLESS = {"position_ids", "use_cache", "output_attentions", "output_hidden_states", "cache_position", "is_causal"}


class _State:
    packing: Packing | None = None
    calls = 0
    path = "never called"


_STATE = _State()


class UnsupportedAttentionError(Exception):
    """The model asks of its attention what the packed one does not do."""


@contextmanager
def packed(packing: Packing) -> Iterator[_State]:
    """While this lasts, attention stays within the packed sentences; `calls` counts how often it was asked."""
    _STATE.packing, _STATE.calls = packing, 0
    try:
        yield _STATE
    finally:
        _STATE.packing = None


@contextmanager
def packed_implementation(decoder: Any) -> Iterator[None]:
    """The decoder with our attention; its own comes back at the end. No effect on models without the interface."""
    _register()
    before = decoder.config._attn_implementation
    with quiet_transformers():  # it warns where the interface is not used; we notice that ourselves
        decoder.set_attn_implementation(NAME)
    try:
        yield
    finally:
        with quiet_transformers():
            decoder.set_attn_implementation(before)


def _register() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, _no_mask)


def _no_mask(*_: Any, **__: Any) -> None:
    return None


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """query [1, H, T, D], key and value [1, G, T, D] → [1, T, H, D], as transformers' attention functions do."""
    unknown = [name for name, given in others.items() if given is not None and name not in _HARMLESS]
    if unknown or others.get("is_causal") is False or not getattr(module, "is_causal", True):
        raise UnsupportedAttentionError(f"{type(module).__name__}: {', '.join(unknown) or 'not causal'}")
    if attention_mask is not None or dropout or query.shape[0] != 1 or query.shape[2] != key.shape[2]:
        raise UnsupportedAttentionError(f"{type(module).__name__}: a mask, dropout, or more than packed sentences")
    packing = _STATE.packing
    if packing is None:
        raise RuntimeError("packed attention outside of `packed(…)`")
    _STATE.calls += 1
    _STATE.path = "varlen" if uses_varlen(query[0], softcap) else "sdpa by length"
    out = packed_attention(query[0], key[0], value[0], packing, scaling, sliding_window, softcap)
    return out[None], None
