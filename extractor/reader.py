"""A store, opened for reading: decoded floats, no more bytes read than asked for, holes never read as numbers.

Each inner chunk that is read has its CRC32C checked. One layer of n rows costs n · width numbers, whatever else the
store holds. A row range that is not written yet, or is damaged, raises DamageError with its rows.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from permafrost.extractor.codec import decode_chunk, read_flat, read_index
from permafrost.extractor.errors import DamageError, UsageError
from permafrost.extractor.shards import BLOCK_ROWS, Shard
from permafrost.extractor.store import ROW_ARRAYS, Layout, read_attributes, row_chunk_path, shard_path


def decode_floats(values: NDArray[Any]) -> NDArray[Any]:
    """bfloat16 bits (uint16) as float32; floats as they are."""
    if values.dtype != np.uint16:
        return values
    return (values.astype(np.uint32) << 16).view(np.float32)


class Store:
    """One store. `layers` are its layers' names in order, `attributes` its provenance."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.attributes = read_attributes(self.path)
        self.layout = Layout.from_dict(self.attributes["layout"])
        self.layers = self.layout.layers
        self.rows = self.layout.rows
        self.complete = bool(self.attributes["complete"])

    def read(
        self,
        start: int = 0,
        stop: int | None = None,
        layers: Sequence[int | str] | None = None,
        site: str | None = None,
    ) -> NDArray[Any]:
        """Rows `start` to `stop` as floats [rows, layers, width]; layers by their names as stored (`3`, `final`)."""
        stop = self.rows if stop is None else stop
        if not 0 <= start <= stop <= self.rows:
            raise UsageError(f"rows {start} to {stop} are not within the store's {self.rows}")
        picked = [self._layer(name) for name in (self.layers if layers is None else layers)]
        array = self._array(site)
        kind = np.float16 if self.layout.dtype == "float16" else np.float32
        out = np.empty((stop - start, len(picked), self.layout.width), kind)
        for shard in self.layout.shards:
            if shard.start < stop and start < shard.stop:
                self._read_shard(array, shard, max(start, shard.start), min(stop, shard.stop), picked, out, start)
        return out

    def read_rows(self, name: str) -> NDArray[Any]:
        """One of `length`, `truncated`, `text_hash`, whole [rows]."""
        chunks = [
            read_flat(row_chunk_path(self.path, name, s.index), ROW_ARRAYS[name], self.layout.shard_rows)[: s.rows]
            for s in self.layout.shards
        ]
        return np.concatenate(chunks)

    def read_pairs(self, name: str) -> NDArray[Any]:
        """One of the arrays of a pair or triplet store, whole, as `pairs/left`."""
        import zarr

        return np.asarray(zarr.open_array(self.path / name, mode="r")[:])

    def _layer(self, name: int | str) -> int:
        if str(name) not in self.layers:
            raise UsageError(f"layer {name} is not in the store, which holds {', '.join(self.layers)}")
        return self.layers.index(str(name))

    def _array(self, site: str | None) -> str:
        site = self.layout.sites[0] if site is None else site
        if site not in self.layout.sites:
            raise UsageError(f"site {site} is not in the store, which holds {', '.join(self.layout.sites)}")
        return self.layout.arrays[self.layout.sites.index(site)]

    def _read_shard(
        self, array: str, shard: Shard, start: int, stop: int, picked: list[int], out: NDArray[Any], origin: int
    ) -> None:
        path = shard_path(self.path, array, shard)
        index = read_index(path, self.layout, shard)
        with path.open("rb") as file:
            for block in range((start - shard.start) // BLOCK_ROWS, -(-(stop - shard.start) // BLOCK_ROWS)):
                first = shard.start + block * BLOCK_ROWS
                a, b = max(start, first), min(stop, first + BLOCK_ROWS)
                for place, layer in enumerate(picked):
                    offset, size = (int(x) for x in index[block, layer])
                    try:
                        chunk = decode_chunk(os.pread(file.fileno(), size, offset), self.layout)
                    except ValueError as error:
                        rows = f"rows {first}–{min(first + BLOCK_ROWS, shard.stop) - 1}"
                        raise DamageError(f"{rows}, layer {self.layers[layer]}: {path}: {error}") from None
                    out[a - origin : b - origin, place] = decode_floats(chunk[a - first : b - first])
