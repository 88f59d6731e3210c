"""Shard files byte by byte: the Zarr v3 sharding codec, written and read without copying.

A shard is its inner chunks in C order [row block, layer], each ending in its CRC32C, then the index of (offset,
bytes) of each chunk and the index's CRC32C. Without compression a chunk is written straight from the slab, which
has the same layout; the file's bytes are a function of the numbers alone.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import google_crc32c
import numcodecs.blosc
import numpy as np
from numcodecs import Blosc, Zstd
from numpy.typing import NDArray

from permafrost.extractor.durable import Buffer
from permafrost.extractor.errors import DamageError
from permafrost.extractor.shards import Shard
from permafrost.extractor.store import BLOSC, STORED, ZSTD_LEVEL, Layout

MISSING = np.uint64(2**64 - 1)
CRC_BYTES = 4
# With several threads Blosc places a chunk's blocks in the order in which they finish: other bytes at each run.
numcodecs.blosc.use_threads = False


def crc32c(data: Any) -> bytes:
    """CRC32C of a bytes-like object, as four little-endian bytes."""
    return struct.pack("<I", google_crc32c.value(data))


def _compressor(layout: Layout) -> Any:
    if layout.codec == "zstd":
        return Zstd(level=ZSTD_LEVEL)
    if layout.codec == "blosc":
        return Blosc(cname=BLOSC["cname"], clevel=BLOSC["clevel"], shuffle=Blosc.BITSHUFFLE)
    return None


def encode_shard(slab: NDArray[Any], layout: Layout, shard: Shard) -> list[Buffer]:
    """The shard file's buffers from a slab [blocks, layers, 256, width] in the stored dtype; nothing is copied
    unless it is compressed. Rows past the shard's last must hold the fill value already."""
    blocks, layers = layout.blocks_of(shard), len(layout.layers)
    compressor = _compressor(layout)
    index = np.full((layout.blocks, layers, 2), MISSING, "<u8")
    buffers: list[Buffer] = []
    offset = 0
    for block in range(blocks):
        for layer in range(layers):
            raw = slab[block, layer].reshape(-1).view(np.uint8)
            data = raw if compressor is None else np.frombuffer(compressor.encode(raw.view(slab.dtype)), np.uint8)
            size = data.nbytes + CRC_BYTES
            index[block, layer] = offset, size
            offset += size
            buffers += [data.data, crc32c(data)]
    tail = index.tobytes()
    return [*buffers, tail, crc32c(tail)]


def decode_chunk(data: bytes | memoryview, layout: Layout) -> NDArray[Any]:
    """One inner chunk [256, width] in the stored dtype; raises ValueError where it is not what was written."""
    body = check_crc(data)
    compressor = _compressor(layout)
    try:
        decoded = body if compressor is None else compressor.decode(body)
    except RuntimeError as error:
        raise ValueError(f"cannot be decompressed: {error}") from None
    values: NDArray[Any] = np.frombuffer(decoded, STORED[layout.dtype])
    if values.size != np.prod(layout.chunk_shape):
        raise ValueError(f"{values.size} numbers, expected {np.prod(layout.chunk_shape)}")
    return values.reshape(layout.chunk_shape)


def check_crc(data: bytes | memoryview) -> memoryview:
    """The data without its last four bytes, which must be its CRC32C."""
    view = memoryview(data)
    body, stored = view[:-CRC_BYTES], bytes(view[-CRC_BYTES:])
    if len(data) < CRC_BYTES or crc32c(np.frombuffer(body, np.uint8)) != stored:
        raise ValueError("CRC32C does not match")
    return body


def read_index(path: Path, layout: Layout, shard: Shard) -> NDArray[np.uint64]:
    """The shard's index [blocks, layers, 2], checked: its CRC32C, and that the chunks fill the file without a gap.

    Reads only the index. Raises DamageError with the row range otherwise.
    """
    blocks, layers = layout.blocks_of(shard), len(layout.layers)
    size = layout.blocks * layers * 16 + CRC_BYTES
    try:
        with path.open("rb") as file:
            end = file.seek(0, 2)
            if end < size:
                raise ValueError(f"{end} bytes, too short for its index")
            file.seek(end - size)
            tail = check_crc(file.read(size))
    except FileNotFoundError:
        raise DamageError(f"rows {shard.start}–{shard.stop - 1}: not there yet ({path})") from None
    except (OSError, ValueError) as error:
        raise DamageError(f"rows {shard.start}–{shard.stop - 1}: {path}: index: {error}") from None
    index = np.frombuffer(tail, "<u8").reshape(layout.blocks, layers, 2)
    held = index[:blocks].reshape(-1, 2)
    gapless = np.array_equal(held[:, 0], np.concatenate([[0], np.cumsum(held[:-1, 1])]).astype("<u8"))
    if not gapless or int(held[-1].sum()) != end - size or (index[blocks:] != MISSING).any():
        raise DamageError(f"rows {shard.start}–{shard.stop - 1}: {path}: its chunks do not fill the file")
    return index


def encode_flat(values: NDArray[Any], dtype: np.dtype[Any], items: int) -> list[Buffer]:
    """The file's buffers of a chunk of a one-dimensional array: the values, zeros up to `items`, the CRC32C."""
    chunk = np.zeros(items, dtype)
    chunk[: len(values)] = values
    return [chunk.view(np.uint8).data, crc32c(chunk.view(np.uint8))]


def read_flat(path: Path, dtype: np.dtype[Any], items: int) -> NDArray[Any]:
    """A whole chunk of a one-dimensional array, checked; raises DamageError."""
    try:
        values = np.frombuffer(check_crc(path.read_bytes()), dtype)
        if values.size != items:
            raise ValueError(f"{values.size} items, expected {items}")
    except (OSError, ValueError) as error:
        raise DamageError(f"{path}: {error}") from None
    return values
