"""The tables and pair arrays of a store: `sentences.parquet`, `lines.parquet`, `pairs/…`, `triplets/…`.

Written by the driver in its one pass over the corpus, batch by batch; the text is read back shard by shard.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from permafrost.extractor.codec import encode_flat
from permafrost.extractor.corpus import Corpus
from permafrost.extractor.durable import TEMP_SUFFIX, publish, write_durable
from permafrost.extractor.errors import InputError
from permafrost.extractor.store import LINES, PAIR_CHUNK, SENTENCES, FlatArray, row_chunk_path

ROLES = {1: ("row",), 2: ("left", "right"), 3: ("anchor", "positive", "negative")}
NLI_LABELS = ("entailment", "neutral", "contradiction")  # one numbering for every split


@dataclass(frozen=True)
class Sentence:
    """A distinct sentence: its store row, its text, and the columns that the template asks for."""

    row: int
    text: str
    fields: tuple[str, ...] = ()


@dataclass(frozen=True)
class Selection:
    """Which columns of the corpus are text, template fields, the user's id and kept, and how many rows are read."""

    texts: tuple[str, ...]
    fields: tuple[str, ...] = ()
    id: str | None = None
    kept: tuple[str, ...] = ()
    limit: int | None = None
    dedup: bool = True


def read_sentences(store: Path, shard: int) -> tuple[list[str], list[tuple[str, ...]]]:
    """A shard's texts and their template fields."""
    with pq.ParquetFile(store / SENTENCES) as file:
        table = file.read_row_group(shard)
    columns = [table.column(i).to_pylist() for i in range(table.num_columns)]
    return columns[0], list(zip(*columns[1:], strict=True)) if columns[1:] else [()] * len(columns[0])


def read_sample(store: Path, rows: Sequence[int], shard_rows: int) -> list[Sentence]:
    """Sentences by row number; reads one row group for each shard that holds one."""
    found: list[Sentence] = []
    for shard in sorted({row // shard_rows for row in rows}):
        texts, fields = read_sentences(store, shard)
        inside = [row - shard * shard_rows for row in rows if row // shard_rows == shard]
        found += [Sentence(shard * shard_rows + i, texts[i], fields[i]) for i in inside]
    return found


class SentenceWriter:
    """`sentences.parquet`: a row group a shard."""

    def __init__(self, folder: Path, fields: tuple[str, ...], shard_rows: int) -> None:
        self._path = folder / SENTENCES
        self._temp = folder / (SENTENCES + TEMP_SUFFIX)
        self._schema = pa.schema([("text", pa.large_string()), *((f"field:{n}", pa.large_string()) for n in fields)])
        self._file = pq.ParquetWriter(self._temp, self._schema, compression="zstd")
        self._shard_rows = shard_rows
        self._columns: list[list[str]] = [[] for _ in self._schema]

    def add(self, text: str, fields: tuple[str, ...]) -> None:
        for column, value in zip(self._columns, (text, *fields), strict=True):
            column.append(value)
        if len(self._columns[0]) == self._shard_rows:
            self._flush()

    def _flush(self) -> None:
        arrays = [pa.array(column, pa.large_string()) for column in self._columns]
        self._file.write_table(pa.Table.from_arrays(arrays, schema=self._schema), row_group_size=self._shard_rows)
        self._columns = [[] for _ in self._schema]

    def finish(self) -> None:
        if self._columns[0]:
            self._flush()
        self._file.close()
        publish(self._temp, self._path)

    def close(self) -> None:
        self._file.close()
        self._temp.unlink(missing_ok=True)


class LineWriter:
    """`lines.parquet`: each line's number, its row (or rows), why it was skipped, the user's id, the kept columns."""

    def __init__(self, folder: Path, corpus: Corpus, selection: Selection) -> None:
        self._path = folder / LINES
        self._temp = folder / (LINES + TEMP_SUFFIX)
        self._roles = ROLES[len(selection.texts)]
        own = ["line", *self._roles, "skipped", *(["id"] if selection.id else [])]
        self._sources = [*([selection.id] if selection.id else []), *selection.kept]
        kept = [pa.field(n, corpus.schema.field(c).type) for c, n in _free_names(selection.kept, own).items()]
        id_field = [pa.field("id", corpus.schema.field(selection.id).type)] if selection.id else []
        rows = [pa.field(role, pa.int64()) for role in self._roles]
        skipped = pa.field("skipped", pa.string())
        self._schema = pa.schema([pa.field("line", pa.int64()), *rows, skipped, *id_field, *kept])
        self._file = pq.ParquetWriter(self._temp, self._schema, compression="zstd")

    def add(self, first: int, table: pa.Table, why: list[str | None], good: list[int], rows: Any) -> None:
        places = np.zeros((len(why), len(self._roles)), np.int64)
        places[good] = rows
        missing = np.array([reason is not None for reason in why])
        arrays = [pa.array(np.arange(first, first + len(why)))]
        arrays += [pa.array(places[:, k], mask=missing) for k in range(len(self._roles))]
        arrays.append(pa.array(why, pa.string()))
        arrays += [table.column(name) for name in self._sources]
        self._file.write_table(pa.Table.from_arrays(arrays, schema=self._schema))

    def finish(self) -> None:
        self._file.close()
        publish(self._temp, self._path)

    def close(self) -> None:
        self._file.close()
        self._temp.unlink(missing_ok=True)


def _free_names(names: Sequence[str], taken: Sequence[str]) -> dict[str, str]:
    """Each name, with underscores behind it where it would stand twice."""
    used, free = {*taken}, {}
    for name in names:
        new = name
        while new in used or (new != name and new in names):
            new += "_"
        used.add(new)
        free[name] = new
    return free


class PairWriter:
    """`pairs/…` or `triplets/…`: row numbers, and the `score` or `label` column's values, chunk by chunk."""

    def __init__(self, folder: Path, corpus: Corpus, selection: Selection) -> None:
        self._folder = folder
        self._corpus = corpus
        self._roles = ROLES[len(selection.texts)]
        self._group = "pairs" if len(self._roles) == 2 else "triplets"
        gold = [name for name in ("score", "label") if name in corpus.schema.names and len(self._roles) == 2]
        self._gold = gold[0] if gold else None
        self._labels: dict[str, int] = {}
        self._buffers: dict[str, list[Any]] = {name: [] for name in (*self._roles, *gold[:1])}
        self._written = 0
        self._chunks = 0

    def add(self, table: pa.Table, good: list[int], rows: Any) -> None:
        for k, role in enumerate(self._roles):
            self._buffers[role].extend(rows[:, k].tolist())
        if self._gold:
            cells = table.column(self._gold).take(pa.array(good, pa.int64())).to_pylist()
            self._buffers[self._gold].extend(map(self._score if self._gold == "score" else self._label, cells))
        while len(self._buffers[self._roles[0]]) >= PAIR_CHUNK:
            self._flush()

    def _score(self, cell: Any) -> float:
        try:
            return float("nan") if cell is None else float(cell) / self._corpus.score_divisor
        except (TypeError, ValueError):
            raise InputError(f"{self._corpus.name}: the score {cell!r} is not a number") from None

    def _label(self, cell: Any) -> int:
        if cell is None or cell == "-":  # SNLI's word for "the annotators did not agree"
            return -1
        name = str(cell)
        if not self._labels and name in NLI_LABELS:
            self._labels = {known: code for code, known in enumerate(NLI_LABELS)}
        return self._labels.setdefault(name, len(self._labels))

    def _flush(self) -> None:
        for name, values in self._buffers.items():
            buffers = encode_flat(np.array(values[:PAIR_CHUNK]), self._dtype(name), PAIR_CHUNK)
            write_durable(row_chunk_path(self._folder, f"{self._group}/{name}", self._chunks), buffers)
        self._written += len(self._buffers[self._roles[0]][:PAIR_CHUNK])
        self._chunks += 1
        self._buffers = {name: values[PAIR_CHUNK:] for name, values in self._buffers.items()}

    def _dtype(self, name: str) -> np.dtype[Any]:
        return np.dtype({"score": "<f4", "label": "<i4"}.get(name, "<i8"))

    def finish(self) -> None:
        if self._buffers[self._roles[0]]:
            self._flush()

    def arrays(self) -> list[FlatArray]:
        extra: dict[str, dict[str, Any]] = {
            "score": {"divisor": self._corpus.score_divisor},
            "label": {"names": [*self._labels]},
        }
        return [
            FlatArray(f"{self._group}/{name}", self._written, self._dtype(name).str, extra.get(name, {}))
            for name in self._buffers
        ]
