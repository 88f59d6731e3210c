"""A store, opened for reading: decoded floats, no more bytes read than asked for, holes never read as numbers.

Each inner chunk that is read has its CRC32C checked. One layer of n rows costs n · width numbers, whatever else the
store holds; shards are read side by side. A row range that is not written yet, or is damaged, raises DamageError with
its rows.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from permafrost.extractor.codec import CRC_BYTES, crc32c, decode_chunk, read_flat, read_index
from permafrost.extractor.errors import DamageError, UsageError
from permafrost.extractor.shards import BLOCK_ROWS, Shard
from permafrost.extractor.store import ROW_ARRAYS, STORED, Layout, read_attributes, row_chunk_path, shard_path

READ_THREADS = min(8, os.cpu_count() or 1)


@cache
def _pool() -> ThreadPoolExecutor:
    """Threads that read shards side by side; kept, since starting them takes as long as reading a few megabytes."""
    return ThreadPoolExecutor(READ_THREADS, thread_name_prefix="permafrost-read")


os.register_at_fork(after_in_child=_pool.cache_clear)  # a forked child has none of its parent's threads


def decode_floats(values: NDArray[Any]) -> NDArray[Any]:
    """bfloat16 bits (uint16) as float32; floats as they are."""
    if values.dtype != np.uint16:
        return values
    floats: NDArray[Any] = np.left_shift(values, 16, dtype=np.uint32).view(np.float32)
    return floats


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
        stored: bool = False,
    ) -> NDArray[Any]:
        """Rows `start` to `stop` as floats [rows, layers, width]; layers by their names as stored (`3`, `final`).

        With `stored` nothing is converted: bfloat16 comes as its bits, for `torch.from_numpy(…).view(torch.bfloat16)`.
        """
        stop = self.rows if stop is None else stop
        if not 0 <= start <= stop <= self.rows:
            raise UsageError(f"rows {start} to {stop} are not within the store's {self.rows}")
        picked = [self._layer(name) for name in (self.layers if layers is None else layers)]
        array = self._array(site)
        kind = STORED[self.layout.dtype]
        if not stored and self.layout.dtype == "bfloat16":
            kind = np.dtype(np.float32)
        out = np.empty((stop - start, len(picked), self.layout.width), kind)
        shards = self.layout.shards[start // self.layout.shard_rows : -(-stop // self.layout.shard_rows)]
        for _ in _pool().map(lambda shard: self._read_shard(array, shard, start, picked, out), shards):
            pass  # map raises what a shard raised
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

    def _read_shard(self, array: str, shard: Shard, origin: int, picked: list[int], out: NDArray[Any]) -> None:
        """The part of one shard that belongs into `out`, whose first row is the store's row `origin`."""
        path = shard_path(self.path, array, shard)
        index = read_index(path, self.layout, shard)[:, picked].tolist()
        start, stop = max(origin, shard.start), min(origin + len(out), shard.stop)
        with path.open("rb", buffering=0) as file:
            for block in range((start - shard.start) // BLOCK_ROWS, -(-(stop - shard.start) // BLOCK_ROWS)):
                first = shard.start + block * BLOCK_ROWS
                a, b = max(start, first), min(stop, first + BLOCK_ROWS)
                for place, (offset, size) in enumerate(index[block]):
                    try:
                        self._read_chunk(file.fileno(), offset, size, a - first, out[a - origin : b - origin, place])
                    except ValueError as error:
                        rows = f"rows {first}–{min(first + BLOCK_ROWS, shard.stop) - 1}"
                        raise DamageError(f"{rows}, layer {self.layers[picked[place]]}: {path}: {error}") from None

    def _read_chunk(self, fd: int, offset: int, size: int, skip: int, out: NDArray[Any]) -> None:
        """Rows `skip` and on of one inner chunk into `out`; straight from the file where nothing is to be decoded."""
        plain = out.dtype == STORED[self.layout.dtype]
        if plain and self.layout.codec == "none" and len(out) == BLOCK_ROWS and out.flags.c_contiguous:
            check = bytearray(CRC_BYTES)
            if os.preadv(fd, [out.data, check], offset) != size or crc32c(out) != check:
                raise ValueError("CRC32C does not match")
            return
        chunk = decode_chunk(os.pread(fd, size, offset), self.layout)[skip : skip + len(out)]
        if plain:
            out[:] = chunk
        else:
            np.left_shift(chunk, 16, out=out.view(np.uint32), dtype=np.uint32)
