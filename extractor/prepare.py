"""One pass over the corpus before the first shard: distinct sentences, every line's row, pairs and their gold values.

Streams the corpus once and writes, durably, `sentences.parquet` (a row group a shard: all that workers read of the
text), `lines.parquet` (one line for each of the corpus, so that deduplication loses no line and no label) and the
pair arrays. Memory: the digests of the distinct sentences (about 32 bytes each) and one shard's text.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from permafrost.extractor.codec import encode_flat
from permafrost.extractor.corpus import Corpus
from permafrost.extractor.dedup import DigestIndex, digest
from permafrost.extractor.durable import TEMP_SUFFIX, publish, write_durable
from permafrost.extractor.errors import InputError
from permafrost.extractor.formats import is_encodable
from permafrost.extractor.store import LINES, PAIR_CHUNK, SENTENCES, FlatArray, row_chunk_path

ROLES = {1: ("row",), 2: ("left", "right"), 3: ("anchor", "positive", "negative")}
NLI_LABELS = ("entailment", "neutral", "contradiction")  # one numbering for every split
SAMPLE_ROWS = 1024
_WORD = re.compile(r"\w")


@dataclass(frozen=True)
class Sentence:
    """A distinct sentence: its store row, its text, and the columns that the template asks for."""

    row: int
    text: str
    fields: tuple[str, ...] = ()


@dataclass
class Prepared:
    """What the pass found."""

    rows: int = 0
    lines: int = 0
    duplicates: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    sample: list[Sentence] = field(default_factory=list)
    flat: list[FlatArray] = field(default_factory=list)


@dataclass(frozen=True)
class Selection:
    """Which columns of the corpus are text, template fields, the user's id and kept, and how many rows are read."""

    texts: tuple[str, ...]
    fields: tuple[str, ...] = ()
    id: str | None = None
    kept: tuple[str, ...] = ()
    limit: int | None = None
    dedup: bool = True


def select(
    corpus: Corpus,
    column: tuple[str, ...],
    fields: tuple[str, ...] = (),
    id: str | None = None,
    keep: tuple[str, ...] = ("all",),
    limit: int | None = None,
    dedup: bool = True,
) -> Selection:
    """Resolve names against the corpus's columns; raises with the columns there are."""
    texts = corpus.text_columns(column)
    names = corpus.schema.names
    if keep == ("all",):
        kept = tuple(name for name in names if name not in (*texts, id))
    else:
        kept = () if keep == ("none",) else keep
    for flag, asked in (("--template's {}", fields), ("--id", (id,) if id else ()), ("--keep", kept)):
        for name in asked:
            if name not in names:
                raise InputError(f"{flag}: {corpus.name} has no column {name!r}; it has {', '.join(names)}")
    return Selection(texts, fields, id, kept, limit, dedup)


def prepare(
    corpus: Corpus,
    selection: Selection,
    shard_rows: int,
    folder: Path | None,
    has_tokens: Callable[[str], bool] = lambda text: True,
) -> Prepared:
    """Read the corpus once. With a folder, leave the text, the lines and the pairs there; without, only count.

    `has_tokens` decides about texts without a letter or digit, which some tokenizers turn into nothing.
    """
    found = Prepared()
    sample = _Sample()
    index = DigestIndex() if selection.dedup else None
    sentences = _SentenceWriter(folder, selection.fields, shard_rows) if folder else None
    lines = _LineWriter(folder, corpus, selection) if folder else None
    pairs = _PairWriter(folder, corpus, selection) if folder and len(selection.texts) > 1 else None
    try:
        for cells, table in corpus.batches(selection.texts, selection.limit):
            fields = [_as_strings(table.column(name)) for name in selection.fields]
            why = [_why_skipped(values, has_tokens) for values in zip(*cells, strict=True)]
            for column in fields:
                why = [reason or ("null" if cell is None else None) for reason, cell in zip(why, column, strict=True)]
            good = [i for i, reason in enumerate(why) if reason is None]
            texts = [column[i] for i in good for column in cells]
            extra: list[tuple[str, ...]] = [tuple(str(f[i]) for f in fields) for i in good for _ in cells]
            rows = _number(index, texts, extra, found.rows)
            for row, text, values in zip(rows, texts, extra, strict=True):
                if row == found.rows:  # seen for the first time
                    found.rows += 1
                    sample.add(row, text, values)
                    if sentences:
                        sentences.add(text, values)
            by_line = np.array(rows, np.int64).reshape(-1, len(cells))
            if lines:
                lines.add(found.lines, table, why, good, by_line)
            if pairs:
                pairs.add(table, good, by_line)
            found.lines += len(why)
            found.duplicates += len(rows)
            found.skipped.update(reason for reason in why if reason)
        found.duplicates -= found.rows
        found.sample = sample.sentences
        if found.rows == 0:
            raise InputError(f"{corpus.name} gives no sentence: {found.lines} lines, skipped {dict(found.skipped)}")
        for writer in (lines, pairs, sentences):
            if writer:
                writer.finish()
    finally:
        for writer in (lines, sentences):
            if writer:
                writer.close()
    found.flat = pairs.arrays() if pairs else []
    return found


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


def _number(index: DigestIndex | None, texts: list[str], fields: list[tuple[str, ...]], next_row: int) -> list[int]:
    if index is None:
        return list(range(next_row, next_row + len(texts)))
    keys = (t if not f else "\x1f".join((t, *f)) for t, f in zip(texts, fields, strict=True))
    return index.add([digest(key) for key in keys])


def _why_skipped(values: tuple[Any, ...], has_tokens: Callable[[str], bool]) -> str | None:
    """Why this line gives no row (its pair neither), or None."""
    for value in values:
        if value is None:
            return "null"
        if not isinstance(value, str):
            return "not text"
        if not value or value.isspace():
            return "blank"
        if not value.isascii() and not is_encodable(value):
            return "not unicode"
        if _WORD.search(value) is None and not has_tokens(value):
            return "no tokens"
    return None


def _as_strings(column: pa.ChunkedArray) -> list[str | None]:
    """A template field's cells: text as it is, other values as Python writes them."""
    return [value if value is None or isinstance(value, str) else str(value) for value in column.to_pylist()]


class _Sample:
    """The longest sentence, and up to 2,048 others, spread evenly over the rows whatever their number."""

    def __init__(self) -> None:
        self._longest: Sentence | None = None
        self._spread: list[Sentence] = []
        self._stride = 1

    def add(self, row: int, text: str, fields: tuple[str, ...]) -> None:
        if self._longest is None or len(text) > len(self._longest.text):
            self._longest = Sentence(row, text, fields)
        if row % self._stride == 0:
            self._spread.append(Sentence(row, text, fields))
            if len(self._spread) > 2 * SAMPLE_ROWS:
                self._stride *= 2
                self._spread = [s for s in self._spread if s.row % self._stride == 0]

    @property
    def sentences(self) -> list[Sentence]:
        rest = [s for s in self._spread if s != self._longest]
        return rest if self._longest is None else [self._longest, *rest]


class _SentenceWriter:
    """`sentences.parquet`: a row group a shard."""

    def __init__(self, folder: Path, fields: tuple[str, ...], shard_rows: int) -> None:
        self._path = folder / SENTENCES
        self._temp = folder / (SENTENCES + TEMP_SUFFIX)
        self._schema = pa.schema([("text", pa.large_string()), *((f"field:{n}", pa.large_string()) for n in fields)])
        self._file = pq.ParquetWriter(self._temp, self._schema, compression="zstd")
        self._shard_rows = shard_rows
        self._rows: list[tuple[str, ...]] = []

    def add(self, text: str, fields: tuple[str, ...]) -> None:
        self._rows.append((text, *fields))
        if len(self._rows) == self._shard_rows:
            self._flush()

    def _flush(self) -> None:
        arrays = [pa.array(column, pa.large_string()) for column in zip(*self._rows, strict=True)]
        self._file.write_table(pa.Table.from_arrays(arrays, schema=self._schema), row_group_size=self._shard_rows)
        self._rows = []

    def finish(self) -> None:
        if self._rows:
            self._flush()
        self._file.close()
        publish(self._temp, self._path)

    def close(self) -> None:
        self._file.close()
        self._temp.unlink(missing_ok=True)


class _LineWriter:
    """`lines.parquet`: each line's number, its row (or rows), why it was skipped, the user's id, the kept columns."""

    def __init__(self, folder: Path, corpus: Corpus, selection: Selection) -> None:
        self._path = folder / LINES
        self._temp = folder / (LINES + TEMP_SUFFIX)
        self._roles = ROLES[len(selection.texts)]
        own = ["line", *self._roles, "skipped", *(["id"] if selection.id else [])]
        self._sources = [*([selection.id] if selection.id else []), *selection.kept]
        kept = [pa.field(name + "_" * (name in own), corpus.schema.field(name).type) for name in selection.kept]
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


class _PairWriter:
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
        if cell is None:
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
