"""A slab → a shard on disk, durable, and then recorded by its own presence.

Order: the row arrays' chunks, the record of who computed it, the activations; the last array's file comes last and is
the only mark of "done". A value that is not finite fails the shard before anything of it is written.
"""

from __future__ import annotations

import datetime
import json
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from permafrost.extractor.codec import encode_flat, encode_shard, read_flat, read_index
from permafrost.extractor.dedup import digest
from permafrost.extractor.durable import write_durable, write_json
from permafrost.extractor.errors import DamageError, PermafrostError
from permafrost.extractor.reader import decode_floats
from permafrost.extractor.shards import BLOCK_ROWS, Shard
from permafrost.extractor.store import ROW_ARRAYS, Layout, record_path, row_chunk_path, shard_path

if TYPE_CHECKING:  # torch takes seconds to import; reading a store needs none of it
    from permafrost.extractor.tokens import Encoded
    from permafrost.extractor.transfer import Slab


@dataclass(frozen=True)
class ShardRows:
    """What is kept of a shard's rows beside their numbers."""

    length: NDArray[np.int64]
    truncated: NDArray[np.bool_]
    text_hash: NDArray[np.uint64]

    @classmethod
    def of(cls, texts: Sequence[str], encoded: Encoded) -> ShardRows:
        return cls(encoded.lengths, encoded.truncated, text_hashes(texts))


def text_hashes(texts: Sequence[str]) -> NDArray[np.uint64]:
    """First 8 bytes of each text's BLAKE2b-128."""
    return np.frombuffer(b"".join(digest(text)[:8] for text in texts), "<u8")


def write_shard(store: Path, layout: Layout, shard: Shard, rows: ShardRows, slab: Slab, record: dict[str, Any]) -> int:
    """Write one computed shard whole; returns its bytes. Raises if a value is not finite, and then writes nothing."""
    check_finite(layout, shard, slab)
    for name, dtype in ROW_ARRAYS.items():
        buffers = encode_flat(getattr(rows, name), dtype, layout.shard_rows)
        write_durable(row_chunk_path(store, name, shard.index), buffers)
    stamp = {"host": socket.gethostname(), "finished": datetime.datetime.now(datetime.UTC).isoformat("T", "seconds")}
    write_json(record_path(store, shard), {"rows": [shard.start, shard.stop], **record, **stamp})
    size = 0
    for place, name in enumerate(layout.arrays):
        values = slab.array(place)
        values[(shard.rows - 1) // BLOCK_ROWS, :, (shard.rows - 1) % BLOCK_ROWS + 1 :] = layout.fill
        size += write_durable(shard_path(store, name, shard), encode_shard(values, layout, shard))
    return size


def check_finite(layout: Layout, shard: Shard, slab: Slab) -> None:
    """Raise, naming row, layer and dtype, if any value of the shard is NaN or infinite."""
    counts = slab.counts()
    if not counts.any():
        return
    place, layer = (int(i) for i in np.argwhere(counts)[0])
    values = decode_floats(slab.array(place)[:, layer]).reshape(-1, layout.width)[: shard.rows]
    row = shard.start + int(np.flatnonzero(~np.isfinite(values).all(axis=1))[0])
    hint = "; float16 ends at 65504: use --dtype bfloat16 or float32" if layout.dtype == "float16" else ""
    raise PermafrostError(
        f"row {row}, layer {layout.layers[layer]} of {layout.sites[place]}: {int(counts.sum())} values of the shard "
        f"(rows {shard.start}–{shard.stop - 1}) are not finite in {layout.dtype}{hint}. The shard was not written."
    )


def is_done(store: Path, layout: Layout, shard: Shard) -> bool:
    """Whether the shard's files are all there and whole, judged by their sizes, indices and the row chunks' CRCs."""
    if not shard_path(store, layout.arrays[-1], shard).exists():
        return False
    try:
        for name in layout.arrays:
            read_index(shard_path(store, name, shard), layout, shard)
        for name, dtype in ROW_ARRAYS.items():
            read_flat(row_chunk_path(store, name, shard.index), dtype, layout.shard_rows)
        read_record(store, shard)
    except DamageError:
        return False
    return True


def read_record(store: Path, shard: Shard) -> dict[str, Any]:
    """Who computed the shard, and how."""
    try:
        return dict(json.loads(record_path(store, shard).read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise DamageError(f"rows {shard.start}–{shard.stop - 1}: {record_path(store, shard)}: {error}") from None
