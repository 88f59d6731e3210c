"""Where text comes from: one file, a folder, a glob, several files with different columns, the named sets from a data
folder (small files of the real layout, made here) and sets of the `datasets` library (from a local folder, offline).

Also which columns are taken for the text, what the fingerprint follows, and what is said about names that do not exist.
"""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from permafrost.extractor.corpus import KNOWN_COLUMNS, NAMED, Corpus, open_corpus
from permafrost.extractor.errors import InputError, PermafrostError, UsageError


def save(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(text.encode(), mtime=0) if path.suffix == ".gz" else text.encode())
    return path


def columns_of(corpus: Corpus, limit: int | None = None) -> dict[str, list[Any]]:
    """The whole corpus; also checks that each batch's text cells are the table's."""
    texts = corpus.text_columns(())
    tables = []
    for cells, table in corpus.batches(texts, limit):
        assert table.schema == corpus.schema
        assert all(table[name].to_pylist() == column for name, column in zip(texts, cells, strict=True))
        tables.append(table)
    whole: dict[str, list[Any]] = pa.concat_tables(tables).to_pydict()
    return whole


def refusal(*arguments: Any, kind: type[PermafrostError] = InputError) -> str:
    with pytest.raises(kind) as error:
        columns_of(open_corpus(*arguments))
    return str(error.value)


# Files, folders, globs


def test_a_folder_gives_its_files_in_order_with_a_column_that_names_them(tmp_path: Path) -> None:
    save(tmp_path / "b.txt", "from b\n")
    save(tmp_path / "a.csv", "text,label\nfrom a,yes\n")
    save(tmp_path / "deeper" / "c.jsonl.gz", '{"text": "from c", "n": 3}\n')
    save(tmp_path / "README.md", "not text of ours")
    save(tmp_path / ".hidden.txt", "neither")
    pq.write_table(pa.table({"text": ["from d"], "n": [4]}), tmp_path / "d.parquet")
    assert columns_of(open_corpus(str(tmp_path))) == {
        "text": ["from a", "from b", "from d", "from c"],
        "label": ["yes", None, None, None],
        "n": [None, None, 4, 3],
        "file": ["a.csv", "b.txt", "d.parquet", "c.jsonl.gz"],
    }


def test_a_glob_gives_the_files_it_matches(tmp_path: Path) -> None:
    for name in ("x1.txt", "x2.txt", "y.txt", "sub/x3.txt"):
        save(tmp_path / name, f"from {name}\n")
    assert columns_of(open_corpus(f"{tmp_path}/x*.txt"))["file"] == ["x1.txt", "x2.txt"]
    assert sorted(columns_of(open_corpus(f"{tmp_path}/**/x*.txt"))["file"]) == ["x1.txt", "x2.txt", "x3.txt"]
    assert columns_of(open_corpus(f"{tmp_path}/y*")) == {"text": ["from y.txt"]}


def test_a_file_whose_name_looks_like_a_glob_is_that_file(tmp_path: Path) -> None:
    assert columns_of(open_corpus(str(save(tmp_path / "a[1].txt", "one\n")))) == {"text": ["one"]}


def test_a_column_of_the_files_own_called_file_stays(tmp_path: Path) -> None:
    save(tmp_path / "a.csv", "text,file\none,mine\n")
    save(tmp_path / "b.csv", "text\ntwo\n")
    corpus = open_corpus(str(tmp_path))
    assert columns_of(corpus)["file"] == ["mine", "b.csv"]


@pytest.mark.parametrize(
    ("split", "files"),
    [("train", ["my-train.txt", "train-00001.txt"]), ("dev", ["dev.txt"]), ("my", ["my-train.txt"])],
)
def test_a_split_of_a_folder_is_the_files_named_after_it(split: str, files: list[str], tmp_path: Path) -> None:
    for name in ("train-00001.txt", "my-train.txt", "dev.txt", "trainer.txt", "restrain.txt"):
        save(tmp_path / name, f"{name}\n")
    corpus = open_corpus(str(tmp_path), split)
    assert columns_of(corpus)["text"] == files
    assert corpus.split == split


def test_numbers_of_several_files_widen_and_what_cannot_go_together_is_refused(tmp_path: Path) -> None:
    save(tmp_path / "a.jsonl", '{"text": "a", "n": 1}\n')
    save(tmp_path / "b.jsonl", '{"text": "b", "n": 0.5}\n')
    save(tmp_path / "c.jsonl", '{"text": "c", "n": null}\n')
    assert columns_of(open_corpus(str(tmp_path)))["n"] == [1.0, 0.5, None]
    save(tmp_path / "d.jsonl", '{"text": "d", "n": "four"}\n')
    assert "the files' columns do not go together" in refusal(str(tmp_path))


def test_an_integer_that_another_files_floats_cannot_hold_is_refused_by_file(tmp_path: Path) -> None:
    save(tmp_path / "a.jsonl", f'{{"text": "a", "n": {2**53 + 1}}}\n')
    save(tmp_path / "b.jsonl", '{"text": "b", "n": 0.5}\n')
    assert "a.jsonl" in refusal(str(tmp_path))


@pytest.mark.parametrize("name", ["b.csv", "b.tsv", "b.parquet"])
def test_a_file_without_the_text_column_is_named_with_the_columns_it_has(name: str, tmp_path: Path) -> None:
    save(tmp_path / "a.csv", "text,label\none,1\n")
    if name == "b.parquet":
        pq.write_table(pa.table({"other": ["two"], "label": ["2"]}), tmp_path / name)
    else:
        save(tmp_path / name, "other,label\ntwo,2\n".replace(",", "\t" if name == "b.tsv" else ","))
    said = refusal(str(tmp_path))
    assert name in said and "'text'" in said and "other, label" in said


def test_the_limit_ends_the_stream_in_the_middle_of_a_batch_or_file(tmp_path: Path) -> None:
    for name in "abc":
        save(tmp_path / f"{name}.txt", "".join(f"{name}{i}\n" for i in range(3)))
    corpus = open_corpus(str(tmp_path))
    for limit in range(1, 12):
        assert columns_of(corpus, limit)["text"] == [f"{n}{i}" for n in "abc" for i in range(3)][:limit]


def test_the_limit_spares_what_lies_behind_it(tmp_path: Path) -> None:
    save(tmp_path / "a.txt", "one\ntwo\n")
    (tmp_path / "b.txt").write_bytes(b"\xff\n")
    assert columns_of(open_corpus(str(tmp_path)), 2)["text"] == ["one", "two"]


# Which column is the text


@pytest.mark.parametrize("known", KNOWN_COLUMNS)
def test_well_known_columns_are_found_among_others(known: tuple[str, ...], tmp_path: Path) -> None:
    names = ["id", *reversed(known), "label"]
    corpus = open_corpus(str(save(tmp_path / "a.csv", ",".join(names) + "\n")))
    assert corpus.text_columns(()) == known


def test_the_only_column_is_the_text_and_columns_asked_for_come_in_that_order(tmp_path: Path) -> None:
    assert open_corpus(str(save(tmp_path / "a.csv", "words\n"))).text_columns(()) == ("words",)
    corpus = open_corpus(str(save(tmp_path / "b.csv", "text,x,y\n")))
    assert corpus.text_columns(("y", "x")) == ("y", "x")
    with pytest.raises(InputError, match="has no column 'z'; it has text, x, y"):
        corpus.text_columns(("x", "z"))
    with pytest.raises(InputError, match=r"which column is the text.*--column; it has x, y"):
        open_corpus(str(save(tmp_path / "c.csv", "x,y\n"))).text_columns(())


@pytest.mark.parametrize("name", ["a.csv", "a.tsv", "a.jsonl", "a.csv.gz"])
def test_an_empty_file_is_called_empty(name: str, tmp_path: Path) -> None:
    said = refusal(str(save(tmp_path / name, "")))
    assert "empty" in said.replace(str(tmp_path), "")


# Fingerprints


def test_the_fingerprint_follows_the_contents_not_the_place(tmp_path: Path) -> None:
    def made(path: str, text: str) -> str:
        return open_corpus(str(save(tmp_path / path, text))).fingerprint

    same = made("a/x.txt", "one\n")
    assert made("b/other.txt", "one\n") == same
    assert made("c/x.txt", "two\n") != same
    one, two = save(tmp_path / "d" / "1.txt", "one\n"), save(tmp_path / "d" / "2.txt", "two\n")
    both = open_corpus(str(tmp_path / "d")).fingerprint
    one.write_text("on", encoding="utf-8")
    two.write_text("e\ntwo\n", encoding="utf-8")
    assert open_corpus(str(tmp_path / "d")).fingerprint != both


# Named sets from a data folder


@pytest.fixture
def data_dir(tmp_path: Path) -> str:
    """The named sets as files, laid out as on a machine without the hub."""
    data = tmp_path / "data"
    save(
        data / "stsb" / "sts-dev.csv",
        'main\tMSRvid\t2012test\t0001\t5.000\tA "man" dances.\tA man is dancing.\n'
        "main\tMSRvid\t2012test\t0002\t1.250\tA dog.\tA cat.\tsource\tmore\n",
    )
    save(data / "stsb" / "sts-train.csv", "main\tx\t2012\t0\t2.5\ta\tb\n")
    save(data / "genericskb" / "genericskb-50k.tsv", "cat\tCats sleep.\t1.0\ndog\tDogs bark.\t0.75\n")
    save(data / "genericskb" / "genericskb-additional-10k.tsv", "fish\tFish swim.\t0.5\n")
    save(data / "snli" / "snli-train-100k.tsv.gz", 'label\tpremise\thypothesis\nneutral\tA "man".\tTall.\n')
    save(data / "snli" / "triplets-33k.csv.gz", 'sent0,sent1,hard_neg\n"A, b.",c,d\n')
    return str(data)


@pytest.mark.parametrize(
    ("name", "split", "texts", "first"),
    [
        ("stsb", "dev", ("sentence1", "sentence2"), {"score": 5.0, "sentence1": 'A "man" dances.', "id": "0001"}),
        ("stsb", None, ("sentence1", "sentence2"), {"score": 2.5, "sentence2": "b", "file": "x"}),
        ("genericskb", None, ("sentence",), {"term": "cat", "sentence": "Cats sleep.", "confidence": 1.0}),
        ("genericskb", "additional", ("sentence",), {"term": "fish", "confidence": 0.5}),
        ("snli", "train", ("premise", "hypothesis"), {"label": "neutral", "premise": 'A "man".'}),
        ("snli", "triplets", ("sent0", "sent1", "hard_neg"), {"sent0": "A, b.", "hard_neg": "d"}),
    ],
)
def test_named_sets_are_read_from_the_data_folder(
    name: str, split: str | None, texts: tuple[str, ...], first: dict[str, object], data_dir: str
) -> None:
    corpus = open_corpus(name, split, data_dir)
    assert corpus.text_columns(()) == texts
    columns = columns_of(corpus)
    assert {key: columns[key][0] for key in first} == first
    assert corpus.split == (split or "train")
    assert corpus.score_divisor == (5.0 if name == "stsb" else 1.0)


def test_rows_of_stsb_with_further_cells_keep_the_first_seven(data_dir: str) -> None:
    columns = columns_of(open_corpus("stsb", "dev", data_dir))
    assert columns["sentence2"] == ["A man is dancing.", "A cat."] and columns["score"] == [5.0, 1.25]


def test_the_data_folder_may_come_from_the_environment(data_dir: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERMAFROST_DATA", data_dir)
    assert columns_of(open_corpus("genericskb"))["term"] == ["cat", "dog"]
    assert "expected" in refusal("genericskb", None, f"{data_dir}/elsewhere")


def test_the_sample_is_built_in() -> None:
    texts = columns_of(open_corpus("sample"))["text"]
    assert len(texts) == len(set(texts)) == 600


@pytest.mark.parametrize(
    ("name", "split", "says"),
    [
        ("stsb", "nope", "stsb has no split 'nope'; it has train, dev, test"),
        ("stsb", "test", "sts-test.csv; put the file there, or leave --data-dir away"),
        ("sample", "dev", "sample has no split 'dev'; it has train"),
        ("wikipedia", None, "unknown corpus 'wikipedia': no such file or folder, and none of the named sets (sample,"),
        ("nowhere/*.txt", None, "the pattern nowhere/*.txt holds no file of .txt"),
    ],
)
def test_names_that_do_not_exist_get_what_is_known(name: str, split: str | None, says: str, data_dir: str) -> None:
    assert says in refusal(name, split, data_dir)
    assert {"sample", "genericskb", "stsb", "snli"} == set(NAMED)


def test_empty_folders_missing_splits_and_missing_names_are_refused(tmp_path: Path) -> None:
    assert "holds no file of .txt" in refusal(str(tmp_path))
    path = save(tmp_path / "a.txt", "one\n")
    assert "split dev, holds no file" in refusal(str(tmp_path), "dev")
    assert "is one file and has no splits" in refusal(str(path), "dev", kind=UsageError)
    assert "--corpus is missing; known names are sample" in refusal("", kind=UsageError)


# The `datasets` library, on local folders


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for sets, with a cache of its own."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    return tmp_path / "sets"


def test_a_set_of_the_datasets_library_is_read_by_split_with_a_steady_fingerprint(hub: Path) -> None:
    save(hub / "train.jsonl", '{"text": "one", "n": 1}\n{"text": null, "n": 2}\n')
    save(hub / "test.jsonl", '{"text": "held out", "n": 3}\n')
    corpus = open_corpus(f"hf:{hub}")
    assert columns_of(corpus) == {"text": ["one", None], "n": [1, 2]}
    assert columns_of(corpus, 1) == {"text": ["one"], "n": [1]}
    test = open_corpus(f"hf:{hub}", "test")
    assert columns_of(test)["text"] == ["held out"]
    assert test.fingerprint != corpus.fingerprint == open_corpus(f"hf:{hub}").fingerprint
    assert "cannot be loaded (split dev)" in refusal(f"hf:{hub}", "dev")


def test_class_labels_of_the_datasets_library_come_as_names_and_none_as_null(hub: Path) -> None:
    import datasets

    text = datasets.Value("string")
    label = datasets.ClassLabel(names=["entailment", "neutral", "contradiction"])
    features = datasets.Features(premise=text, hypothesis=text, label=label)
    rows = {"premise": ["a", "b", "c"], "hypothesis": ["x", "y", "z"], "label": [2, -1, 0]}
    hub.mkdir()
    datasets.Dataset.from_dict(rows, features=features).to_parquet(str(hub / "train.parquet"))
    assert columns_of(open_corpus(f"hf:{hub}"))["label"] == ["contradiction", None, "entailment"]


def test_a_hub_out_of_reach_or_a_column_that_is_no_text_is_said_plainly(hub: Path) -> None:
    assert "nobody/nothing cannot be loaded" in refusal("hf:nobody/nothing")
    save(hub / "train.jsonl", '{"text": 1}\n')
    assert "column 'text' is int64, expected text" in refusal(f"hf:{hub}")
