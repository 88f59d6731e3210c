"""Each file format and its compressed form, read back exactly; each way a file can be broken, named by file and line.

Regimes: byte-order marks, CRLF, quoted newlines, Unicode line separators (which end no line), more than a batch; JSONL
whose columns are mixed, nested, null, too large for 64 bits or not Unicode; bytes that are not UTF-8, gzip and parquet
that are cut or garbled. Random tables go through CSV and JSONL and come back the same.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from permafrost.extractor.errors import InputError
from permafrost.extractor.formats import BATCH, open_file


def save(folder: Path, name: str, data: str | bytes) -> Path:
    """A file of this name, compressed if it ends in .gz."""
    raw = data if isinstance(data, bytes) else data.encode("utf-8")
    path = folder / name
    path.write_bytes(gzip.compress(raw, mtime=0) if path.suffix == ".gz" else raw)
    return path


def table_of(path: Path, **options: Any) -> pa.Table:
    """The whole file; also checks that every batch has the schema that was promised."""
    reader = open_file(path, **options)
    tables = [table for _, table in reader.batches(())]
    assert all(table.schema == reader.schema for table in tables)
    return pa.concat_tables(tables) if tables else reader.schema.empty_table()


def texts_of(path: Path, column: str = "text") -> list[Any]:
    return [cell for cells, _ in open_file(path).batches((column,)) for cell in cells[0]]


def refusal(path: Path) -> str:
    """What is said about a broken file, which must be named."""
    with pytest.raises(InputError) as error:
        table_of(path)
    assert str(path) in str(error.value)
    return str(error.value)


# Whole files

TEXTS = ["Cats sleep.", "naïve 猫 🧊", 'a "quote", a comma', "  spaces  "]
CONTENTS = {
    ".txt": "".join(f"{t}\n" for t in TEXTS),
    ".jsonl": "".join(json.dumps({"text": t}) + "\n" for t in TEXTS),
    ".csv": 'text\nCats sleep.\nnaïve 猫 🧊\n"a ""quote"", a comma"\n  spaces  \n',
    ".tsv": "text\n" + "".join(f"{t}\n" for t in TEXTS),
}
each_format = pytest.mark.parametrize("kind", CONTENTS)
each_form = pytest.mark.parametrize("gz", ["", ".gz"])


@each_format
@each_form
def test_each_format_reads_plain_and_compressed(kind: str, gz: str, tmp_path: Path) -> None:
    path = save(tmp_path, f"a{kind}{gz}", CONTENTS[kind])
    assert texts_of(path) == TEXTS
    assert table_of(path).to_pydict() == {"text": TEXTS}


@each_format
@each_form
def test_a_byte_order_mark_crlf_and_a_missing_last_newline_change_nothing(kind: str, gz: str, tmp_path: Path) -> None:
    text = CONTENTS[kind].replace("\n", "\r\n").removesuffix("\r\n")
    assert texts_of(save(tmp_path, f"a{kind}{gz}", "\ufeff" + text)) == TEXTS


@each_format
def test_lines_end_at_newlines_alone(kind: str, tmp_path: Path) -> None:
    """U+2028, U+0085 and form feeds stand in real web text; `str.splitlines` would cut there."""
    line = "one\u2028two\u0085three\x0cfour"
    header = "" if kind in (".txt", ".jsonl") else "text\n"
    body = json.dumps({"text": line}, ensure_ascii=False) if kind == ".jsonl" else line
    assert texts_of(save(tmp_path, f"a{kind}", f"{header}{body}\n")) == [line]


@each_format
def test_a_file_longer_than_a_batch_comes_in_pieces_and_whole(kind: str, tmp_path: Path) -> None:
    lines = [f"line {i}" for i in range(2 * BATCH + 1)]
    header = "" if kind in (".txt", ".jsonl") else "text\n"
    body = "\n".join(f'{{"text": "{t}"}}' if kind == ".jsonl" else t for t in lines)
    path = save(tmp_path, f"a{kind}", header + body)
    assert [table.num_rows for _, table in open_file(path).batches(())] == [BATCH, BATCH, 1]
    assert texts_of(path) == lines


def test_an_empty_line_of_text_is_a_blank_cell_and_a_line(tmp_path: Path) -> None:
    path = save(tmp_path, "a.txt", "one\n\n  \ntwo\n")
    assert texts_of(path) == ["one", "", "  ", "two"]
    assert table_of(path)["text"].to_pylist() == ["one", None, "  ", "two"]


# CSV and TSV


def test_csv_cells_stay_as_written_and_empty_ones_are_null(tmp_path: Path) -> None:
    path = save(tmp_path, "a.csv", 'id,text,n\n007,"two\nlines",1.50\n,"a, b",\n1e3,true,NULL\n')
    assert table_of(path).to_pydict() == {
        "id": ["007", None, "1e3"],
        "text": ["two\nlines", "a, b", "true"],
        "n": ["1.50", None, "NULL"],
    }


def test_tsv_has_no_quoting(tmp_path: Path) -> None:
    path = save(tmp_path, "a.tsv", 'text\tn\n"unclosed\t1\n"a" b\t2\nc, d\t"3"\n')
    assert table_of(path).to_pydict() == {"text": ['"unclosed', '"a" b', "c, d"], "n": ["1", "2", '"3"']}


def test_given_columns_read_a_file_without_header_cut_longer_rows_and_parse_numbers(tmp_path: Path) -> None:
    path = save(tmp_path, "sts.csv", 'g\t4.5\tA "man".\tA man.\ng\t\tB\tC\textra\tmore\n')
    columns = {"g": pa.string(), "score": pa.float64(), "a": pa.string(), "b": pa.string()}
    table = table_of(path, columns=columns)
    assert table.to_pydict() == {"g": ["g", "g"], "score": [4.5, None], "a": ['A "man".', "B"], "b": ["A man.", "C"]}
    short = save(tmp_path, "short.csv", "g\t4.5\tA\n")
    with pytest.raises(InputError, match=r"short\.csv, line 1: 3 cells, expected 4"):
        table_of(short, columns=columns)
    words = save(tmp_path, "words.csv", "g\tmuch\tA\tB\n")
    with pytest.raises(InputError, match=r"words\.csv: column 'score' is not double"):
        table_of(words, columns=columns)


CELL = st.text(max_size=8) | st.sampled_from(["a,b", '"', "two\nlines", "cr\rlf\r\n", " ", "007", ""])


@settings(deadline=None)
@given(rows=st.lists(st.tuples(CELL, CELL), max_size=8))
def test_any_table_comes_back_from_csv(rows: list[tuple[str, str]]) -> None:
    out = io.StringIO(newline="")
    csv.writer(out).writerows([("text", "more"), *rows])
    with TemporaryDirectory() as folder:
        table = table_of(save(Path(folder), "a.csv", out.getvalue()))
        assert texts_of(Path(folder) / "a.csv") == [row[0] for row in rows]
    assert table.to_pydict() == {"text": [r[0] or None for r in rows], "more": [r[1] or None for r in rows]}


# JSONL


@pytest.mark.parametrize(
    ("cells", "kind", "read"),
    [
        ([1, None, -(2**63)], pa.int64(), [1, None, -(2**63)]),
        ([1, 0.5], pa.float64(), [1.0, 0.5]),
        ([True, None, False], pa.bool_(), [True, None, False]),
        (["a", None, ""], pa.string(), ["a", None, ""]),
        ([None, None], pa.null(), [None, None]),
        ([1, "a", None], pa.string(), ["1", '"a"', None]),
        ([True, 1], pa.string(), ["true", "1"]),
        ([[1, 2], {"k": None}], pa.string(), ["[1, 2]", '{"k": null}']),
        ([2**63, 1], pa.string(), [str(2**63), "1"]),
        ([10**40, 0.5, "x"], pa.string(), [str(10**40), "0.5", '"x"']),
        ([2**53 + 1, 0.5], pa.string(), [str(2**53 + 1), "0.5"]),
        (["ok", "half \ud800"], pa.string(), ["ok", None]),
        ([["half \ud800"], 1], pa.string(), ['["half \\ud800"]', "1"]),
    ],
)
def test_a_jsonl_column_has_the_narrowest_type_that_loses_nothing(
    cells: list[Any], kind: pa.DataType, read: list[Any], tmp_path: Path
) -> None:
    table = table_of(save(tmp_path, "a.jsonl", "".join(json.dumps({"x": c}) + "\n" for c in cells)))
    assert table.schema.field("x").type == kind
    assert table["x"].to_pylist() == read


def test_jsonl_lines_may_lack_keys_and_texts_come_as_they_are(tmp_path: Path) -> None:
    path = save(tmp_path, "a.jsonl", '{"text": "a"}\n\n{"n": 1, "text": 5}\n  \n{"n": 2}\n{"text": "\\ud800"}\n')
    assert texts_of(path) == ["a", 5, None, "\ud800"]
    assert table_of(path)["n"].to_pylist() == [None, 1, 2, None]


EXACT = st.integers(-(2**53), 2**53) | st.integers(2**63, 2**70)
VALUE = st.none() | st.booleans() | EXACT | st.floats(allow_nan=False) | st.text(max_size=5)
JSON = VALUE | st.lists(VALUE, max_size=3) | st.dictionaries(st.text(max_size=3), VALUE, max_size=2)


@settings(deadline=None)
@given(cells=st.lists(JSON, min_size=1, max_size=6))
def test_any_json_values_come_back_from_jsonl(cells: list[Any]) -> None:
    with TemporaryDirectory() as folder:
        path = save(Path(folder), "a.jsonl", "".join(json.dumps({"x": c}) + "\n" for c in cells))
        reader, table = open_file(path), table_of(path)
        assert texts_of(path, "x") == cells
    read = table["x"].to_pylist()
    as_json = reader.json_kinds["x"] == "json"
    assert [json.loads(c) if as_json and c is not None else c for c in read] == cells


# Parquet


@pytest.mark.parametrize("kind", ["string", "large_string", "dictionary", "string_view"])
def test_parquet_text_of_any_string_type_is_read(kind: str, tmp_path: Path) -> None:
    cells = pa.array(["a", None, "b", "a"])
    column = cells.dictionary_encode() if kind == "dictionary" else cells.cast(getattr(pa, kind)())
    pq.write_table(pa.table({"text": column, "n": [1, 2, 3, 4]}), tmp_path / "a.parquet", row_group_size=2)
    assert texts_of(tmp_path / "a.parquet") == ["a", None, "b", "a"]
    assert table_of(tmp_path / "a.parquet")["n"].to_pylist() == [1, 2, 3, 4]


@pytest.mark.parametrize("column", [pa.array([1]), pa.array([b"x"]), pa.array([["a"]])])
def test_parquet_columns_that_are_not_text_are_refused_as_text(column: pa.Array, tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": column}), tmp_path / "a.parquet")
    with pytest.raises(InputError, match=r"a\.parquet: column 'text' is (int64|binary|list.*), expected text"):
        texts_of(tmp_path / "a.parquet")


# Broken files


@each_format
@each_form
def test_bytes_that_are_not_utf8_are_named_by_line(kind: str, gz: str, tmp_path: Path) -> None:
    line = b'{"text": "caf\xe9"}' if kind == ".jsonl" else b"caf\xe9"
    good = CONTENTS[kind].encode()
    path = save(tmp_path, f"a{kind}{gz}", good + line + b"\n")
    assert f"line {len(good.splitlines()) + 1}: not UTF-8 (byte 0xe9)" in refusal(path)


def test_utf16_is_refused_at_its_first_line(tmp_path: Path) -> None:
    assert "line 1: not UTF-8 (byte 0xff)" in refusal(save(tmp_path, "a.txt", "text\n".encode("utf-16")))


@each_format
def test_gzip_that_is_cut_or_fails_its_checksum_or_is_none_is_refused(kind: str, tmp_path: Path) -> None:
    path = save(tmp_path, f"a{kind}.gz", CONTENTS[kind])
    whole = path.read_bytes()
    for data in (whole[:-9], whole[:-1], whole[: len(whole) // 2], whole[:-8] + bytes(8), b"not gzip at all"):
        path.write_bytes(data)
        assert "corrupt gzip data after line" in refusal(path)


@each_format
@pytest.mark.parametrize("place", [0.3, 0.5, 0.8])
def test_a_byte_flipped_in_gzip_never_passes(kind: str, place: float, tmp_path: Path) -> None:
    """It may read as other text first: as a line that is not UTF-8, or too wide; the checksum stands behind that."""
    path = save(tmp_path, f"a{kind}.gz", CONTENTS[kind])
    data = bytearray(path.read_bytes())
    data[int(len(data) * place)] ^= 0xFF
    path.write_bytes(data)
    refusal(path)


@pytest.mark.parametrize("damage", ["empty", "text", "cut", "page"])
def test_a_damaged_parquet_file_is_refused(damage: str, tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": [f"sentence {i}" for i in range(5000)]}), path, compression="zstd")
    whole = path.read_bytes()
    page = whole[:100] + b"\xff" * 200 + whole[300:]
    path.write_bytes({"empty": b"", "text": b"just text", "cut": whole[: len(whole) // 2], "page": page}[damage])
    assert "not a readable parquet file" in refusal(path)


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("a.csv", "a,b\n1,2\n3\n", "line 3: 1 cells, expected 2"),
        ("a.csv", "a,b\n1,2\n\n3,4,5\n", "line 4: 3 cells, expected 2"),
        ("a.csv", 'a,b\n"x\ny\nz",1\n5\n', "line 5: 1 cells, expected 2"),
        ("a.tsv", "a\tb\n1\t2\t3\n", "line 2: 3 cells, expected 2"),
        ("a.csv", 'a,b\n1,"never closed\n', "line 2: unexpected end of data"),
        ("a.csv", 'a,b\n1,"x"y\n', "line 2: "),
        ("a.csv", "a,b,a\n1,2,3\n", "must name each column once, it reads ['a', 'b', 'a']"),
        ("a.tsv", "a\t\n1\t2\n", "must name each column once"),
        ("a.jsonl", '{"a": 1}\n{"a": \n', "line 2: not JSON"),
        ("a.jsonl", '\n\n["a"]\n', "line 3: expected an object"),
        ("a.jsonl", '"a"\n', "line 1: expected an object"),
        ("a.jsonl", '{"a": 1}\n' + "[" * 100_000 + "\n", "line 2: "),
        ("a.jsonl", '{"a": 1}\n{"half \\ud800": 1}\n', "line 2: "),
        ("a.docx", "a", "expected a file of .txt, .jsonl, .csv, .tsv, .parquet"),
        ("a.parquet.gz", "a", "expected a file of"),
        ("a", "a", "expected a file of"),
    ],
)
def test_a_broken_file_is_named_with_its_line(name: str, text: str, says: str, tmp_path: Path) -> None:
    assert says in refusal(save(tmp_path, name, text))


@each_format
def test_a_file_that_cannot_be_read_is_named(kind: str, tmp_path: Path) -> None:
    assert "cannot be read: No such file" in refusal(tmp_path / f"gone{kind}")
