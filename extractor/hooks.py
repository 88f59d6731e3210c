"""Forward hooks that hand each wanted hidden state to a sink while the model runs, and stop it after the last.

The hidden state goes to the sink as the model made it, [T, D], layer by layer; nothing is kept. Hooks are always
removed. Blocks past the last one wanted are not run: the next one's pre-hook ends the forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from permafrost.extractor.layers import last_block

if TYPE_CHECKING:
    from permafrost.extractor.model import FrozenModel
    from permafrost.extractor.sites import Point

Sink = Callable[[int, int, Tensor], None]  # (array, layer, hidden [T, D])


class _EnoughError(Exception):
    """Raised by a hook to end the forward; nothing after it is wanted."""


def hidden_of(value: Any) -> Tensor | None:
    """The hidden state among a module's arguments or outputs, packed [T, D]: the first float tensor with a width."""
    if isinstance(value, Tensor):
        return value.flatten(0, -2) if value.ndim > 1 and value.is_floating_point() else None
    if isinstance(value, (tuple, list)):
        return next((found for item in value if (found := hidden_of(item)) is not None), None)
    return None


@contextmanager
def capture(model: FrozenModel, points: Sequence[Point], layers: tuple[str, ...], sink: Sink) -> Iterator[Runner]:
    """Register hooks for the points; the runner that comes back runs forwards; all hooks go at the end."""
    handles: list[Any] = []
    stop_before = last_block(layers, len(model.blocks)) + 1
    final = [point for point in points if point.module is None]

    def enough(*_: Any) -> None:
        raise _EnoughError

    def output_hook(point: Point) -> Callable[..., None]:
        def hook(_: nn.Module, __: tuple[Any, ...], output: Any) -> None:
            sink(point.array, point.layer, _packed(output))

        return hook

    def input_hook(point: Point) -> Callable[..., None]:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            sink(point.array, point.layer, _packed((*args, *kwargs.values())))

        return hook

    try:
        for point in points:
            if point.module is None:
                continue
            if point.reads == "input":
                handles.append(point.module.register_forward_pre_hook(input_hook(point), with_kwargs=True))
            else:
                handles.append(point.module.register_forward_hook(output_hook(point)))
        if stop_before < len(model.blocks):
            handles.append(model.blocks[stop_before].register_forward_pre_hook(enough))
        yield Runner(model, final, sink)
    finally:
        for handle in handles:
            handle.remove()


class Runner:
    """Runs the decoder on token ids; the hooks see to what is kept."""

    def __init__(self, model: FrozenModel, final: Sequence[Point], sink: Sink) -> None:
        self._model = model
        self._final = final
        self._sink = sink

    @torch.inference_mode()
    def __call__(self, ids: Tensor, positions: Tensor | None = None) -> None:
        """One forward of ids [B, T]; `positions` [B, T] where they do not simply count up."""
        extra = {} if positions is None else {"position_ids": positions}
        try:
            # With the cache on, packed sequences leak into each other: no error, wrong numbers.
            output = self._model.decoder(input_ids=ids, use_cache=False, **extra)
        except _EnoughError:
            return
        for point in self._final:
            self._sink(point.array, point.layer, output.last_hidden_state.flatten(0, 1))


def _packed(value: Any) -> Tensor:
    hidden = hidden_of(value)
    if hidden is None:
        raise RuntimeError(f"a block gave {type(value).__name__} without a hidden state [batch, tokens, width]")
    return hidden
