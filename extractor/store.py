"""The store's layout and metadata (format 1): a Zarr v3 group that any Zarr v3 reader opens.

| part | shape | what |
|---|---|---|
| `activations` (several sites: one array each, by name) | (rows, layers, width) | float32, float16, or uint16 bits |
| `length`, `truncated`, `text_hash` | (rows,) | token count, cut or not, first 8 bytes of the text's BLAKE2b-128 |
| `pairs/…`, `triplets/…` | (pairs,) | row numbers, and the gold score or label |
| `sentences.parquet`, `lines.parquet` | | the text of each row; each line of the corpus with its row and columns |
| `shards/N.json` | | which machine computed shard N, and how well it agreed with a plain forward |

zarr-python makes the metadata, in memory; it goes to disk through our own durable writer. The group's `zarr.json`
comes last at creation: a folder without it is an unfinished preparation, begun anew by the next run.
"""

from __future__ import annotations

import asyncio
import json
import warnings
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import zarr
import zarr.codecs
import zarr.errors
from zarr.core.buffer import default_buffer_prototype
from zarr.storage import MemoryStore

from permafrost.extractor.durable import write_durable
from permafrost.extractor.errors import InputError
from permafrost.extractor.shards import BLOCK_ROWS, Shard, all_shards

FORMAT = 1
SENTENCES = "sentences.parquet"
LINES = "lines.parquet"
RECORDS = "shards"
PAIR_CHUNK = 1 << 16
BFLOAT16_NAN = 0x7FC0
STORED: dict[str, np.dtype[Any]] = {"float32": np.dtype("<f4"), "float16": np.dtype("<f2"), "bfloat16": np.dtype("<u2")}
ROW_ARRAYS: dict[str, np.dtype[Any]] = {
    "length": np.dtype("<i4"),
    "truncated": np.dtype("bool"),
    "text_hash": np.dtype("<u8"),
}
ZSTD_LEVEL = 3
BLOSC: dict[str, Any] = {"cname": "zstd", "clevel": 5, "shuffle": "bitshuffle"}


@dataclass(frozen=True)
class Layout:
    """All that fixes where each number of a store lies."""

    rows: int
    layers: tuple[str, ...]
    width: int
    dtype: str
    shard_rows: int
    codec: str
    sites: tuple[str, ...]

    @property
    def arrays(self) -> tuple[str, ...]:
        """The arrays' names, one a site, in the order in which a shard writes them."""
        return ("activations",) if len(self.sites) == 1 else self.sites

    @property
    def row_bytes(self) -> int:
        """Bytes of one row in one array."""
        return len(self.layers) * self.width * STORED[self.dtype].itemsize

    @property
    def blocks(self) -> int:
        """Row blocks of a full shard."""
        return self.shard_rows // BLOCK_ROWS

    @property
    def chunk_shape(self) -> tuple[int, int]:
        """One inner chunk as it lies in a shard: rows and width of one layer."""
        return BLOCK_ROWS, self.width

    @property
    def fill(self) -> float | int:
        """What an absent row reads as: "hole" to every reader."""
        return BFLOAT16_NAN if self.dtype == "bfloat16" else float("nan")

    @cached_property
    def shards(self) -> list[Shard]:
        return all_shards(self.rows, self.shard_rows)

    def blocks_of(self, shard: Shard) -> int:
        """Row blocks that hold a row of this shard."""
        return -(-shard.rows // BLOCK_ROWS)

    def disk_bytes(self, shards: list[Shard]) -> int:
        """Bytes of these shards' files, uncompressed: chunks with their checksums, the index, the row arrays."""
        chunks = sum(self.blocks_of(shard) for shard in shards) * len(self.layers)
        chunk = BLOCK_ROWS * self.width * STORED[self.dtype].itemsize + 4
        index = len(shards) * (self.blocks * len(self.layers) * 16 + 4)
        per_row = sum(dtype.itemsize for dtype in ROW_ARRAYS.values())
        return len(self.arrays) * (chunks * chunk + index) + len(shards) * (self.shard_rows * per_row + 4096)

    def as_dict(self) -> dict[str, Any]:
        return {
            "rows": self.rows,
            "layers": [*self.layers],
            "width": self.width,
            "dtype": self.dtype,
            "shard_rows": self.shard_rows,
            "codec": self.codec,
            "sites": [*self.sites],
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Layout:
        return cls(**values | {"layers": tuple(values["layers"]), "sites": tuple(values["sites"])})


def shard_path(store: Path, array: str, shard: Shard) -> Path:
    """The file of one shard of a (rows, layers, width) array."""
    return store / array / "c" / str(shard.index) / "0" / "0"


def row_chunk_path(store: Path, array: str, index: int) -> Path:
    """The file of one chunk of a one-dimensional array."""
    return store / array / "c" / str(index)


def record_path(store: Path, shard: Shard) -> Path:
    return store / RECORDS / f"{shard.index}.json"


@dataclass(frozen=True)
class FlatArray:
    """A one-dimensional array beside the activations: pairs, scores, labels."""

    name: str
    length: int
    dtype: str
    attributes: dict[str, Any]


def create_metadata(store: Path, layout: Layout, attributes: dict[str, Any], flat: list[FlatArray]) -> None:
    """Write every `zarr.json` of a new store, durably, the root's last: from then on the store exists."""
    memory = MemoryStore()
    root = zarr.open_group(memory, mode="w", zarr_format=3, attributes={"permafrost": attributes})
    for name, site in zip(layout.arrays, layout.sites, strict=True):
        extra: dict[str, Any] = {"site": site, "layers": [*layout.layers]}
        if layout.dtype == "bfloat16":
            extra["bits"] = "bfloat16"
        root.create_array(
            name,
            shape=(layout.rows, len(layout.layers), layout.width),
            dtype=STORED[layout.dtype],
            chunks=(layout.shard_rows, len(layout.layers), layout.width),
            serializer=_sharding(layout),
            compressors=None,
            filters=None,
            fill_value=layout.fill,
            dimension_names=("row", "layer", "width"),
            attributes=extra,
        )
    for name, dtype in ROW_ARRAYS.items():
        _create_flat(root, FlatArray(name, layout.rows, dtype.str, {}), layout.shard_rows, "row")
    for array in flat:
        _create_flat(root, array, PAIR_CHUNK, array.name.split("/")[0])
    _write_documents(store, _contents(memory))


def complete_metadata(store: Path, attributes: dict[str, Any]) -> None:
    """Set the store's attributes and consolidate its metadata, so that a reader sees all of it in one file."""
    memory = MemoryStore()
    root = zarr.open_group(memory, mode="w", zarr_format=3, attributes={"permafrost": attributes})
    for path in sorted(store.rglob("zarr.json")):
        if path.parent != store:
            _put(memory, str(path.relative_to(store)), path.read_bytes())
    with warnings.catch_warnings():  # every Zarr v3 reader we know takes it, or reads the arrays one by one
        warnings.simplefilter("ignore", zarr.errors.ZarrUserWarning)
        zarr.consolidate_metadata(root.store)
    _write_documents(store, {"zarr.json": _contents(memory)["zarr.json"]})


def _write_documents(store: Path, documents: dict[str, bytes]) -> None:
    for key in sorted(documents, key=lambda key: (key == "zarr.json", key)):
        write_durable(store / key, [documents[key]])


def _create_flat(group: zarr.Group, array: FlatArray, chunk: int, dimension: str) -> None:
    group.create_array(
        array.name,
        shape=(array.length,),
        dtype=array.dtype,
        chunks=(chunk,),
        compressors=[zarr.codecs.Crc32cCodec()],
        fill_value=0,
        dimension_names=(dimension,),
        attributes=array.attributes,
    )


def _sharding(layout: Layout) -> Any:
    inner: list[Any] = [zarr.codecs.BytesCodec(endian="little")]
    if layout.codec == "zstd":
        inner.append(zarr.codecs.ZstdCodec(level=ZSTD_LEVEL))
    if layout.codec == "blosc":
        typesize = STORED[layout.dtype].itemsize
        inner.append(zarr.codecs.BloscCodec(**BLOSC, typesize=typesize))
    return zarr.codecs.ShardingCodec(
        chunk_shape=(BLOCK_ROWS, 1, layout.width),
        codecs=[*inner, zarr.codecs.Crc32cCodec()],
        index_codecs=[zarr.codecs.BytesCodec(endian="little"), zarr.codecs.Crc32cCodec()],
    )


def _contents(memory: MemoryStore) -> dict[str, bytes]:
    async def read() -> dict[str, bytes]:
        found = {}
        async for key in memory.list():
            data = await memory.get(key, default_buffer_prototype())
            assert data is not None
            found[key] = data.to_bytes()
        return found

    return asyncio.run(read())


def _put(memory: MemoryStore, key: str, data: bytes) -> None:
    asyncio.run(memory.set(key, default_buffer_prototype().buffer.from_bytes(data)))


def read_attributes(store: Path) -> dict[str, Any]:
    """The store's own attributes, or an error that says what is there instead."""
    path = store / "zarr.json"
    try:
        attributes = json.loads(path.read_text(encoding="utf-8"))["attributes"]["permafrost"]
    except FileNotFoundError:
        what = "does not exist" if not store.exists() else "is not a Permafrost store (it has no zarr.json)"
        raise InputError(f"{store} {what}") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path} is not a Permafrost store's metadata: {type(error).__name__}: {error}") from None
    if attributes.get("format") != FORMAT:
        raise InputError(f"{store} has format {attributes.get('format')}, this version reads format {FORMAT}")
    return dict(attributes)
