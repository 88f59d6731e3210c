"""Names, files, folders and hub sets → one `Corpus`: its columns, its fingerprint and a stream of its rows.

Knows where text comes from and nothing of models. The named sets are read from `--data-dir` where their files are
there, else from the hub through `datasets`. A corpus of files is identified by its files' contents.
"""

from __future__ import annotations

import glob
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from importlib.resources import files
from pathlib import Path
from typing import Any

import pyarrow as pa

from permafrost.extractor.errors import InputError, UsageError
from permafrost.extractor.fingerprint import fingerprint_files
from permafrost.extractor.formats import BATCH, SUFFIXES, FileReader, Rows, open_file, require_text

# Text columns that are found without being named, in order of preference.
KNOWN_COLUMNS: tuple[tuple[str, ...], ...] = (
    ("anchor", "positive", "negative"),
    ("sent0", "sent1", "hard_neg"),
    ("sentence1", "sentence2"),
    ("premise", "hypothesis"),
    ("text",),
    ("sentence",),
    ("content",),
    ("generic_sentence",),
)


@dataclass(frozen=True)
class NamedSet:
    """A corpus that goes by a name: its files under the data folder, and where the hub has it."""

    about: str
    licence: str
    files: dict[str, str]  # split → path below the data folder, a glob
    hub: str | None
    hub_splits: dict[str, str] = field(default_factory=dict)
    columns: dict[str, pa.DataType] | None = None  # of files without a header
    score_divisor: float = 1.0  # of the files; the hub's copies are scaled to 0–1


NAMED = {
    "sample": NamedSet("600 sentences of general knowledge, built in", "Apache-2.0", {"train": "sample.txt"}, None),
    "genericskb": NamedSet(
        "GenericsKB-Best: about a million generic sentences",
        "CC BY 4.0",
        {"train": "genericskb/genericskb-50k.tsv", "additional": "genericskb/genericskb-additional-*.tsv"},
        "community-datasets/generics_kb:generics_kb_best",
        columns={"term": pa.string(), "sentence": pa.string(), "confidence": pa.float64()},
    ),
    "stsb": NamedSet(
        "STS benchmark: 5,749 / 1,500 / 1,379 sentence pairs with scores",
        "CC BY-SA 4.0 (scores)",
        {split: f"stsb/sts-{split}.csv" for split in ("train", "dev", "test")},
        "sentence-transformers/stsb",
        {"dev": "validation"},
        columns=dict.fromkeys(("genre", "file", "year", "id"), pa.string())
        | {"score": pa.float64(), "sentence1": pa.string(), "sentence2": pa.string()},
        score_divisor=5.0,
    ),
    "snli": NamedSet(
        "SNLI: 570,000 premise and hypothesis pairs with labels",
        "CC BY-SA 4.0",
        {split: f"snli/snli-{split}*.tsv*" for split in ("train", "dev", "test")} | {"triplets": "snli/triplets*.csv*"},
        "stanfordnlp/snli",
        {"dev": "validation"},
    ),
}


@dataclass(frozen=True)
class Corpus:
    """Rows of text and columns, to be streamed any number of times."""

    name: str
    split: str | None
    schema: pa.Schema
    readers: tuple[FileReader, ...] = ()
    dataset: Any = None
    score_divisor: float = 1.0

    @cached_property
    def fingerprint(self) -> str:
        """Of the files' contents (one read of them), or the one the `datasets` library gives."""
        if self.dataset is not None:
            return f"datasets:{self.dataset._fingerprint}"
        return fingerprint_files([reader.path for reader in self.readers])

    def batches(self, texts: tuple[str, ...], limit: int | None = None) -> Iterator[Rows]:
        """Stream the first `limit` rows: the text columns' cells as Python objects, and all columns as a table."""
        left = limit
        for cells, table in self._all_batches(texts):
            if left is not None and table.num_rows > left:
                cells, table = [column[:left] for column in cells], table.slice(0, left)
            if table.num_rows:
                yield cells, table
            if left is not None:
                left -= table.num_rows
                if left == 0:
                    return

    def _all_batches(self, texts: tuple[str, ...]) -> Iterator[Rows]:
        if self.dataset is not None:
            for name in texts:
                require_text(self.name, self.schema.field(name))
            for table in self.dataset.with_format("arrow").iter(batch_size=BATCH):
                table = _class_names(table, self.dataset.features)
                yield [table.column(name).to_pylist() for name in texts], table.cast(self.schema)
        for reader in self.readers:
            for cells, table in reader.batches(texts):
                yield cells, _conform(table, self.schema, reader.path if len(self.readers) > 1 else None)

    def text_columns(self, asked: tuple[str, ...]) -> tuple[str, ...]:
        """The text columns: those asked for, or the only one, or those with a well-known name."""
        names = [name for name in self.schema.names if name != "file" or len(self.readers) < 2]
        for name in asked:
            if name not in names:
                raise InputError(f"{self.name} has no column {name!r}; it has {', '.join(names)}")
        if not names:
            raise InputError(f"{self.name} is empty")
        if asked:
            return asked
        if len(names) == 1:
            return (names[0],)
        for known in KNOWN_COLUMNS:
            if set(known) <= set(names):
                return known
        raise InputError(f"{self.name}: which column is the text? Name it with --column; it has {', '.join(names)}")


def open_corpus(name: str, split: str | None = None, data_dir: str | None = None) -> Corpus:
    """The corpus of this name or path; nothing is read yet but headers (and the keys of JSONL files)."""
    if not name:
        raise UsageError(f"--corpus is missing; known names are {', '.join(NAMED)}, or give a file or folder")
    if name in NAMED:
        return _open_named(name, split, data_dir or os.environ.get("PERMAFROST_DATA"))
    if name.startswith("hf:"):
        return _open_hub(name, name[3:], split)
    paths = _find_files(name, split)
    return _of_files(name, split, [open_file(path) for path in paths])


def _of_files(name: str, split: str | None, readers: list[FileReader], divisor: float = 1.0) -> Corpus:
    try:
        schema = pa.unify_schemas([reader.schema for reader in readers], promote_options="permissive")
    except pa.ArrowException as error:
        raise InputError(f"{name}: the files' columns do not go together: {error}") from None
    if len(readers) > 1 and "file" not in schema.names:
        schema = schema.append(pa.field("file", pa.string()))
    return Corpus(name, split, schema, tuple(readers), score_divisor=divisor)


def _conform(table: pa.Table, schema: pa.Schema, path: Path | None) -> pa.Table:
    """The table with the corpus's columns: those it lacks null, `file` (of several) its own name."""
    columns = []
    for column in schema:
        if column.name in table.column_names:
            try:
                columns.append(table.column(column.name).cast(column.type))
            except pa.ArrowInvalid as error:
                raise InputError(f"{path}: column {column.name!r} does not go with the other files': {error}") from None
        elif column.name == "file" and path is not None:
            columns.append(pa.array([path.name] * table.num_rows, pa.string()))
        else:
            columns.append(pa.nulls(table.num_rows, column.type))
    return pa.Table.from_arrays(columns, schema=schema)


def _find_files(name: str, split: str | None) -> list[Path]:
    path = Path(name)
    if path.is_file():
        if split is not None:
            raise UsageError(f"--split {split}: {name} is one file and has no splits")
        return [path]
    if path.is_dir():
        found = sorted(p for p in path.rglob("*") if p.is_file() and _readable(p))
        what = f"the folder {name}"
    elif glob.has_magic(name):
        found = sorted(p for p in map(Path, glob.glob(name, recursive=True)) if p.is_file())  # noqa: PTH207
        what = f"the pattern {name}"
    else:
        known = ", ".join(NAMED)
        raise InputError(f"unknown corpus {name!r}: no such file or folder, and none of the named sets ({known})")
    if split is not None:
        word = re.compile(rf"(?<![^\W_]){re.escape(split)}(?![^\W_])")
        root = path if path.is_dir() else path.parent
        found = [p for p in found if word.search(os.path.relpath(p, root))]
        what += f", split {split},"
    if not found:
        raise InputError(f"{what} holds no file of {', '.join(SUFFIXES)}")
    return found


def _readable(path: Path) -> bool:
    suffixes = path.suffixes[:-1] if path.suffix == ".gz" else path.suffixes
    return bool(suffixes) and suffixes[-1] in SUFFIXES and not path.name.startswith(".")


def _open_named(name: str, split: str | None, data_dir: str | None) -> Corpus:
    spec = NAMED[name]
    split = split or "train"
    if name == "sample":
        if split != "train":
            raise InputError(f"{name} has no split {split!r}; it has train")
        return _of_files(name, None, [open_file(Path(str(files("permafrost.extractor") / "sample.txt")))])
    if data_dir is None:
        return _open_hub(name, str(spec.hub), spec.hub_splits.get(split, split))
    if split not in spec.files:
        raise InputError(f"{name} has no split {split!r}; it has {', '.join(spec.files)}")
    found = sorted(Path(data_dir).glob(spec.files[split]))
    if not found:
        expected = Path(data_dir) / spec.files[split]
        raise InputError(f"{name}: expected {expected}; put the file there, or leave --data-dir away to use the hub")
    return _of_files(name, split, [open_file(path, spec.columns) for path in found], spec.score_divisor)


def _open_hub(name: str, path: str, split: str | None) -> Corpus:
    import datasets

    path, _, part = path.partition(":")
    print(f"loading {path} from the hub or its cache", file=sys.stderr, flush=True)
    try:
        dataset = datasets.load_dataset(path, part or None, split=split or "train")
    except Exception as error:
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise InputError(
            f"{name}: the hub's set {path} cannot be loaded (split {split or 'train'}): {first}\n"
            "Without a network: fetch it elsewhere with `extract fetch`, or give files (--data-dir, or a path)."
        ) from None
    return Corpus(name, split, _class_names(dataset.data.table.slice(0, 0), dataset.features).schema, dataset=dataset)


def _class_names(table: pa.Table, features: Any) -> pa.Table:
    """The hub's integer labels as their names; -1, its "no label", as null."""
    for name, feature in features.items():
        if type(feature).__name__ == "ClassLabel":
            codes = table.column(name).to_pylist()
            labels = [None if c is None or c < 0 else feature.names[c] for c in codes]
            table = table.set_column(table.column_names.index(name), name, pa.array(labels, pa.string()))
    return table.replace_schema_metadata(None)
