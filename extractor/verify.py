"""Every byte of a store, checked: CRC32C, shape, finiteness, completeness, and that the text is the text.

Reads each shard once, on several threads; memory is one inner chunk a thread. Nothing is changed.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import zarr

from permafrost.extractor.codec import decode_chunk, read_flat, read_index
from permafrost.extractor.errors import DamageError
from permafrost.extractor.reader import Store, decode_floats
from permafrost.extractor.shards import BLOCK_ROWS, Shard
from permafrost.extractor.store import LINES, PAIR_CHUNK, ROW_ARRAYS, SENTENCES, row_chunk_path, shard_path
from permafrost.extractor.tables import ROLES, read_sentences
from permafrost.extractor.writer import read_record, text_hashes


@dataclass
class Verdict:
    """What `verify` found: the problems, a line each, with their rows."""

    rows: int
    read_bytes: int = 0
    problems: list[str] = field(default_factory=list)


def verify(path: Path, step: Callable[[int], object] = lambda rows: None) -> Verdict:
    """Read the whole store and check it; `step` is told the rows of each shard that was read."""
    store = Store(path)
    verdict = Verdict(store.rows)
    if not store.complete:
        verdict.problems.append("the store is not complete: run the command that made it again to finish it")
    verdict.problems += _check_arrays(store)
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        for shard, (problems, size) in zip(
            store.layout.shards, pool.map(lambda s: _check_shard(store, s), store.layout.shards), strict=True
        ):
            verdict.problems += problems
            verdict.read_bytes += size
            step(shard.rows)
    verdict.problems += _check_tables(store)
    return verdict


def _check_shard(store: Store, shard: Shard) -> tuple[list[str], int]:
    problems, size = [], 0
    for name in store.layout.arrays:
        try:
            index = read_index(shard_path(store.path, name, shard), store.layout, shard)
        except DamageError as error:
            problems.append(f"{name}: {error}")
            continue
        found, read = _check_chunks(store, shard, name, index)
        problems += found
        size += read
    for name, dtype in ROW_ARRAYS.items():
        try:
            values = read_flat(row_chunk_path(store.path, name, shard.index), dtype, store.layout.shard_rows)
        except DamageError as error:
            problems.append(f"{name}, rows {shard.start}–{shard.stop - 1}: {error}")
            continue
        if name == "length" and (values[: shard.rows] < 1).any():
            problems.append(f"length, rows {shard.start}–{shard.stop - 1}: a row without tokens")
        if name == "text_hash":
            problems += _check_text(store, shard, values[: shard.rows])
    try:
        read_record(store.path, shard)
    except DamageError as error:
        problems.append(str(error))
    return problems, size


def _check_chunks(store: Store, shard: Shard, name: str, index: Any) -> tuple[list[str], int]:
    """Damaged row ranges of one shard of one array, each with its layers; and the bytes read."""
    layout = store.layout
    problems, size = [], 0
    with shard_path(store.path, name, shard).open("rb") as file:
        for block in range(layout.blocks_of(shard)):
            start = shard.start + block * BLOCK_ROWS
            stop = min(start + BLOCK_ROWS, shard.stop)
            wrong: dict[str, list[str]] = {}
            for layer, label in enumerate(layout.layers):
                offset, length = (int(x) for x in index[block, layer])
                data = os.pread(file.fileno(), length, offset)
                size += len(data)
                try:
                    values = decode_floats(decode_chunk(data, layout)[: stop - start])
                    if not np.isfinite(values).all():
                        raise ValueError("values that are not finite")
                except ValueError as error:
                    wrong.setdefault(str(error), []).append(label)
            problems += [
                f"{name}, rows {start}–{stop - 1}, layers {','.join(labels)}: {why}" for why, labels in wrong.items()
            ]
    return problems, size


def _check_text(store: Store, shard: Shard, hashes: Any) -> list[str]:
    """The stored text against the stored hashes; nothing to check where the text was left out."""
    if not (store.path / SENTENCES).exists():
        wanted = not store.attributes["meaning"]["no_text"]
        return [f"{SENTENCES} is missing"] if wanted and shard.index == 0 else []
    try:
        texts, _ = read_sentences(store.path, shard.index)
    except (pa.ArrowException, OSError, IndexError) as error:
        return [f"{SENTENCES}, rows {shard.start}–{shard.stop - 1}: {str(error).splitlines()[0]}"]
    if len(texts) != shard.rows or not np.array_equal(text_hashes(texts), hashes):
        return [f"{SENTENCES}, rows {shard.start}–{shard.stop - 1}: not the text that was extracted"]
    return []


def _check_arrays(store: Store) -> list[str]:
    """Each array's metadata, as zarr reads it, against the layout."""
    layout, problems = store.layout, []
    shapes: dict[str, tuple[int, ...]] = {
        name: (layout.rows, len(layout.layers), layout.width) for name in layout.arrays
    }
    for name, shape in (shapes | dict.fromkeys(ROW_ARRAYS, (layout.rows,))).items():
        try:
            found = zarr.open_array(store.path / name, mode="r").shape
            if found != shape:
                problems.append(f"{name} has shape {found}, expected {shape}")
        except Exception as error:  # zarr raises many kinds on metadata that is not there or not whole
            problems.append(f"{name}: {type(error).__name__}: {error}")
    return problems


def _check_tables(store: Store) -> list[str]:
    """`lines.parquet` and the pairs: as many lines as counted, and no row number outside the store."""
    problems: list[str] = []
    roles = ROLES[len(store.attributes["meaning"]["column"])]
    try:
        with pq.ParquetFile(store.path / LINES) as file:
            if file.metadata.num_rows != store.attributes["counts"]["lines"]:
                problems.append(
                    f"{LINES} has {file.metadata.num_rows} lines, not {store.attributes['counts']['lines']}"
                )
            for batch in file.iter_batches(columns=[*roles]):
                rows = np.concatenate([c.drop_null().to_numpy(zero_copy_only=False) for c in batch.columns])
                if rows.size and (rows.min() < 0 or rows.max() >= store.rows):
                    problems.append(f"{LINES} names rows that the store does not have")
    except (pa.ArrowException, OSError) as error:
        problems.append(f"{LINES}: {str(error).splitlines()[0]}")
    group = {1: "", 2: "pairs", 3: "triplets"}[len(roles)]
    for path in sorted((store.path / group).glob("*/zarr.json")) if group else []:
        array = zarr.open_array(path.parent, mode="r")
        for chunk in range(-(-array.shape[0] // PAIR_CHUNK)):
            try:
                read_flat(path.parent / "c" / str(chunk), np.dtype(array.dtype), PAIR_CHUNK)
            except DamageError as error:
                problems.append(f"{group}/{path.parent.name}: {error}")
    return problems
