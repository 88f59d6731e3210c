"""Slabs: where a shard's numbers gather on the device, and how they reach the host while the model goes on.

A slab has the shard file's own layout [row block, layer, 256, width], on the device and again in pinned memory. The
copy runs on a stream of its own. A small ring of slabs goes round between the model and the writer, so memory is
bounded by ring size × shard size, whatever the corpus. On the CPU both sides are the same memory and nothing moves.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from permafrost.extractor.shards import BLOCK_ROWS
from permafrost.extractor.store import Layout

TORCH_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


class Slab:
    """One shard's numbers: `device[a]` is array a's [B, L, 256, D]; `nonfinite` [A, L] counts what is not finite."""

    def __init__(self, layout: Layout, dtype: torch.dtype, blocks: int, device: torch.device) -> None:
        shape = (blocks, len(layout.layers), BLOCK_ROWS, layout.width)
        counts = (len(layout.arrays), len(layout.layers))
        self.device = [torch.empty(shape, dtype=dtype, device=device) for _ in layout.arrays]
        self.nonfinite = torch.zeros(counts, dtype=torch.int32, device=device)
        if device.type == "cuda":
            self._host = [torch.empty(shape, dtype=dtype, pin_memory=True) for _ in layout.arrays]
            self._host_nonfinite = torch.zeros(counts, dtype=torch.int32, pin_memory=True)
            self._computed, self._copied = torch.cuda.Event(), torch.cuda.Event()
        else:
            self._host, self._host_nonfinite = self.device, self.nonfinite

    def send(self, blocks: int, stream: torch.cuda.Stream | None) -> None:
        """Start copying the first `blocks` row blocks to the host, once what was computed so far is done."""
        if stream is None:
            return
        self._computed.record()
        with torch.cuda.stream(stream):
            stream.wait_event(self._computed)
            for host, device in zip(self._host, self.device, strict=True):
                host[:blocks].copy_(device[:blocks], non_blocking=True)
            self._host_nonfinite.copy_(self.nonfinite, non_blocking=True)
            self._copied.record(stream)

    def wait(self) -> None:
        """Wait until the copy has arrived."""
        if self._host is not self.device:
            self._copied.synchronize()

    def counts(self) -> NDArray[np.int32]:
        """Values that are not finite [A, L], on the host."""
        counts: NDArray[np.int32] = self._host_nonfinite.numpy()
        return counts

    def array(self, place: int) -> NDArray[Any]:
        """Array `place` on the host, in the stored dtype (bfloat16 as its bits)."""
        host = self._host[place]
        return stored_view(host)


def stored_view(tensor: Tensor) -> NDArray[Any]:
    """A CPU tensor as numpy sees it in the store: bfloat16 as uint16."""
    values: NDArray[Any] = (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()
    return values


class Ring:
    """A fixed number of slabs and the stream that empties them."""

    def __init__(self, layout: Layout, device: torch.device, slabs: int = 3) -> None:
        dtype = TORCH_DTYPES[layout.dtype]
        blocks = min(layout.blocks, max(layout.blocks_of(shard) for shard in layout.shards))
        self._free = [Slab(layout, dtype, blocks, device) for _ in range(slabs)]
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def take(self) -> Slab | None:
        """A free slab, its counters at zero; None while all are under way."""
        if not self._free:
            return None
        slab = self._free.pop()
        slab.nonfinite.zero_()
        return slab

    def give_back(self, slab: Slab) -> None:
        self._free.append(slab)
