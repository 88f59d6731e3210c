"""What a person sees: a bar on a terminal, a line now and then elsewhere, nothing when quiet."""

from __future__ import annotations

import os
import pty
import subprocess
import termios
from pathlib import Path

import pytest
from conftest import write_lines

from permafrost.extractor import progress
from permafrost.extractor.progress import ProgressBar
from permafrost.extractor.shards import Shard
from permafrost.extractor.worker import Progress


def work(bar: ProgressBar) -> None:
    bar.update(Progress(sentences=50, tokens=700))
    bar.update(Progress(written=2_000_000_000, shard=Shard(0, 0, 50)))
    bar.close()


def test_without_a_terminal_a_line_says_how_far_it_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "LINE_EVERY", 0.0)
    work(ProgressBar(200, 100, quiet=False))
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert lines[-1].startswith("150 of 200 sentences (75%), ")
    for word in ("sentences/s", "tokens/s", "GB/s", "left"):
        assert word in lines[-1]


def test_lines_come_no_more_often_than_every_thirty_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    assert progress.LINE_EVERY == 30
    work(ProgressBar(200, 100, quiet=False))
    assert capsys.readouterr().err == ""


def test_quiet_is_quiet(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "LINE_EVERY", 0.0)
    work(ProgressBar(200, 100, quiet=True))
    assert capsys.readouterr().err == ""


def test_on_a_terminal_there_is_a_bar_with_rates_and_time_left(
    command: list[str], model_folder: Path, tmp_path: Path
) -> None:
    corpus = write_lines(tmp_path / "c.txt", [f"{i} cats sat on the mat." for i in range(600)])
    flags = ["--corpus", str(corpus), "--model", str(model_folder), "--out", str(tmp_path / "s.zarr")]
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (40, 150))
    process = subprocess.Popen([*command, *flags], stderr=theirs, stdout=subprocess.PIPE, text=True)
    os.close(theirs)
    seen = b""
    while True:
        try:
            seen += os.read(ours, 4096)
        except OSError:  # how a pseudo-terminal says that its other side is gone
            break
    out, _ = process.communicate()
    os.close(ours)
    assert process.returncode == 0
    assert "600 from 600 lines" in out
    shown = seen.decode()
    assert "100%" in shown and "600/600" in shown
    for word in (" sentences/s", " tokens/s", " GB/s"):
        assert word in shown
