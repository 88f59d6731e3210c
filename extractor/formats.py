"""Files of text → batches of rows: .txt, .jsonl, .csv, .tsv (each also .gz) and .parquet, streamed.

Every reader yields pyarrow tables of at most `BATCH` rows with a schema known beforehand, so that memory does not
grow with the file. CSV and TSV cells are strings as they stand in the file (an empty cell is null): "007" stays
"007". JSONL costs two passes, the first to learn the columns and their types; a column of mixed or nested values
travels as JSON text. Errors name the file and, where there is one, the line.
"""

from __future__ import annotations

import csv
import gzip
import json
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq

from permafrost.extractor.errors import InputError

BATCH = 16384
SUFFIXES = (".txt", ".jsonl", ".csv", ".tsv", ".parquet")
Kind = Literal["null", "bool", "int", "long", "float", "string", "json"]
_ARROW = {
    "null": pa.null(),
    "bool": pa.bool_(),
    "int": pa.int64(),  # within what a float holds exactly
    "long": pa.int64(),
    "float": pa.float64(),
    "string": pa.string(),
    "json": pa.string(),
}
csv.field_size_limit(1 << 30)

# One batch: the text columns as Python objects (a cell may be anything, or None), and the whole table.
Rows = tuple[list[list[Any]], pa.Table]


@dataclass(frozen=True)
class FileReader:
    """One file and how to read it: `schema` is known on making, `batches` streams."""

    path: Path
    kind: str
    schema: pa.Schema
    header: bool = True
    json_kinds: dict[str, Kind] = field(default_factory=dict)

    def batches(self, texts: tuple[str, ...]) -> Iterator[Rows]:
        """Stream the file: the named columns' cells as Python objects, and all columns as a table."""
        for name in texts:
            if name not in self.schema.names:
                raise InputError(f"{self.path} has no column {name!r}; it has {', '.join(self.schema.names)}")
        if self.kind == ".parquet":
            yield from self._parquet(texts)
        elif self.kind == ".jsonl":
            yield from self._jsonl(texts)
        else:
            yield from self._cells(texts)

    def _cells(self, texts: tuple[str, ...]) -> Iterator[Rows]:
        names = self.schema.names
        records: Iterable[list[str]]
        if self.kind == ".txt":
            records = ([line.rstrip("\r\n")] for line in text_lines(self.path))
        else:
            records = csv_records(self.path, self.kind, len(names), self.header)
        for batch in batched(records):
            cells = {name: list(column) for name, column in zip(names, zip(*batch, strict=True), strict=True)}
            arrays = [_parse(self.path, f, [cell or None for cell in cells[f.name]]) for f in self.schema]
            yield [cells[name] for name in texts], pa.Table.from_arrays(arrays, schema=self.schema)

    def _jsonl(self, texts: tuple[str, ...]) -> Iterator[Rows]:
        for batch in batched(json_records(self.path)):
            arrays = []
            for f in self.schema:
                cells = [record.get(f.name) for record in batch]
                if self.json_kinds[f.name] == "json":
                    cells = [None if c is None else json.dumps(c, ensure_ascii=True) for c in cells]
                arrays.append(pa.array(_encodable(cells), f.type))
            yield [[r.get(n) for r in batch] for n in texts], pa.Table.from_arrays(arrays, schema=self.schema)

    def _parquet(self, texts: tuple[str, ...]) -> Iterator[Rows]:
        for name in texts:
            require_text(self.path, self.schema.field(name))
        with _parquet_errors(self.path), pq.ParquetFile(self.path) as file:
            for batch in file.iter_batches(BATCH):
                table = pa.Table.from_batches([batch])
                yield [table.column(name).to_pylist() for name in texts], table


def open_file(path: Path, columns: dict[str, pa.DataType] | None = None) -> FileReader:
    """A reader for the file. `columns` gives the names and types of a tab-separated file that has no header."""
    kind = Path(path.stem if path.suffix == ".gz" else path.name).suffix
    if kind not in SUFFIXES or (kind == ".parquet" and path.suffix == ".gz"):
        raise InputError(f"{path}: expected a file of {', '.join(SUFFIXES)} (text formats also .gz)")
    if kind == ".txt":
        return FileReader(path, kind, pa.schema([("text", pa.string())]))
    if kind == ".parquet":
        with _parquet_errors(path), pq.ParquetFile(path) as file:
            return FileReader(path, kind, file.schema_arrow.remove_metadata())
    if kind == ".jsonl":
        kinds = json_columns(path)
        return FileReader(path, kind, pa.schema([(n, _ARROW[k]) for n, k in kinds.items()]), json_kinds=kinds)
    if columns is not None:
        return FileReader(path, ".tsv", pa.schema(list(columns.items())), header=False)
    header = next(iter(csv_records(path, kind, None, header=False)), [])
    if len(set(header)) != len(header) or not all(header):
        raise InputError(f"{path}: the first line must name each column once, it reads {header}")
    return FileReader(path, kind, pa.schema([(name, pa.string()) for name in header]))


def require_text(where: object, column: pa.Field) -> None:
    """Raise unless the column's type holds text (or nothing but nulls)."""
    kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
    tests = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view, pa.types.is_null)
    if not any(test(kind) for test in tests):
        raise InputError(f"{where}: column {column.name!r} is {column.type}, expected text")


def batched(records: Iterable[Any], size: int = BATCH) -> Iterator[list[Any]]:
    """Lists of up to `size` records."""
    batch: list[Any] = []
    for record in records:
        batch.append(record)
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch


def text_lines(path: Path) -> Iterator[str]:
    """The file's lines, decoded one by one so that a byte that is not UTF-8 is found by its line."""
    number = 0
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                yield line.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise InputError(f"{path}, line {number}: not UTF-8 (byte 0x{byte:02x}); convert the file first") from None
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise InputError(f"{path}: corrupt gzip data after line {number}: {error}") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or error}") from None


def csv_records(path: Path, kind: str, width: int | None, header: bool) -> Iterator[list[str]]:
    """Rows of a csv or (unquoted) tsv file; `width` cells each, more are cut only in a file without a header."""
    if kind == ".tsv":
        reader = csv.reader(text_lines(path), delimiter="\t", quoting=csv.QUOTE_NONE)
    else:
        reader = csv.reader(text_lines(path), strict=True)
    try:
        if header:
            next(reader, None)
        for record in reader:
            if not record:
                continue
            if width is not None and len(record) != width:
                if header or len(record) < width:
                    raise InputError(f"{path}, line {reader.line_num}: {len(record)} cells, expected {width}")
                record = record[:width]
            yield record
    except csv.Error as error:
        raise InputError(f"{path}, line {reader.line_num}: {error}") from None


def json_records(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a JSONL file, one a line; empty lines are passed over."""
    for number, line in enumerate(text_lines(path), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise InputError(f"{path}, line {number}: not JSON: {error}") from None
        if not isinstance(record, dict):
            raise InputError(f'{path}, line {number}: expected an object, as {{"text": …}}')
        if not all(map(is_encodable, record)):
            raise InputError(f"{path}, line {number}: a key that UTF-8 cannot hold (half a surrogate pair)")
        yield record


def json_columns(path: Path) -> dict[str, Kind]:
    """Each key of a JSONL file and the narrowest kind that holds all its values, in order of first appearance."""
    kinds: dict[str, Kind] = {}
    for record in json_records(path):
        for name, value in record.items():
            kind = _json_kind(value)
            known = kinds.setdefault(name, kind)
            if known != kind:
                kinds[name] = _wider(known, kind)
    return kinds


def _json_kind(value: Any) -> Kind:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "bool"
    if isinstance(value, int):
        return "int" if abs(value) <= 2**53 else "long" if -(2**63) <= value < 2**63 else "json"
    if isinstance(value, float):
        return "float"
    return "string" if isinstance(value, str) else "json"


def _wider(a: Kind, b: Kind) -> Kind:
    if "null" in (a, b):
        return a if b == "null" else b
    if {a, b} == {"int", "long"}:
        return "long"
    return "float" if {a, b} == {"int", "float"} else "json"


def _encodable(cells: list[Any]) -> list[Any]:
    """Strings that UTF-8 cannot hold (half a surrogate pair) become null, as a text they are skipped and counted."""
    return [None if isinstance(c, str) and not is_encodable(c) else c for c in cells]


def is_encodable(text: str) -> bool:
    """Whether UTF-8 can hold the text."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _parse(path: Path, column: pa.Field, cells: list[str | None]) -> pa.Array:
    try:
        return pa.array(cells, pa.string()).cast(column.type)
    except pa.ArrowInvalid as error:
        raise InputError(f"{path}: column {column.name!r} is not {column.type}: {error}") from None


@contextmanager
def _parquet_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"{path}: not a readable parquet file: {str(error).splitlines()[0]}") from None
