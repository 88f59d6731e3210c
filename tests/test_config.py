"""One typed config: flags, help and validation derive from the dataclass; YAML and TOML fill the same fields; a flag
wins over the file.

Regimes: each kind of field (text, number, choice, list, switch) from the command line and from a file; wrong types and
unknown names from both; values that YAML reads as something else than their author meant (`-1`, `yes`, `0-3`).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from permafrost.extractor.cli import main
from permafrost.extractor.config import SITES, TEMPLATES, ExtractConfig, add_flags, load_config
from permafrost.extractor.errors import UsageError

FIELDS = {f.name: f for f in dataclasses.fields(ExtractConfig)}


@pytest.fixture(autouse=True)
def own_signals() -> Iterator[None]:
    """`main` takes SIGTERM for itself; give it back to pytest."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def flags(*argv: str) -> dict[str, Any]:
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_flags(parser)
    return vars(parser.parse_args(argv))


def config(*argv: str) -> ExtractConfig:
    return load_config(flags(*argv))


def from_file(folder: Path, text: str, *argv: str, name: str = "run.yaml") -> ExtractConfig:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return load_config(flags(*argv), str(path))


def usage(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """What `extract` says to a wrong command line."""
    assert main([*argv]) == 2
    out, said = capsys.readouterr()
    assert out == "" and "Traceback" not in said
    return said


# The command line derives from the dataclass


@pytest.mark.parametrize("name", FIELDS)
def test_every_field_has_its_flag_and_its_help_in_extract_help(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "10000")
    with pytest.raises(SystemExit) as stop:
        main(["--help"])
    shown = capsys.readouterr().out
    assert stop.value.code == 0
    assert f"  --{name.replace('_', '-')}" in shown
    assert FIELDS[name].metadata["help"] in shown


def test_no_flag_leaves_every_default() -> None:
    assert flags() == {}
    assert config() == ExtractConfig()


@pytest.mark.parametrize("name", FIELDS)
def test_every_flag_reaches_its_field(name: str) -> None:
    choices = {"pool": "mean", "bos": "yes", "codec": "zstd", "site": "mlp_out", "dtype": "float16"}
    values = choices | {"compute_dtype": "float32", "template": "eol", "shard_size": "1GB"}
    numbers = {"limit", "max_tokens", "tokens_per_batch", "gpus", "check"}
    flag, default = f"--{name.replace('_', '-')}", FIELDS[name].default
    if name == "dedup":
        assert config("--no-dedup").dedup is False and config(flag).dedup is True
    elif default is False:
        assert getattr(config(flag), name) is True
    elif name in numbers:
        assert getattr(config(flag, "17"), name) == 17
    else:
        value = values.get(name, "a")
        assert getattr(config(flag, value), name) == ((value,) if isinstance(default, tuple) else value)


@pytest.mark.parametrize(
    ("argv", "columns"),
    [
        (("--column", "a,b"), ("a", "b")),
        (("--column", " a , b ,"), ("a", "b")),
        (("--column", "a", "--column", "b"), ("a", "b")),
        (("--column", "a,b", "--column=c"), ("a", "b", "c")),
        (("--column", "two words"), ("two words",)),
    ],
)
def test_lists_come_with_commas_or_repeated_flags(argv: tuple[str, ...], columns: tuple[str, ...]) -> None:
    assert config(*argv).column == columns


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (("--pool", "max"), "--pool: invalid choice: 'max'"),
        (("--limit", "ten"), "--limit: invalid int value: 'ten'"),
        (("--limit", "0"), "--limit is 0, expected 1 or more"),
        (("--max-tokens", "-3"), "--max-tokens is -3, expected 1 or more"),
        (("--check", "0"), "--check is 0; at least one sentence is always checked"),
        (("--gpus", "-1"), "--gpus is -1, expected 0 or more"),
        (("--site", "resid_post,nowhere"), f"--site is 'nowhere', expected one of {', '.join(SITES)}"),
        (("--site", "mlp_out", "--site", "mlp_out"), "--site names something twice"),
        (("--column", "a,b,c,d"), "--column has 4 names"),
        (("--column", "a,a"), "--column names something twice: a,a"),
        (("--template", "no place for it"), "has no {text} and is none of the presets (eol, echo)"),
        (("--shard-size", "big"), "--shard-size is 'big', expected bytes as"),
        (("--shard-size", "1k"), "--shard-size is 1k, expected at least 65536 bytes"),
        (("--model", "x.gguf", "--revision", "main"), "a .gguf file has none"),
        (("--modell", "gpt2"), "unrecognized arguments: --modell gpt2"),
        (("--lim", "3"), "unrecognized arguments"),
        (("--config", "nowhere.yaml"), "nowhere.yaml: cannot be read"),
    ],
)
def test_a_wrong_flag_gets_one_clear_message_and_exit_code_2(
    argv: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert says in usage(capsys, *argv)


@pytest.mark.parametrize("argv", [["--layers", "-1,embed"], ["--layers=-1,embed"]])
def test_layers_may_begin_with_a_minus(
    argv: list[str], model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.txt").write_text("The cat sat on the mat.\nBirds have feathers.\n", encoding="utf-8")
    run = ["--corpus", f"{tmp_path / 'a.txt'}", "--model", f"{model_folder}", "--gpus", "0", "--dry-run", "--json"]
    assert main([*run, *argv]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["layers"] == ["embed", "3"]


# Files


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("run.yaml", "corpus: stsb\nmax-tokens: 64\ncolumn: [a, b]\nsite: mlp_out\nno_text: true\ntemplate: eol\n"),
        ("run.yml", "{corpus: stsb, max_tokens: 64, column: [a, b], site: [mlp_out], no-text: true, template: eol}"),
        (
            "run.toml",
            'corpus = "stsb"\nmax-tokens = 64\ncolumn = ["a", "b"]\nsite = "mlp_out"\nno_text = true\ntemplate = "eol"',
        ),
    ],
)
def test_a_file_fills_the_same_fields(name: str, text: str, tmp_path: Path) -> None:
    expected = ExtractConfig(
        corpus="stsb", max_tokens=64, column=("a", "b"), site=("mlp_out",), no_text=True, template="eol"
    )
    assert from_file(tmp_path, text, name=name) == expected


def test_a_flag_wins_over_the_file_and_the_rest_of_the_file_stays(tmp_path: Path) -> None:
    text = "corpus: stsb\nlimit: 5\ncolumn: [a, b]\ndedup: false\n"
    made = from_file(tmp_path, text, "--limit", "7", "--column", "c", "--dedup")
    assert (made.corpus, made.limit, made.column, made.dedup) == ("stsb", 7, ("c",), True)
    assert from_file(tmp_path, text).dedup is False


@pytest.mark.parametrize(
    ("line", "field", "value"),
    [
        ("layers: -1", "layers", "-1"),
        ("layers: 5", "layers", "5"),
        ("layers: 0-3", "layers", "0-3"),
        ("shard_size: 1000000", "shard_size", "1000000"),
        ("revision: 1234567", "revision", "1234567"),
        ("bos: yes", "bos", "yes"),
        ("bos: no", "bos", "no"),
        ("bos: 'no'", "bos", "no"),
        ("dtype: null", "dtype", None),
        ("keep: none", "keep", ("none",)),
        ("", "corpus", ""),
    ],
)
def test_yaml_means_what_it_says(line: str, field: str, value: object, tmp_path: Path) -> None:
    assert getattr(from_file(tmp_path, line), field) == value


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("corpse: stsb", "unknown setting 'corpse'; known are corpus, split,"),
        ("1: 2", "unknown setting '1'"),
        ("corpus: null", "--corpus is empty"),
        ("corpus: 5", "--corpus is 5, expected str"),
        ("corpus: [a, b]", "--corpus is ['a', 'b'], expected str"),
        ("limit: ten", "--limit is 'ten', expected int"),
        ("limit: 1.5", "--limit is 1.5, expected int"),
        ("limit: true", "--limit is True, expected int"),
        ("limit: 0", "--limit is 0, expected 1 or more"),
        ("no_text: 1", "--no-text is 1, expected bool"),
        ("no_text: 'yes'", "--no-text is 'yes', expected bool"),
        ("pool: max", "--pool is 'max', expected one of"),
        ("pool: [last]", "--pool is ['last'], expected one of"),
        ("column: {a: b}", "--column is {'a': 'b'}, expected a list of names"),
        ("column: [1]", "--column is 1, expected str"),
        ("column: [[a]]", "--column is ['a'], expected str"),
        ("site: []", "--site is empty"),
        ("site: [embed]", "--site is 'embed', expected one of"),
        ("template: plain", "has no {text}"),
        ("- corpus", "expected settings by name"),
        ("just words", "expected settings by name"),
        ("corpus: 'stsb", "run.yaml"),
    ],
)
def test_a_wrong_file_is_refused_with_what_was_expected(text: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as error:
        from_file(tmp_path, text)
    assert says in str(error.value)


def test_files_of_another_kind_or_broken_ones_are_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"run\.json: expected a \.toml, \.yaml or \.yml file"):
        from_file(tmp_path, "{}", name="run.json")
    with pytest.raises(UsageError, match=r"run\.toml: "):
        from_file(tmp_path, "corpus = ", name="run.toml")
    (tmp_path / "latin.yaml").write_bytes(b"corpus: caf\xe9")
    with pytest.raises(UsageError, match=r"latin\.yaml: cannot be read"):
        load_config({}, str(tmp_path / "latin.yaml"))


# Round trip, and what derives from the fields

WORD = st.text("abcxyz: {}'\"#-\n0159é", min_size=1, max_size=12)
NAMES = st.lists(WORD, unique=True, max_size=3).map(tuple)
CONFIGS = st.builds(
    ExtractConfig,
    corpus=WORD,
    split=st.none() | WORD,
    column=NAMES,
    limit=st.none() | st.integers(1, 10**12),
    keep=st.just(("all",)) | NAMES,
    no_text=st.booleans(),
    layers=WORD,
    site=st.lists(st.sampled_from(SITES), min_size=1, unique=True).map(tuple),
    pool=st.sampled_from(["last", "mean", "weighted_mean", "sum"]),
    template=st.sampled_from([None, "eol", "echo"]) | WORD.map("{{text}} {}".format),
    bos=st.sampled_from(["auto", "yes", "no"]),
    dtype=st.sampled_from([None, "float16"]),
    dedup=st.booleans(),
    shard_size=st.sampled_from(["128MiB", "70000", "0.5 GB"]),
)


@settings(deadline=None)
@given(made=CONFIGS)
def test_a_config_survives_the_way_through_yaml(made: ExtractConfig) -> None:
    values = yaml.safe_load(yaml.safe_dump(made.as_dict(), allow_unicode=True))
    assert load_config(values) == made


def test_a_printed_config_runs_again_from_a_file_and_names_only_what_differs(tmp_path: Path) -> None:
    made = config(
        "--corpus", "a.csv", "--column", "a,b", "--layers=-1", "--bos", "no", "--no-dedup", "--template", "eol"
    )
    assert set(made.as_dict()) == {"corpus", "column", "layers", "bos", "dedup", "template"}
    assert from_file(tmp_path, yaml.safe_dump(made.as_dict())) == made
    assert ExtractConfig().as_dict() == {}


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("128MiB", 128 << 20),
        ("134217728", 134217728),
        ("0.5GB", 500_000_000),
        ("64 KiB", 1 << 16),
        ("1g", 10**9),
        ("2Gi", 2 << 30),
    ],
)
def test_shard_sizes_are_read_with_their_units(text: str, size: int) -> None:
    assert ExtractConfig(shard_size=text).shard_bytes == size


@pytest.mark.parametrize("name", TEMPLATES)
def test_template_presets_hold_the_text(name: str) -> None:
    assert "{text}" in ExtractConfig(template=name).template_text
    assert ExtractConfig().template_text == "{text}"
