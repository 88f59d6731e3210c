"""The command line as a user meets it: what is printed where, exit codes, and that bad input leaves nothing behind.

Most tests call `main` in this process, for importing torch takes two seconds in a fresh one; a few run `extract` as
the shell does, and two on a pseudo-terminal.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import pty
import shutil
import signal
import subprocess
import sys
import termios
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tiny_models
import torch
import transformers
import yaml
from conftest import Extract, write_lines

from permafrost.extractor.cli import main, permafrost

USAGE, INPUT, FAILURE, DAMAGE = 2, 3, 1, 4
LINES = ["The cat sat on the mat.", "A dog.", "The cat sat on the mat.", "Birds have feathers, and fish swim."]


@dataclass(frozen=True)
class Result:
    """How a command ended and what it printed."""

    code: int
    out: str
    err: str


Cli = Callable[..., Result]


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Cli:
    """Run `extract` in this process, in a fresh folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PERMAFROST_DATA", raising=False)

    def run(*arguments: Any, entry: Callable[[list[str]], int] = main) -> Result:
        handler = signal.getsignal(signal.SIGTERM)
        capsys.readouterr()
        try:
            code = entry([*map(str, arguments)])
        except SystemExit as end:  # argparse, after --help
            code = int(end.code or 0)
        finally:
            signal.signal(signal.SIGTERM, handler)
        return Result(code, *capsys.readouterr())

    return run


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Path:
    """A folder of corpora, models and config files, good ones and one of each kind of bad one."""
    folder = tmp_path_factory.mktemp("inputs")
    _write_corpora(folder)
    _write_models(folder, model_folder)
    (folder / "unknown-key.yaml").write_text("corpus: sample\nlayer: 3\n")
    (folder / "wrong-type.toml").write_text('corpus = "sample"\nlimit = "many"\n')
    (folder / "not-yaml.yaml").write_text("corpus: [sample\n")
    (folder / "list.yaml").write_text("- sample\n")
    (folder / "config.ini").write_text("corpus=sample\n")
    return folder


def _write_corpora(folder: Path) -> None:
    good = "".join(f"{line}\n" for line in LINES).encode()
    write_lines(folder / "good.txt", LINES)
    (folder / "table.csv").write_text("key,body,label\n1,The cat sat.,a\n2,A dog ran.,b\n")
    (folder / "ragged.csv").write_text("key,body\n1,The cat sat.\n2\n")
    (folder / "quote.csv").write_text('key,body\n1,"The cat sat.\n')
    (folder / "not.jsonl").write_text('{"text": "The cat sat."}\n{"text": \n')
    (folder / "array.jsonl").write_text('{"text": "The cat sat."}\n["A dog."]\n')
    for name in ("void.txt", "void.csv", "void.jsonl"):
        (folder / name).write_bytes(b"")
    (folder / "header.csv").write_text("text,label\n")
    (folder / "blank.txt").write_text("\n  \n\t\n")
    (folder / "nothing-readable").mkdir()
    (folder / "nothing-readable" / "notes.md").write_text("The cat sat.\n")
    (folder / "latin1.txt").write_bytes(good + "Käse\n".encode("latin-1"))
    # Past the first batch of lines, when the store's tables are already being written.
    (folder / "late.txt").write_bytes(b"".join(b"Line %d.\n" % i for i in range(17_000)) + b"\xff\n")
    packed = gzip.compress(good * 500, mtime=0)
    (folder / "cut.txt.gz").write_bytes(packed[: len(packed) // 2])
    (folder / "checksum.txt.gz").write_bytes(packed[:-8] + bytes(4) + packed[-4:])
    (folder / "plain.txt.gz").write_bytes(good)
    (folder / "cut.jsonl.gz").write_bytes(gzip.compress(b'{"text": "A dog."}\n' * 500)[:30])
    table = pa.table({"text": [f"The cat sat on mat {i}." for i in range(5000)], "number": list(range(5000))})
    pq.write_table(table, folder / "numbers.parquet")
    whole = (folder / "numbers.parquet").read_bytes()
    (folder / "garbage.parquet").write_bytes(b"The cat sat.\n" * 20)
    (folder / "cut.parquet").write_bytes(whole[: len(whole) // 2])
    (folder / "page.parquet").write_bytes(whole[:4] + bytes(len(whole) // 4) + whole[4 + len(whole) // 4 :])


def _write_models(folder: Path, model_folder: Path) -> None:
    (folder / "gpt2").symlink_to(model_folder)
    for arch in ("gpt_neox", "gptj", "falcon"):
        tiny_models.save(folder / arch, arch)
    config = transformers.T5Config(vocab_size=tiny_models.VOCAB, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2)
    model: Any = transformers.T5ForConditionalGeneration(config)
    model.save_pretrained(folder / "t5")
    tiny_models.tokenizer().save_pretrained(folder / "t5")
    for name in ("bad-config", "bad-weights", "no-config", "no-weights", "bare"):
        shutil.copytree(model_folder, folder / name)
    (folder / "bad-config" / "config.json").write_text("{")
    (folder / "bad-weights" / "model.safetensors").write_bytes(b"x" * 1000)
    (folder / "no-config" / "config.json").unlink()
    (folder / "no-weights" / "model.safetensors").unlink()
    for file in (folder / "bare").glob("tokenizer*"):
        file.unlink()


def contents(folder: Path) -> dict[str, bytes | None]:
    """Every file and folder below, with what the files hold."""
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None for p in folder.rglob("*")}


def good_flags(inputs: Path, *others: Any) -> list[Any]:
    return ["--corpus", inputs / "good.txt", "--model", inputs / "gpt2", "--out", "store", *others]


def run_json(cli: Cli, *arguments: Any) -> dict[str, Any]:
    """The JSON document that a command prints; it must be all there is on stdout."""
    result = cli(*arguments, "--json")
    assert result.code == 0, result.err
    document: dict[str, Any] = json.loads(result.out)
    return document


# Bad input. `@` stands for the folder of inputs; corpus, model and out are good where a case does not name them.

no_gpu = pytest.mark.skipif(torch.cuda.device_count() >= 4, reason="four GPUs are here")

BAD: dict[str, tuple[str, int, list[str]]] = {
    "unknown corpus": ("--corpus nowhere", INPUT, ["'nowhere'", "sample, genericskb, stsb, snli"]),
    "no corpus": ("--out store --corpus=", USAGE, ["--corpus", "sample, genericskb, stsb, snli"]),
    "hub out of reach for a corpus": ("--corpus hf:no-one/nothing", INPUT, ["no-one/nothing", "fetch", "--data-dir"]),
    "unknown file type": ("--corpus @/config.ini", INPUT, ["config.ini", ".txt, .jsonl, .csv, .tsv, .parquet"]),
    "folder without text": ("--corpus @/nothing-readable", INPUT, ["nothing-readable", ".txt"]),
    "pattern without match": ("--corpus @/*.nothing", INPUT, ["*.nothing", ".txt"]),
    "named set not in the folder": ("--corpus stsb --data-dir @", INPUT, ["stsb/sts-train.csv", "--data-dir"]),
    "unknown split of a set": ("--corpus stsb --split week --data-dir @", INPUT, ["'week'", "train, dev, test"]),
    "split of one file": ("--split dev", USAGE, ["--split dev", "good.txt"]),
    "missing column": ("--corpus @/table.csv --column text", INPUT, ["'text'", "key, body, label"]),
    "column not named": ("--corpus @/table.csv", INPUT, ["--column", "key, body, label"]),
    "four columns": ("--column a,b,c,d", USAGE, ["--column", "4"]),
    "a column twice": ("--column text,text", USAGE, ["--column", "twice"]),
    "missing id column": ("--corpus @/table.csv --column body --id no", INPUT, ["--id", "'no'", "key, body, label"]),
    "missing kept column": ("--corpus @/table.csv --column body --keep no", INPUT, ["--keep", "key, body, label"]),
    "column of numbers": ("--corpus @/numbers.parquet --column number", INPUT, ["'number'", "int64", "text"]),
    "empty text file": ("--corpus @/void.txt", INPUT, ["void.txt", "no sentence"]),
    "empty table": ("--corpus @/header.csv", INPUT, ["header.csv", "no sentence"]),
    "empty csv file": ("--corpus @/void.csv", INPUT, ["void.csv", "empty"]),
    "empty jsonl file": ("--corpus @/void.jsonl", INPUT, ["void.jsonl", "empty"]),
    "only blank lines": ("--corpus @/blank.txt", INPUT, ["blank.txt", "3 lines", "blank"]),
    "not UTF-8": ("--corpus @/latin1.txt", INPUT, ["latin1.txt", "line 5", "UTF-8", "0xe4"]),
    "not UTF-8, late": ("--corpus @/late.txt", INPUT, ["late.txt", "line 17001", "UTF-8"]),
    "cut gzip": ("--corpus @/cut.txt.gz", INPUT, ["cut.txt.gz", "corrupt gzip"]),
    "gzip with a wrong checksum": ("--corpus @/checksum.txt.gz", INPUT, ["checksum.txt.gz", "corrupt gzip"]),
    "gzip that is none": ("--corpus @/plain.txt.gz", INPUT, ["plain.txt.gz", "corrupt gzip"]),
    "cut gzip of jsonl": ("--corpus @/cut.jsonl.gz", INPUT, ["cut.jsonl.gz", "corrupt gzip"]),
    "garbage for parquet": ("--corpus @/garbage.parquet", INPUT, ["garbage.parquet", "parquet"]),
    "cut parquet": ("--corpus @/cut.parquet", INPUT, ["cut.parquet", "parquet"]),
    "parquet with a damaged page": ("--corpus @/page.parquet", INPUT, ["page.parquet", "parquet"]),
    "ragged csv": ("--corpus @/ragged.csv --column body", INPUT, ["ragged.csv, line 3", "1 cells, expected 2"]),
    "unclosed quote": ("--corpus @/quote.csv --column body", INPUT, ["quote.csv, line 2"]),
    "not json": ("--corpus @/not.jsonl", INPUT, ["not.jsonl, line 2", "JSON"]),
    "json that is no object": ("--corpus @/array.jsonl", INPUT, ["array.jsonl, line 2", "object"]),
    "unknown model": (
        "--model no-such-org/no-such-model",
        INPUT,
        ["no-such-org/no-such-model", "smollm2-135m", "fetch"],
    ),
    "model name that no hub allows": ("--model a--b/c/d", INPUT, ["a--b/c/d", "smollm2-135m"]),
    "model folder that is not there": ("--model @/nowhere", INPUT, ["nowhere", "no such folder"]),
    "model that is no folder": ("--model @/good.txt", INPUT, ["good.txt", "folder"]),
    "gguf file that is not there": ("--model @/no.gguf", INPUT, ["no.gguf", "no such file"]),
    "revision of a folder": ("--revision main", USAGE, ["--revision", "gpt2", "folder"]),
    "encoder-decoder model": ("--model @/t5", INPUT, ["t5", "encoder-decoder", "causal"]),
    "model without config": ("--model @/no-config", INPUT, ["no-config", "config.json"]),
    "model without weights": ("--model @/no-weights", INPUT, ["no-weights", "safetensors"]),
    "model without tokenizer": ("--model @/bare", INPUT, ["bare", "tokenizer"]),
    "model with a damaged config": ("--model @/bad-config", INPUT, ["bad-config", "cannot be loaded"]),
    "model with damaged weights": ("--model @/bad-weights", INPUT, ["bad-weights", "cannot be loaded"]),
    "layer out of range": ("--layers 4", USAGE, ["--layers 4", "no block 4", "0 to 3"]),
    "negative layer out of range": ("--layers -5", USAGE, ["--layers -5", "0 to 3"]),
    "range of layers out of range": ("--layers 2-7", USAGE, ["no block 7", "0 to 3"]),
    "range of layers backwards": ("--layers 3-1", USAGE, ["3-1", "backwards"]),
    "bad layer word": ("--layers 0,first", USAGE, ["'first'", "embed", "final"]),
    "no layer": ("--layers=", USAGE, ["--layers", "embed", "final"]),
    "resid_mid of gpt_neox": ("--model @/gpt_neox --site resid_mid", USAGE, ["resid_mid", "parallel"]),
    "resid_mid of gptj": ("--model @/gptj --site resid_mid", USAGE, ["resid_mid", "parallel"]),
    "resid_mid of falcon": ("--model @/falcon --site resid_mid", USAGE, ["resid_mid", "parallel"]),
    "embed inside a block": ("--layers embed --site attn_out", USAGE, ["embed", "resid_post"]),
    "unknown site": ("--site resid", USAGE, ["'resid'", "resid_post, resid_pre, resid_mid, attn_out, mlp_out"]),
    "a site twice": ("--site mlp_out,mlp_out", USAGE, ["--site", "twice"]),
    "unknown pool": ("--pool max", USAGE, ["'max'", "last", "weighted_mean"]),
    "template without text": ("--template {sentence}", USAGE, ["{text}", "eol, echo"]),
    "template with an unknown column": ("--template {text}{topic}", INPUT, ["'topic'", "text"]),
    "template longer than the tokens": ("--template eol --max-tokens 5", USAGE, ["--max-tokens 5", "no room"]),
    "more tokens than positions": ("--max-tokens 129", USAGE, ["--max-tokens", "129", "128"]),
    "no tokens": ("--max-tokens 0", USAGE, ["--max-tokens", "1 or more"]),
    "no records": ("--limit 0", USAGE, ["--limit", "1 or more"]),
    "no check": ("--check 0", USAGE, ["--check"]),
    "limit that is no number": ("--limit many", USAGE, ["--limit", "many"]),
    "unknown flag": ("--layer 3", USAGE, ["--layer", "--help"]),
    "shortened flag": ("--templ eol", USAGE, ["--templ", "--help"]),
    "shard size that is none": ("--shard-size lots", USAGE, ["--shard-size", "lots", "128MiB"]),
    "shard size too small": ("--shard-size 1KiB", USAGE, ["--shard-size", "65536"]),
    "negative GPUs": ("--gpus -1", USAGE, ["--gpus", "0 or more"]),
    "config that is not there": ("--config nowhere.yaml", USAGE, ["nowhere.yaml"]),
    "config of unknown type": ("--config @/config.ini", USAGE, ["config.ini", ".toml, .yaml"]),
    "config with an unknown key": ("--config @/unknown-key.yaml", USAGE, ["unknown-key.yaml", "'layer'", "layers"]),
    "config with a wrong type": ("--config @/wrong-type.toml", USAGE, ["limit", "'many'", "int"]),
    "config that is not YAML": ("--config @/not-yaml.yaml", USAGE, ["not-yaml.yaml"]),
    "config that is a list": ("--config @/list.yaml", USAGE, ["list.yaml", "corpus: stsb"]),
    "info of a missing store": ("info nowhere.zarr", INPUT, ["nowhere.zarr", "does not exist"]),
    "info of a folder that is no store": ("info @", INPUT, ["not a Permafrost store"]),
    "info of a file": ("info @/good.txt", INPUT, ["good.txt", "not a Permafrost store"]),
    "info of nothing": ("info", USAGE, ["STORE", "--help"]),
    "verify of a missing store": ("verify nowhere.zarr", INPUT, ["nowhere.zarr", "does not exist"]),
    "tokens with a column": ("tokens a-text --model @/gpt2 --template {text}{topic}", USAGE, ["topic", "none"]),
    "tokens of nothing": ("tokens --model @/gpt2", USAGE, ["TEXT", "--help"]),
    "tokens with a flag of other commands": ("tokens a-text --corpus sample", USAGE, ["--corpus", "--help"]),
    "fetch of an unknown model": ("fetch --model no-one/nothing", INPUT, ["no-one/nothing", "smollm2-135m"]),
    "corpora with an argument": ("corpora sample", USAGE, ["sample", "--help"]),
}


def bad_arguments(words: str, inputs: Path) -> list[str]:
    given = words.replace("@", str(inputs)).split()
    if not given[0].startswith("--"):
        return given
    defaults = {"--corpus": inputs / "good.txt", "--model": inputs / "gpt2", "--out": "store"}
    missing = [(k, str(v)) for k, v in defaults.items() if not any(g.split("=")[0] == k for g in given)]
    return [*given, *(word for pair in missing for word in pair)]


@pytest.mark.parametrize("case", BAD)
def test_bad_input_gets_a_clear_error_and_leaves_nothing(case: str, inputs: Path, cli: Cli, tmp_path: Path) -> None:
    words, code, fragments = BAD[case]
    arguments = bad_arguments(words, inputs)
    result = cli(*arguments)
    assert result.code == code, result.err
    message = "extract: " + result.err.partition("extract: ")[2]
    assert [f for f in fragments if f not in message] == [], result.err
    assert "Traceback" not in result.err
    assert "defect" not in result.err
    assert result.out == ""
    assert contents(tmp_path) == {}
    debugged = cli(*arguments, "--debug")
    assert debugged.code == code
    assert "Traceback" in debugged.err
    assert debugged.err.endswith(message)


@no_gpu
def test_more_gpus_than_there_are_is_refused(inputs: Path, cli: Cli, tmp_path: Path) -> None:
    result = cli(*good_flags(inputs, "--gpus", 4))
    assert result.code == INPUT
    assert f"this machine has {torch.cuda.device_count()}" in result.err
    assert "--gpus 0" in result.err
    assert contents(tmp_path) == {}


def test_an_out_that_is_a_file_is_left_alone(inputs: Path, cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "store").write_text("mine")
    for flags in ([], ["--overwrite"]):
        result = cli(*good_flags(inputs, *flags))
        assert result.code == INPUT
        assert "store is a file" in result.err
        assert contents(tmp_path) == {"store": b"mine"}


def test_an_out_that_holds_other_things_is_left_alone(inputs: Path, cli: Cli, tmp_path: Path) -> None:
    write_lines(tmp_path / "notes.txt", ["mine"])
    for flags in ([], ["--overwrite"]):
        result = cli(*good_flags(inputs), *flags, "--out", ".")
        assert result.code == INPUT
        assert "not a store" in result.err
        assert "notes.txt" in result.err
        assert contents(tmp_path) == {"notes.txt": b"mine\n"}


def test_an_out_with_anothers_zarr_group_is_left_alone(inputs: Path, cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "zarr.json").write_text('{"zarr_format": 3, "node_type": "group", "attributes": {}}')
    before = contents(tmp_path)
    for flags in ([], ["--overwrite"]):
        result = cli(*good_flags(inputs), *flags, "--out", ".")
        assert result.code == INPUT
        assert "not a Permafrost store" in result.err
        assert contents(tmp_path) == before


def test_a_parent_folder_that_is_a_file_is_named(inputs: Path, cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    result = cli(*good_flags(inputs), "--out", "file/store")
    assert result.code == INPUT
    assert "file/store" in result.err
    assert "Traceback" not in result.err


def test_pairs_that_break_off_late_leave_nothing(inputs: Path, cli: Cli, tmp_path: Path) -> None:
    """After 65,536 pairs a chunk of them is on the disk already; the error comes later."""
    corpus = tmp_path / "pairs.tsv"
    lines = ["sentence1\tsentence2\tscore", *(f"a {i % 9}\tb {i % 7}\t1.0" for i in range(66_000)), "a\tb\tgood"]
    write_lines(corpus, lines)
    result = cli("--corpus", corpus, "--model", inputs / "gpt2", "--out", "store")
    assert result.code == INPUT
    assert "the score 'good' is not a number" in result.err
    assert [*contents(tmp_path)] == ["pairs.tsv"]


def test_a_config_file_can_ask_for_tracebacks(inputs: Path, cli: Cli, tmp_path: Path) -> None:
    write_lines(tmp_path / "run.yaml", ["corpus: nowhere", "debug: true"])
    result = cli("--config", "run.yaml", "--model", inputs / "gpt2")
    assert result.code == INPUT
    assert "Traceback" in result.err


def test_what_the_model_refuses_does_not_block_the_same_store(inputs: Path, cli: Cli) -> None:
    """A flag that is refused late, put right, must not meet the leavings of the first try."""
    assert cli(*good_flags(inputs, "--site", "attn_out", "--layers", "embed")).code == USAGE
    assert cli(*good_flags(inputs, "--layers", "embed")).code == 0


def test_bad_input_in_a_process_of_its_own(inputs: Path, extract: Extract, tmp_path: Path) -> None:
    arguments = ["--corpus", inputs / "table.csv", "--model", inputs / "gpt2", "--out", "store", "--column", "text"]
    result = extract(*arguments)
    assert result.returncode == INPUT
    assert result.stdout == ""
    assert "key, body, label" in result.stderr
    assert result.stderr.count("\n") == 1
    assert contents(tmp_path) == {}


# Good paths.


def test_help_names_every_flag_and_command(cli: Cli) -> None:
    result = cli("--help")
    assert result.code == 0
    for word in ("--corpus", "--no-dedup", "--skip-first", "--config", "extract info STORE", "extract fetch"):
        assert word in result.out


def test_without_arguments_it_shows_help(cli: Cli) -> None:
    result = cli()
    assert result.code == USAGE
    assert "usage: extract" in result.out + result.err


@pytest.mark.parametrize("command", ["info", "verify", "tokens", "corpora", "fetch"])
def test_each_command_has_help(command: str, cli: Cli) -> None:
    result = cli(command, "--help")
    assert result.code == 0
    assert f"usage: extract {command}" in result.out


def test_permafrost_extract_is_extract(inputs: Path, cli: Cli) -> None:
    result = cli("extract", *good_flags(inputs), entry=permafrost)
    assert result.code == 0
    assert "store: complete" in result.out
    assert "already complete" in cli(*good_flags(inputs)).out


def test_permafrost_alone_shows_usage(cli: Cli) -> None:
    assert cli("--help", entry=permafrost).code == 0
    result = cli("corpora", entry=permafrost)
    assert result.code == USAGE
    assert "permafrost extract" in result.err


def test_the_summary_counts_rows_lines_and_duplicates(inputs: Path, cli: Cli) -> None:
    result = cli(*good_flags(inputs))
    assert result.code == 0
    assert "3 from 4 lines (1 duplicates; skipped: none; truncated: 0)" in result.out
    for word in ("size", "sentences/s", "tokens/s", "GB/s", "bound by", "parity"):
        assert word in result.out


def test_cells_that_are_no_text_are_counted_and_skipped(inputs: Path, cli: Cli, tmp_path: Path) -> None:
    cells = ["The cat sat.", None, "  ", "", 5, 5.5, ["a"], "\ud800", "A dog.", True, None]
    corpus = write_lines(tmp_path / "cells.jsonl", [json.dumps({"text": cell, "n": i}) for i, cell in enumerate(cells)])
    flags = ["--corpus", corpus, "--model", inputs / "gpt2", "--out", "store"]
    counts = {"null": 2, "blank": 2, "not text": 4, "not unicode": 1}
    plan = run_json(cli, *flags, "--dry-run")
    summary = run_json(cli, *flags)
    assert plan["skipped"] == summary["skipped"] == counts
    assert (summary["rows"], summary["lines"]) == (2, len(cells))
    text = cli(*flags).out
    for why, count in counts.items():
        assert f"{count} {why}" in text
    lines = pq.read_table(tmp_path / "store" / "lines.parquet").to_pydict()
    assert lines["row"] == [0, None, None, None, None, None, None, None, 1, None, None]
    assert lines["skipped"] == [
        *[None, "null", "blank", "blank", "not text", "not text"],
        *["not text", "not unicode", None, "not text", "null"],
    ]


def test_a_bad_cell_takes_its_pair_with_it(inputs: Path, cli: Cli, tmp_path: Path) -> None:
    lines = ["sentence1,sentence2,score", "The cat sat.,A dog.,1", "A bird.,,2", " ,A fish.,3", "A dog.,The rain.,4"]
    corpus = write_lines(tmp_path / "pairs.csv", lines)
    summary = run_json(cli, "--corpus", corpus, "--model", inputs / "gpt2", "--out", "store")
    assert (summary["rows"], summary["lines"], summary["duplicates"]) == (3, 4, 1)
    assert sum(summary["skipped"].values()) == 2


def test_corpora_lists_names_and_licences(cli: Cli) -> None:
    result = cli("corpora")
    assert result.code == 0
    for word in ("sample", "genericskb", "stsb", "snli", "CC BY 4.0", "Apache-2.0", "hf:owner/name"):
        assert word in result.out


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ([], "the ␣cat [.]\n3 tokens\n"),
        (["--pool", "mean"], "[the] [␣cat] [.]\n3 tokens\n"),
        (["--pool", "sum", "--skip-first"], "the [␣cat] [.]\n3 tokens\n"),
        (["--skip-first"], "the ␣cat [.]\n3 tokens\n"),
        (["--bos", "yes"], "<bos> the ␣cat [.]\n4 tokens\n"),
        (["--max-tokens", "2"], "the [␣cat]\n2 tokens, cut to 2\n"),
        (["--template", "echo"], "the ␣cat . ␣the ␣cat [.]\n6 tokens\n"),
    ],
    ids=str,
)
def test_tokens_marks_those_that_are_kept(flags: list[str], expected: str, inputs: Path, cli: Cli) -> None:
    result = cli("tokens", "the cat.", "--model", inputs / "gpt2", *flags)
    assert result.code == 0, result.err
    assert result.out == expected


def test_tokens_keeps_the_templates_end_when_it_cuts(inputs: Path, cli: Cli) -> None:
    long = "the cat " * 40
    whole = cli("tokens", "the cat", "--model", inputs / "gpt2", "--template", "eol")
    cut = cli("tokens", long, "--model", inputs / "gpt2", "--template", "eol", "--max-tokens", 60)
    assert whole.out.splitlines()[0].endswith('["]')
    assert cut.out.splitlines()[0].endswith('["]')
    assert int(cut.out.splitlines()[1].split()[0]) <= 60
    assert "cut to 60" in cut.out


def test_fetch_says_what_is_there(inputs: Path, cli: Cli, tmp_path: Path) -> None:
    result = cli("fetch", "--model", inputs / "gpt2", "--corpus", "sample")
    assert result.code == 0
    assert "4 layers of width 32" in result.out
    assert "corpus sample: columns text" in result.out
    assert contents(tmp_path) == {}


def test_fetch_of_an_unknown_corpus_is_an_input_error(inputs: Path, cli: Cli) -> None:
    result = cli("fetch", "--model", inputs / "gpt2", "--corpus", "nowhere")
    assert result.code == INPUT
    assert "sample, genericskb, stsb, snli" in result.err


@pytest.mark.parametrize(
    "flags",
    [
        [],
        ["--site", "resid_pre,mlp_out", "--layers", "0,-1", "--dtype", "float16"],
        ["--no-dedup", "--shard-size", "64KiB", "--limit", "500"],
    ],
    ids=str,
)
def test_a_dry_run_says_what_the_run_then_does(flags: list[str], inputs: Path, cli: Cli, tmp_path: Path) -> None:
    arguments = ["--corpus", "sample", "--model", inputs / "gpt2", "--out", "store", *flags]
    plan = run_json(cli, *arguments, "--dry-run")
    assert contents(tmp_path) == {}
    summary = run_json(cli, *arguments)
    info = run_json(cli, "info", "store")
    for key in ("rows", "lines", "duplicates", "skipped"):
        assert plan[key] == summary[key]
    for key in ("layers", "width", "dtype"):
        assert plan[key] == info["layout"][key]
    assert plan["truncated_share"] == pytest.approx(summary["truncated"] / summary["rows"], abs=0.01)
    assert plan["tokens_per_row"] == pytest.approx(summary["tokens"] / summary["rows"], rel=0.01)
    assert plan["parity"]["mode"] == summary["parity"]["mode"] == "packed"
    files = [p for p in (tmp_path / "store").rglob("*") if p.is_file() and ("c" in p.parts or "shards" in p.parts)]
    assert plan["files"] == len(files)
    slack = 4096 * plan["shards"]  # for the shards' records
    assert 0 <= plan["bytes"] - sum(p.stat().st_size for p in files) <= slack


def test_a_dry_run_shows_three_texts_as_tokens(inputs: Path, cli: Cli, tmp_path: Path) -> None:
    result = cli("--corpus", "sample", "--model", inputs / "gpt2", "--out", "store", "--dry-run")
    assert result.code == 0
    assert "nothing was written" in result.out
    assert result.err == ""
    assert result.out.count("[.]") == 3
    assert contents(tmp_path) == {}


def test_a_dry_run_leaves_a_store_that_is_there_as_it_is(inputs: Path, cli: Cli, tmp_path: Path) -> None:
    assert cli(*good_flags(inputs)).code == 0
    before = contents(tmp_path)
    assert cli(*good_flags(inputs, "--dry-run", "--overwrite", "--layers", 0)).code == 0
    assert contents(tmp_path) == before


def test_json_is_all_there_is_on_stdout(inputs: Path, cli: Cli, tmp_path: Path) -> None:
    summary = run_json(cli, *good_flags(inputs))
    assert (summary["state"], summary["rows"], summary["computed"]) == ("complete", 3, 3)
    assert run_json(cli, *good_flags(inputs))["state"] == "already complete"
    assert run_json(cli, "info", "store")["complete"] is True
    verdict = run_json(cli, "verify", "store")
    assert verdict["ok"] is True
    assert (verdict["rows"], verdict["problems"]) == (3, [])
    shard = tmp_path / "store" / "activations" / "c" / "0" / "0" / "0"
    data = bytearray(shard.read_bytes())
    data[100] ^= 1
    shard.write_bytes(data)
    damaged = cli("verify", "store", "--json")
    assert damaged.code == DAMAGE
    document = json.loads(damaged.out)
    assert document["ok"] is False
    assert "rows 0–2" in document["problems"][0]
    assert "rows 0–2" in damaged.err


def test_json_in_a_process_of_its_own(inputs: Path, extract: Extract) -> None:
    result = extract(*good_flags(inputs, "--json"))
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["rows"] == 3
    assert "\r" not in result.stderr


def test_info_shows_parity_and_a_table_of_layers(inputs: Path, cli: Cli) -> None:
    assert cli(*good_flags(inputs, "--layers", "all,embed,final")).code == 0
    text = cli("info", "store").out
    assert "store: complete" in text
    assert "parity      packed: within" in text
    assert "3 rows × 6 layers (embed,0,1,2,3,final) × 32" in text
    table = text.split("peak\n")[1].splitlines()
    assert [line.split()[0] for line in table] == ["embed", "0", "1", "2", "3", "final"]
    assert all(float(line.split()[1]) > 0 for line in table)


@pytest.mark.parametrize(
    "flags",
    [
        [],
        ["--layers", "-1"],
        ["--layers", "0"],
        ["--layers", "embed,1-2", "--pool", "mean", "--skip-first", "--dtype", "float16", "--codec", "zstd"],
        ["--site", "resid_pre,mlp_out", "--shard-size", "65536", "--max-tokens", "20", "--check", "3"],
        ["--template", 'Über "{text}": {label} ', "--id", "key", "--keep", "none", "--no-text", "--no-dedup"],
        ["--limit", "1", "--bos", "yes", "--tokens-per-batch", "128", "--quiet"],
        ["--overwrite"],
    ],
    ids=str,
)
def test_info_config_makes_the_same_store_again(flags: list[str], inputs: Path, cli: Cli, tmp_path: Path) -> None:
    corpus = ["--corpus", inputs / "table.csv", "--column", "body", "--model", inputs / "gpt2", "--out", "store"]
    assert cli(*corpus, *flags).code == 0
    config = cli("info", "store", "--config")
    assert config.code == 0
    assert isinstance(yaml.safe_load(config.out), dict)
    (tmp_path / "made.yaml").write_text(config.out)
    before = contents(tmp_path)
    summary = run_json(cli, "--config", "made.yaml")
    assert (summary["state"], summary["computed"]) == ("already complete", 0)
    assert contents(tmp_path) == before


def test_a_config_file_fills_what_flags_leave_open(inputs: Path, cli: Cli, tmp_path: Path) -> None:
    settings = [f'corpus = "{inputs / "good.txt"}"', f'model = "{inputs / "gpt2"}"', 'out = "store"']
    write_lines(
        tmp_path / "run.toml", [*settings, "layers = 2", "limit = 1", 'site = ["resid_pre"]', "dry-run = false"]
    )
    assert run_json(cli, "--config", "run.toml", "--limit", 2)["rows"] == 2
    layout = run_json(cli, "info", "store")["layout"]
    assert (layout["layers"], layout["sites"]) == (["2"], ["resid_pre"])


def test_the_default_store_is_named_after_corpus_and_model(inputs: Path, cli: Cli, tmp_path: Path) -> None:
    assert cli("--corpus", inputs / "good.txt", "--model", inputs / "gpt2").code == 0
    assert [p.name for p in tmp_path.iterdir()] == ["good-gpt2.zarr"]


def test_quiet_says_nothing_on_stderr(inputs: Path, cli: Cli) -> None:
    result = cli(*good_flags(inputs, "--quiet"))
    assert result.code == 0
    assert result.err == ""


def test_no_carriage_return_where_there_is_no_terminal(inputs: Path, cli: Cli) -> None:
    result = cli("--corpus", "sample", "--model", inputs / "gpt2", "--out", "store", "--shard-size", "128KiB")
    assert result.code == 0
    assert "\r" not in result.err + result.out
    assert "\r" not in cli("verify", "store").err


@pytest.mark.parametrize("quiet", [False, True])
def test_a_terminal_shows_a_bar_unless_quiet(
    quiet: bool, inputs: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 120))
    with os.fdopen(theirs, "w") as terminal, monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", terminal)
        assert cli(*good_flags(inputs), *(["--quiet"] if quiet else [])).code == 0
    shown = b""
    with contextlib.suppress(OSError):  # EIO: all is read
        while data := os.read(ours, 1 << 16):
            shown += data
    os.close(ours)
    words = [word in shown.decode() for word in ("\r", "3.00/3.00", "sentences/s", "tokens/s", "GB/s")]
    assert words == [not quiet] * len(words)
    assert not (quiet and shown)


def test_a_reader_that_goes_away_gets_no_traceback(command: list[str], tmp_path: Path) -> None:
    """As in `extract corpora | head -0`."""
    theirs, ours = os.pipe()
    os.close(theirs)
    result = subprocess.run(
        [*command, "corpora"], stdout=ours, stderr=subprocess.PIPE, text=True, cwd=tmp_path, timeout=60, check=False
    )
    os.close(ours)
    assert result.stderr == ""
