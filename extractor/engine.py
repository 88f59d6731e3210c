"""One batch: token ids in, pooled rows of every wanted layer in the slab; packed, or in batches of one length.

In `packed` mode all sentences of a batch are one sequence and our attention keeps them apart. In `equal` mode a
batch is a rectangle of sentences of one length and the model runs as it is. Either way nothing is padded, and hidden
states reach the gather one layer at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from permafrost.extractor.attention import packed, packed_implementation
from permafrost.extractor.hooks import Runner, capture
from permafrost.extractor.model import FrozenModel
from permafrost.extractor.packing import Batch, pack, pack_equal
from permafrost.extractor.sites import Point
from permafrost.extractor.tokens import Encoded
from permafrost.extractor.transfer import Slab
from permafrost.kernels import Pool
from permafrost.kernels.attention import Packing
from permafrost.kernels.gather import gather

Mode = Literal["packed", "equal"]


@dataclass(frozen=True)
class Wanted:
    """What is kept of each sentence."""

    points: list[Point]
    layers: tuple[str, ...]
    pool: Pool
    skip_first: bool


class Engine:
    """Runs batches. Use within `with engine.ready():`, which sets hooks and attention and takes them away again."""

    def __init__(self, model: FrozenModel, wanted: Wanted, mode: Mode) -> None:
        self.model = model
        self.wanted = wanted
        self.mode = mode
        self.attention_calls = 0
        self.attention = f"equal lengths, {model.decoder.config._attn_implementation}"  # for the record
        self._runner: Runner | None = None
        self._bounds = self._rows = torch.empty(0)
        self._slab: Slab | None = None

    @contextmanager
    def ready(self) -> Iterator[Engine]:
        """Hooks registered and, in packed mode, our attention in place."""
        own = packed_implementation(self.model.decoder) if self.mode == "packed" else nullcontext()
        with own, capture(self.model, self.wanted.points, self.wanted.layers, self._sink) as self._runner:
            yield self

    def batches(self, lengths: NDArray[np.int64], budget: int) -> list[Batch]:
        """The batches of a shard whose sentences have these lengths."""
        return pack(lengths, budget) if self.mode == "packed" else pack_equal(lengths, budget)

    def run(self, encoded: Encoded, batch: Batch, slab: Slab) -> None:
        """Compute one batch of the shard's sentences into the slab. On a GPU this returns before it is done."""
        assert self._runner is not None, "use the engine within ready()"
        positions = batch.positions
        ids = encoded.ids[np.repeat(encoded.bounds[:-1][batch.rows], batch.lengths) + positions]
        self._bounds = self._to_device(batch.bounds.astype(np.int32))
        self._rows = self._to_device(batch.rows.astype(np.int32))
        self._slab = slab
        if self.mode == "equal":
            self._runner(self._to_device(ids.reshape(len(batch.rows), -1)))
            return
        packing = Packing(self._bounds, int(batch.lengths.max()), batch.runs)
        with packed(packing) as state:
            self._runner(self._to_device(ids)[None], self._to_device(positions)[None])
            self.attention_calls, self.attention = state.calls, f"packed, {state.path}"

    def _sink(self, array: int, layer: int, hidden: Tensor) -> None:
        assert self._slab is not None
        gather(
            hidden,
            self._bounds,
            self._rows,
            self._slab.device[array],
            layer,
            self._slab.nonfinite[array],
            self.wanted.pool,
            self.wanted.skip_first,
        )

    def _to_device(self, values: NDArray[np.generic]) -> Tensor:
        tensor = torch.from_numpy(np.ascontiguousarray(values))
        if self.model.device.type != "cuda":
            return tensor
        return tensor.pin_memory().to(self.model.device, non_blocking=True)
