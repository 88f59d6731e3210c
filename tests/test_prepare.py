"""The pass over the corpus: distinct sentences in order of first appearance, each line's row or why it has none, pairs.

Regimes: a shuffled CSV with ids, labels, duplicates and null cells that must join back exactly; single texts, pairs and
triplets; cells that are null, blank, not text, not Unicode or without tokens; more lines than a batch, more sentences
than a shard, more pairs than a chunk; columns called like our own. Arrays are read back with plain zarr.
"""

from __future__ import annotations

import csv
import io
import json
import random
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st

from permafrost.extractor.corpus import open_corpus
from permafrost.extractor.errors import InputError
from permafrost.extractor.prepare import SAMPLE_ROWS, Prepared, prepare, select
from permafrost.extractor.store import PAIR_CHUNK, Layout, create_metadata
from permafrost.extractor.tables import Sentence, read_sample, read_sentences

Columns = dict[str, list[Any]]
SHARD = 256


class Pass:
    """A file, prepared into a folder, and what lies there."""

    def __init__(self, folder: Path, name: str, text: str, shard_rows: int = SHARD, **options: Any) -> None:
        source = folder / name
        source.write_text(text, encoding="utf-8", newline="")
        self.store = folder / "store"
        self.store.mkdir(exist_ok=True)
        self.corpus = open_corpus(str(source))
        has_tokens = options.pop("has_tokens", lambda text: True)
        self.selection = select(self.corpus, options.pop("column", ()), **options)
        self.found: Prepared = prepare(self.corpus, self.selection, shard_rows, self.store, has_tokens)
        self.lines: Columns = pq.read_table(self.store / "lines.parquet").to_pydict()
        self.texts: list[str] = pq.read_table(self.store / "sentences.parquet")["text"].to_pylist()

    def arrays(self) -> zarr.Group:
        """The pair arrays, by any Zarr reader's way."""
        layout = Layout(self.found.rows, ("0",), 1, "float32", SHARD, "none", ("resid_post",))
        create_metadata(self.store, layout, {}, self.found.flat)
        return zarr.open_group(self.store, mode="r")


def as_csv(*rows: tuple[Any, ...]) -> str:
    out = io.StringIO(newline="")
    csv.writer(out).writerows(rows)
    return out.getvalue()


def values(array: Any) -> list[Any]:
    return list(array[:].tolist())


# Every line comes back


def check_join(done: Pass, rows: list[tuple[str, str, str]]) -> None:
    """Each line, from the store's files alone: its id and label as they were, its text by its row."""
    first_seen = list(dict.fromkeys(text for _, _, text in rows if text.strip()))
    assert done.texts == first_seen and done.found.rows == len(first_seen)
    assert done.lines["line"] == list(range(len(rows)))
    assert done.lines["id"] == [uid or None for uid, _, _ in rows]
    assert done.lines["label"] == [label or None for _, label, _ in rows]
    joined = [None if row is None else done.texts[row] for row in done.lines["row"]]
    assert joined == [text if text.strip() else None for _, _, text in rows]
    assert done.lines["skipped"] == [None if text.strip() else "blank" for _, _, text in rows]
    assert done.found.lines == len(rows)
    assert done.found.duplicates == sum(bool(text.strip()) for _, _, text in rows) - len(first_seen)


def test_a_shuffled_csv_with_ids_labels_duplicates_and_null_cells_joins_back_exactly(tmp_path: Path) -> None:
    """20,000 lines: two batches of the reader, many shards."""
    rng = random.Random(0)
    texts = [f'Sentence {i}, "quoted"\nand broken.' if i % 7 == 0 else f"Sentence {i}." for i in range(3000)]
    rows = [(f"{i:06}", rng.choice(["yes", "no", ""]), rng.choice([*texts, "", " "])) for i in range(20_000)]
    rng.shuffle(rows)
    check_join(Pass(tmp_path, "a.csv", as_csv(("uid", "label", "text"), *rows), id="uid"), rows)


CELL = st.sampled_from(["", " ", "a", "b", "A", "a ", "é", "two\nlines", '"']) | st.text(max_size=4)


@settings(deadline=None, max_examples=40)
@given(rows=st.lists(st.tuples(CELL, CELL, CELL), min_size=1, max_size=12))
def test_any_csv_joins_back_exactly(rows: list[tuple[str, str, str]]) -> None:
    rows = [("x", "y", "always one"), *rows]
    with TemporaryDirectory() as folder:
        check_join(Pass(Path(folder), "a.csv", as_csv(("uid", "label", "text"), *rows), id="uid"), rows)


def test_cells_that_give_no_row_are_counted_with_why(tmp_path: Path) -> None:
    cells = ["good", None, "", " \t", 5, ["x"], True, "half \ud800", "!?", "...", "猫"]
    text = "".join(json.dumps({"text": cell}) + "\n" for cell in cells) + "{}\n"
    asked: list[str] = []

    def has_tokens(text: str) -> bool:
        asked.append(text)
        return text != "!?"

    done = Pass(tmp_path, "a.jsonl", text, has_tokens=has_tokens)
    why = [None, "null", "blank", "blank", "not text", "not text", "not text", "not unicode", "no tokens", None, None]
    assert done.lines["skipped"] == [*why, "null"]
    assert done.lines["row"] == [0, *[None] * 8, 1, 2, None]
    assert done.texts == ["good", "...", "猫"]
    assert done.found.skipped == {"null": 2, "blank": 2, "not text": 3, "not unicode": 1, "no tokens": 1}
    assert asked == ["!?", "..."]


def test_sentences_are_numbered_by_first_appearance_and_told_apart_by_every_character(tmp_path: Path) -> None:
    done = Pass(tmp_path, "a.txt", "b\na\nb\nB\na \na\ne\u0301\né\n")
    assert done.texts == ["b", "a", "B", "a ", "e\u0301", "é"]
    assert done.lines["row"] == [0, 1, 0, 2, 3, 1, 4, 5]
    assert done.found.duplicates == 2


def test_without_dedup_each_line_has_its_own_row(tmp_path: Path) -> None:
    done = Pass(tmp_path, "a.txt", "b\na\n\nb\na\n", dedup=False)
    assert done.texts == ["b", "a", "b", "a"]
    assert done.lines["row"] == [0, 1, None, 2, 3]
    assert (done.found.rows, done.found.duplicates, done.found.lines) == (4, 0, 5)


@pytest.mark.parametrize(("limit", "rows", "lines"), [(1, 1, 1), (3, 1, 3), (4, 2, 4), (5, 2, 5), (99, 3, 6)])
def test_the_limit_counts_lines_before_deduplication(limit: int, rows: int, lines: int, tmp_path: Path) -> None:
    done = Pass(tmp_path, "a.txt", "a\na\na\nb\n\nc\n", limit=limit)
    assert (done.found.rows, done.found.lines) == (rows, lines) == (len(done.texts), len(done.lines["line"]))


def test_counting_without_a_folder_finds_the_same(tmp_path: Path) -> None:
    done = Pass(tmp_path, "a.csv", as_csv(("sentence1", "sentence2", "score"), ("a", "b", "1"), ("a", "", "2")))
    counted = prepare(done.corpus, done.selection, SHARD, None)
    assert (counted.rows, counted.lines, counted.duplicates) == (2, 2, 0)
    assert counted.skipped == done.found.skipped and counted.sample == done.found.sample


def test_a_corpus_without_a_sentence_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"a\.txt gives no sentence: 2 lines, skipped {'blank': 2}"):
        Pass(tmp_path, "a.txt", "\n \n")
    with pytest.raises(InputError, match=r"b\.csv gives no sentence: 0 lines"):
        Pass(tmp_path, "b.csv", "text,label\n")


def test_a_file_that_breaks_half_way_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="line 20002: 3 cells, expected 2"):
        Pass(tmp_path, "a.csv", "text,n\n" + "".join(f"s{i},1\n" for i in range(20_000)) + "s,1,1\n")
    assert list((tmp_path / "store").iterdir()) == []


# Columns


def test_which_columns_are_kept(tmp_path: Path) -> None:
    text = as_csv(("uid", "text", "label", "n"), ("u1", "one", "x", "1"))
    every = {"line": [0], "row": [0], "skipped": [None]}
    assert Pass(tmp_path, "a.csv", text).lines == every | {"uid": ["u1"], "label": ["x"], "n": ["1"]}
    assert Pass(tmp_path, "a.csv", text, keep=("none",)).lines == every
    assert Pass(tmp_path, "a.csv", text, keep=("none",), id="uid").lines == every | {"id": ["u1"]}
    assert [*Pass(tmp_path, "a.csv", text, keep=("n", "text")).lines] == ["line", "row", "skipped", "n", "text"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"keep": ("nope",)}, "--keep: .* has no column 'nope'; it has text, label"),
        ({"id": "nope"}, "--id: .* has no column 'nope'; it has text, label"),
        ({"fields": ("nope",)}, "--template's {}: .* has no column 'nope'; it has text, label"),
        ({"column": ("nope",)}, "has no column 'nope'; it has text, label"),
    ],
)
def test_a_missing_column_is_refused_with_the_columns_there_are(
    options: dict[str, Any], says: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=says):
        Pass(tmp_path, "a.csv", as_csv(("text", "label"), ("one", "x")), **options)


@pytest.mark.parametrize("taken", ["line", "row", "skipped", "id", "line line_", "line_ line", "row row_ row__"])
def test_a_kept_column_that_is_called_like_ours_keeps_its_values_under_another_name(taken: str, tmp_path: Path) -> None:
    names = taken.split()
    cells = tuple(f"mine {i}" for i in range(len(names)))
    done = Pass(tmp_path, "a.csv", as_csv(("uid", "text", *names), ("u1", "one", *cells)), id="uid")
    columns = pq.read_schema(done.store / "lines.parquet").names
    assert len(set(columns)) == len(columns) == 4 + len(names)
    assert (done.lines["line"], done.lines["row"], done.lines["skipped"]) == ([0], [0], [None])
    assert done.lines["id"] == ["u1"]
    theirs = [done.lines[name] for name in columns[4:]]
    assert theirs == [[cell] for cell in cells]


def test_kept_columns_of_any_type_travel_as_they_are(tmp_path: Path) -> None:
    records = [{"text": "a", "n": 1, "x": 0.5, "tags": ["p"], "none": None}, {"text": "b", "n": None, "ok": True}]
    done = Pass(tmp_path, "a.jsonl", "".join(json.dumps(r) + "\n" for r in records))
    kept = {name: done.lines[name] for name in ("n", "x", "tags", "none", "ok")}
    assert kept == {"n": [1, None], "x": [0.5, None], "tags": ['["p"]', None], "none": [None] * 2, "ok": [None, True]}


def test_template_columns_make_sentences_distinct_and_travel_with_them(tmp_path: Path) -> None:
    rows = [("a", "x"), ("a", "y"), ("a", "x"), ("b", ""), ("b", "x")]
    done = Pass(tmp_path, "a.csv", as_csv(("text", "topic"), *rows), fields=("topic",))
    assert read_sentences(done.store, 0) == (["a", "a", "b"], [("x",), ("y",), ("x",)])
    assert done.lines["row"] == [0, 1, 0, None, 2]
    assert done.lines["skipped"] == [None, None, None, "null", None]


def test_text_and_template_columns_never_run_into_each_other(tmp_path: Path) -> None:
    """Whatever joins them for hashing may stand in a text."""
    for separator in ("\x1f", "\x1e", "\x00", "\t", "|", ""):
        rows = [(f"a{separator}b", "c"), ("a", f"b{separator}c")]
        text = "".join(json.dumps({"text": t, "topic": f}) + "\n" for t, f in rows)
        assert Pass(tmp_path, "a.jsonl", text, fields=("topic",)).found.rows == 2


# Shards and the sample


@pytest.mark.parametrize("rows", [1, 255, 256, 257, 700])
def test_row_groups_of_the_sentences_are_shards(rows: int, tmp_path: Path) -> None:
    texts = [f"sentence {i}" for i in range(rows)]
    done = Pass(tmp_path, "a.txt", "\n".join(t for t in texts for _ in range(2)))
    metadata = pq.read_metadata(done.store / "sentences.parquet")
    sizes = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
    assert sizes == [min(SHARD, rows - start) for start in range(0, rows, SHARD)]
    assert [t for shard in range(len(sizes)) for t in read_sentences(done.store, shard)[0]] == texts
    wanted = sorted({0, rows // 2, rows - 1})
    assert read_sample(done.store, wanted, SHARD) == [Sentence(i, texts[i]) for i in wanted]


@pytest.mark.parametrize("rows", [1, 5, 30_000])
def test_the_sample_holds_the_longest_and_is_spread_over_all_rows(rows: int, tmp_path: Path) -> None:
    texts = [f"sentence {i:05}" for i in range(rows)]
    longest = rows * 2 // 3
    texts[longest] += " and much longer than every other one"
    sample = Pass(tmp_path, "a.txt", "\n".join(texts)).found.sample
    assert sample[0] == Sentence(longest, texts[longest])
    assert len({s.row for s in sample}) == len(sample) <= 2 * SAMPLE_ROWS + 1
    assert all(s.text == texts[s.row] for s in sample)
    spread = sorted(s.row for s in sample)
    assert len(sample) >= min(rows, SAMPLE_ROWS)
    assert max(np.diff([-1, *spread, rows])) <= max(1, 2 * rows / SAMPLE_ROWS)


# Pairs and triplets


def test_stsb_pairs_have_scores_from_0_to_1_and_count_as_one_record(tmp_path: Path) -> None:
    lines = [("5.000", "a", "b"), ("1.250", "b", "c"), ("0", "a", "a"), ("2.5", "d", "e")]
    path = tmp_path / "stsb" / "sts-dev.csv"
    path.parent.mkdir()
    path.write_text("".join(f"g\tf\t2012\t{i}\t" + "\t".join(line) + "\n" for i, line in enumerate(lines)))
    corpus = open_corpus("stsb", "dev", str(tmp_path))
    store = tmp_path / "store"
    store.mkdir()
    found = prepare(corpus, select(corpus, (), limit=3), SHARD, store)
    assert (found.rows, found.lines, found.duplicates) == (3, 3, 3)
    create_metadata(store, Layout(3, ("0",), 1, "float32", SHARD, "none", ("resid_post",)), {}, found.flat)
    pairs: Any = zarr.open_group(store, mode="r")["pairs"]
    assert (values(pairs["left"]), values(pairs["right"]), values(pairs["score"])) == (
        [0, 1, 0],
        [1, 2, 0],
        [1, 0.25, 0],
    )
    assert pairs["score"].attrs["divisor"] == 5.0
    assert pq.read_table(store / "lines.parquet")["score"].to_pylist() == [5.0, 1.25, 0.0]


def test_a_pair_with_a_side_missing_is_skipped_whole(tmp_path: Path) -> None:
    rows = [("a", "b", "1"), ("c", "", "2"), ("", "d", "3"), ("b", "a", ""), ("e", "a", "0.5")]
    done = Pass(tmp_path, "a.csv", as_csv(("sentence1", "sentence2", "score"), *rows))
    assert done.texts == ["a", "b", "e"]
    assert done.lines["left"] == [0, None, None, 1, 2] and done.lines["right"] == [1, None, None, 0, 0]
    assert done.lines["skipped"] == [None, "blank", "blank", None, None]
    assert done.found.skipped == {"blank": 2}
    pairs: Any = done.arrays()["pairs"]
    assert values(pairs["left"]) == [0, 1, 2] and values(pairs["right"]) == [1, 0, 0]
    assert np.array_equal(pairs["score"][:], np.array([1, np.nan, 0.5], np.float32), equal_nan=True)


@pytest.mark.parametrize(
    ("labels", "codes", "names"),
    [
        (["neutral", "contradiction", "", "entailment"], [1, 2, -1, 0], ["entailment", "neutral", "contradiction"]),
        (["contradiction"] * 2, [2, 2], ["entailment", "neutral", "contradiction"]),
        (["yes", "no", "", "yes"], [0, 1, -1, 0], ["yes", "no"]),
        (["1", "0", "1"], [0, 1, 0], ["1", "0"]),
    ],
)
def test_labels_are_codes_with_their_names(
    labels: list[str], codes: list[int], names: list[str], tmp_path: Path
) -> None:
    rows = [(f"p{i}", f"h{i}", label) for i, label in enumerate(labels)]
    done = Pass(tmp_path, "a.csv", as_csv(("premise", "hypothesis", "label"), *rows))
    label: Any = done.arrays()["pairs/label"]
    assert values(label) == codes and label.attrs["names"] == names
    assert done.lines["label"] == [name or None for name in labels]


def test_a_score_that_is_no_number_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="the score 'high' is not a number"):
        Pass(tmp_path, "a.csv", as_csv(("sentence1", "sentence2", "score"), ("a", "b", "high")))


def test_triplets_have_three_rows_each(tmp_path: Path) -> None:
    rows = [("a", "b", "c"), ("a", "", "d"), ("c", "a", "e")]
    done = Pass(tmp_path, "a.csv", as_csv(("x", "y", "z"), *rows), column=("x", "y", "z"))
    triplets: Any = done.arrays()["triplets"]
    assert {name: values(triplets[name]) for name in ("anchor", "positive", "negative")} == {
        "anchor": [0, 2],
        "positive": [1, 0],
        "negative": [2, 3],
    }
    assert sorted(triplets.array_keys()) == ["anchor", "negative", "positive"]
    assert done.lines["anchor"] == [0, None, 2] and done.lines["negative"] == [2, None, 3]


@pytest.mark.parametrize("pairs", [PAIR_CHUNK, PAIR_CHUNK + 1])
def test_more_pairs_than_a_chunk_span_chunks(pairs: int, tmp_path: Path) -> None:
    left, right = np.arange(pairs) % 97, np.arange(pairs) % 89
    text = "".join(f"s{a},s{b},{a % 5}\n" for a, b in zip(left, right, strict=True))
    done = Pass(tmp_path, "a.csv", "sentence1,sentence2,score\n" + text)
    files = sorted(p.name for p in (done.store / "pairs" / "left" / "c").iterdir())
    assert files == [str(i) for i in range(-(-pairs // PAIR_CHUNK))]
    row_of = {text: row for row, text in enumerate(done.texts)}
    group: Any = done.arrays()["pairs"]
    assert values(group["left"]) == [row_of[f"s{a}"] for a in left] == done.lines["left"]
    assert values(group["right"]) == [row_of[f"s{b}"] for b in right] == done.lines["right"]
    assert np.array_equal(group["score"][:], left % 5)
