"""One pass over the corpus before the first shard: distinct sentences, every line's row, pairs and their gold values.

Streams the corpus once and writes, durably, `sentences.parquet` (a row group a shard: all that workers read of the
text), `lines.parquet` (one line for each of the corpus, so that deduplication loses no line and no label) and the
pair arrays. Memory: the digests of the distinct sentences (about 32 bytes each) and one shard's text.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from permafrost.extractor.corpus import Corpus
from permafrost.extractor.dedup import DigestIndex, digest
from permafrost.extractor.errors import InputError
from permafrost.extractor.formats import is_encodable
from permafrost.extractor.store import FlatArray
from permafrost.extractor.tables import LineWriter, PairWriter, Selection, Sentence, SentenceWriter

SAMPLE_ROWS = 1024
_WORD = re.compile(r"\w")


@dataclass
class Prepared:
    """What the pass found."""

    rows: int = 0
    lines: int = 0
    duplicates: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    sample: list[Sentence] = field(default_factory=list)
    flat: list[FlatArray] = field(default_factory=list)


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
    sentences = SentenceWriter(folder, selection.fields, shard_rows) if folder else None
    lines = LineWriter(folder, corpus, selection) if folder else None
    pairs = PairWriter(folder, corpus, selection) if folder and len(selection.texts) > 1 else None
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


def _number(index: DigestIndex | None, texts: list[str], fields: list[tuple[str, ...]], next_row: int) -> list[int]:
    if index is None:
        return list(range(next_row, next_row + len(texts)))
    keys = (digest(t) if not f else digest(repr((t, *f))) for t, f in zip(texts, fields, strict=True))
    return index.add([*keys])


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
