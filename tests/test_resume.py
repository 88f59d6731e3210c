"""Killed at any moment, the same command finishes the job, and the store is as if nothing had happened.

Real processes, killed with real signals at chosen moments (seen in the store's own files), a really full disk, two
runs at once. Every file that holds numbers must equal, byte for byte, the one of an uninterrupted run; a shard that was
finished must not be computed again.
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny_models
from conftest import write_lines

from permafrost.extractor.cli import main
from permafrost.extractor.config import ExtractConfig
from permafrost.extractor.run import run
from permafrost.extractor.verify import verify

Settings = dict[str, Any]
ROWS = 5000  # 20 shards of 256 rows


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Settings:
    lines = [f"{i} cats sat on the mat, {'and the dog ran ' * (i % 5)}in the rain." for i in range(ROWS)]
    corpus = write_lines(tmp_path_factory.mktemp("corpus") / "corpus.txt", lines)
    return {"corpus": str(corpus), "model": str(model_folder), "shard_size": "128KiB"}


@pytest.fixture(scope="module")
def whole(settings: Settings, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The store of an uninterrupted run."""
    out = tmp_path_factory.mktemp("whole") / "s.zarr"
    run(ExtractConfig(**settings, out=str(out), quiet=True))
    return out


def flags(settings: Settings, out: Path) -> list[str]:
    return [word for name, value in settings.items() for word in (f"--{name.replace('_', '-')}", str(value))] + [
        "--out",
        str(out),
    ]


def numbers(store: Path) -> dict[str, bytes]:
    """Every file that holds numbers, by its name in the store."""
    names = ("activations", "length", "truncated", "text_hash")
    files = [p for name in names for p in (store / name / "c").rglob("*") if p.is_file()]
    return {str(p.relative_to(store)): p.read_bytes() for p in files}


def inodes(store: Path) -> dict[str, int]:
    return {str(p.relative_to(store)): p.stat().st_ino for p in (store / "activations").rglob("c/*/0/0")}


def until(process: subprocess.Popen[str], seen: Callable[[], bool]) -> None:
    """Watch for a moment in a process's work; fails if it ends before that moment came."""
    while not seen():
        assert process.poll() is None, f"ended before the moment came: {process.communicate()}"
        time.sleep(0.001)  # leaves the core to the process


@pytest.fixture
def start(command: list[str]) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start `extract` in the background; killed at the end of the test whatever happens."""
    started: list[subprocess.Popen[str]] = []

    def begin(*arguments: str, **options: Any) -> subprocess.Popen[str]:
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        started.append(subprocess.Popen([*command, *arguments], **pipes | options))
        return started[-1]

    yield begin
    for process in started:
        process.kill()
        process.wait()


MOMENTS: dict[str, Callable[[Path], bool]] = {
    "while the corpus is read": lambda out: any(out.glob("sentences.parquet*")),
    "before the metadata": lambda out: (out / "sentences.parquet").exists(),
    "as the store appears": lambda out: (out / "zarr.json").exists(),
    "as the first shard begins": lambda out: (out / "length" / "c" / "0").exists(),
    "after three shards": lambda out: (out / "activations" / "c" / "2" / "0" / "0").exists(),
    "before the last shard": lambda out: (out / "activations" / "c" / "18" / "0" / "0").exists(),
    "before completion": lambda out: (out / "activations" / "c" / "19" / "0" / "0").exists(),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_killed_and_run_again_gives_the_same_files(
    moment: str, start: Callable[..., subprocess.Popen[str]], settings: Settings, whole: Path, tmp_path: Path
) -> None:
    out = tmp_path / "s.zarr"
    process = start(*flags(settings, out))
    until(process, lambda: MOMENTS[moment](out))
    process.kill()
    process.wait()
    finished = inodes(out)
    assert main([*flags(settings, out), "--quiet"]) == 0
    assert numbers(out) == numbers(whole)
    kept = inodes(out)
    assert all(kept[name] == inode for name, inode in finished.items()), "a finished shard was computed again"
    assert not verify(out).problems
    assert not list(out.rglob("*.partial"))


@pytest.mark.parametrize(("number", "code", "word"), [(signal.SIGINT, 130, "Ctrl-C"), (signal.SIGTERM, 143, "SIGTERM")])
def test_a_signal_leaves_one_line_and_its_own_exit_code(
    number: signal.Signals,
    code: int,
    word: str,
    start: Callable[..., subprocess.Popen[str]],
    settings: Settings,
    whole: Path,
    tmp_path: Path,
) -> None:
    out = tmp_path / "s.zarr"
    process = start(*flags(settings, out))
    until(process, lambda: MOMENTS["after three shards"](out))
    process.send_signal(number)
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == code
    assert stdout == ""
    assert stderr.splitlines() == [f"extract: stopped by {word}; finished shards are kept, the same command goes on"]
    assert not list(out.rglob("*.partial"))
    assert main([*flags(settings, out), "--quiet"]) == 0
    assert numbers(out) == numbers(whole)


def test_a_file_that_cannot_grow_fails_cleanly(
    start: Callable[..., subprocess.Popen[str]], settings: Settings, whole: Path, tmp_path: Path
) -> None:
    """The system refuses a write in the middle of a shard, as a quota would."""
    out = tmp_path / "s.zarr"
    size = (whole / "activations" / "c" / "0" / "0" / "0").stat().st_size

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size - 1000, size - 1000))

    process = start(*flags(settings, out), preexec_fn=limit)
    _, stderr = process.communicate(timeout=100)
    assert process.returncode == 1
    assert "File too large" in stderr and "the same command goes on" in stderr
    assert "Traceback" not in stderr
    assert not list(out.rglob("*.partial"))
    assert main([*flags(settings, out), "--quiet"]) == 0
    assert numbers(out) == numbers(whole)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A filesystem of 6 MiB."""
    place = tmp_path / "disk"
    place.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", place], capture_output=True, check=False)
    if made.returncode:
        pytest.skip("no right to mount a small filesystem here")
    yield place
    subprocess.run(["umount", "-l", place], check=True)


def test_a_full_disk_loses_nothing(
    start: Callable[..., subprocess.Popen[str]], settings: Settings, whole: Path, small_disk: Path
) -> None:
    out, ballast = small_disk / "s.zarr", small_disk / "ballast"
    process = start(*flags(settings, out))
    until(process, lambda: MOMENTS["as the first shard begins"](out))
    process.send_signal(signal.SIGSTOP)
    with ballast.open("wb") as file:  # someone else fills the disk
        left = os.statvfs(small_disk)
        file.write(b"\0" * (left.f_bavail * left.f_bsize - 700_000))
    process.send_signal(signal.SIGCONT)
    _, stderr = process.communicate(timeout=100)
    assert process.returncode == 1
    assert "the disk is full" in stderr
    ballast.unlink()
    finished = inodes(out)
    assert main([*flags(settings, out), "--quiet"]) == 0
    assert numbers(out) == numbers(whole)
    assert all(inodes(out)[name] == inode for name, inode in finished.items())


def test_too_little_disk_for_the_plan_is_said_before_the_model_loads(
    settings: Settings, small_disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ballast = small_disk / "ballast"
    ballast.write_bytes(b"\0" * (4 << 20))
    assert main([*flags(settings, small_disk / "s.zarr"), "--quiet"]) == 3
    assert "not enough disk for the plan" in capsys.readouterr().err


def test_a_second_run_at_the_same_time_is_refused(
    start: Callable[..., subprocess.Popen[str]],
    settings: Settings,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "s.zarr"
    process = start(*flags(settings, out))
    until(process, lambda: MOMENTS["as the store appears"](out))
    process.send_signal(signal.SIGSTOP)
    assert main([*flags(settings, out), "--quiet"]) == 1
    assert "another run is writing" in capsys.readouterr().err
    process.send_signal(signal.SIGCONT)
    assert process.wait() == 0


def test_a_complete_store_is_left_alone(settings: Settings, whole: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {p: p.stat().st_mtime_ns for p in whole.rglob("*")}
    assert main([*flags(settings, whole), "--quiet"]) == 0
    assert "already complete" in capsys.readouterr().out
    assert {p: p.stat().st_mtime_ns for p in whole.rglob("*")} == before


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (["--layers", "0-2"], "layers: the store has 0,1,2,3, this run 0,1,2"),
        (["--pool", "mean"], "pool: the store has last, this run mean"),
        (["--max-tokens", "20"], "max_tokens: the store has 128, this run 20"),
        (["--template", "eol"], "template"),
        (["--dtype", "float16"], "dtype: the store has float32, this run float16"),
        (["--limit", "10"], "limit: the store has None, this run 10"),
        (["--bos", "yes"], "bos: the store has False, this run True"),
        (["--no-dedup"], "dedup"),
        (["--codec", "zstd"], "codec"),
    ],
)
def test_another_meaning_is_refused_with_what_differs(
    change: list[str], named: str, settings: Settings, whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = numbers(whole)
    assert main([*flags(settings, whole), *change, "--quiet"]) == 3
    assert named in capsys.readouterr().err
    assert numbers(whole) == before


def test_another_model_or_corpus_is_another_meaning(
    settings: Settings, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tiny_models.save(tmp_path / "other", seed=1)
    assert main([*flags(settings | {"model": str(other)}, whole), "--quiet"]) == 3
    assert "model: the store has" in capsys.readouterr().err
    corpus = write_lines(tmp_path / "corpus.txt", ["something else"])
    assert main([*flags(settings | {"corpus": str(corpus)}, whole), "--quiet"]) == 3
    assert "corpus: the store has" in capsys.readouterr().err


def test_the_same_model_under_another_name_is_the_same_meaning(
    settings: Settings, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    again = tiny_models.save(tmp_path / "moved")
    assert main([*flags(settings | {"model": str(again)}, whole), "--quiet"]) == 0
    assert "already complete" in capsys.readouterr().out


def test_overwrite_starts_anew(settings: Settings, tmp_path: Path) -> None:
    out = tmp_path / "s.zarr"
    small = settings | {"limit": "300"}
    assert main([*flags(small, out), "--quiet"]) == 0
    assert main([*flags(small, out), "--quiet", "--layers", "1", "--overwrite"]) == 0
    problems = verify(out).problems
    assert not problems
    assert {p.name for p in (out / "activations" / "c").iterdir()} == {"0"}


def test_a_refused_overwrite_leaves_the_old_store(settings: Settings, tmp_path: Path) -> None:
    out = tmp_path / "s.zarr"
    small = [*flags(settings, out), "--limit", "300", "--quiet"]
    assert main(small) == 0
    expected = numbers(out)
    broken = tiny_models.save(tmp_path / "broken")
    (broken / "model.safetensors").write_bytes(b"not weights")
    assert main([*flags(settings | {"model": str(broken)}, out), "--quiet", "--overwrite"]) == 3
    assert numbers(out) == expected


def begun(settings: Settings, out: Path) -> None:
    """A store with its second shard missing."""
    run(ExtractConfig(**settings, limit=700, out=str(out), quiet=True))
    (out / "activations" / "c" / "1" / "0" / "0").unlink()
    import json

    path = out / "zarr.json"
    document = json.loads(path.read_text())
    document["attributes"]["permafrost"]["complete"] = False
    path.write_text(json.dumps(document))


def test_another_machine_goes_on_and_is_recorded(
    settings: Settings, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "s.zarr"
    begun(settings, out)
    more = [*flags(settings, out), "--limit", "700", "--quiet", "--tokens-per-batch", "777"]
    assert main([*more, "--strict"]) == 3
    assert "tokens_per_batch: the store has 8192, this run 777" in capsys.readouterr().err
    assert main(more) == 0
    assert "begun on another kind of machine" in capsys.readouterr().err
    from permafrost.extractor.reader import Store

    machines = {m["tokens_per_batch"]: m["shards"] for m in Store(out).attributes["machines"]}
    assert machines == {8192: "0, 2", 777: "1"}


def test_a_resumed_run_keeps_the_token_budget(settings: Settings, tmp_path: Path) -> None:
    out = tmp_path / "s.zarr"
    small = settings | {"limit": "700", "tokens_per_batch": "500"}
    assert main([*flags(small, out), "--quiet"]) == 0
    expected = numbers(out)
    begun(settings | {"tokens_per_batch": 500}, tmp_path / "b.zarr")
    assert main([*flags(settings | {"limit": "700"}, tmp_path / "b.zarr"), "--quiet", "--strict"]) == 0
    assert numbers(tmp_path / "b.zarr") == expected


def test_a_damaged_index_is_computed_again(settings: Settings, tmp_path: Path) -> None:
    out = tmp_path / "s.zarr"
    begun(settings, out)
    file = out / "activations" / "c" / "0" / "0" / "0"
    whole = file.read_bytes()
    file.write_bytes(whole[:-1000])
    assert main([*flags(settings, out), "--limit", "700", "--quiet"]) == 0
    assert file.read_bytes() == whole


def test_without_text_the_text_goes_at_completion(settings: Settings, tmp_path: Path) -> None:
    out = tmp_path / "s.zarr"
    arguments = [*flags(settings, out), "--limit", "300", "--no-text", "--quiet"]
    assert main(arguments) == 0
    assert not (out / "sentences.parquet").exists()
    assert not verify(out).problems
    assert main(arguments) == 0
