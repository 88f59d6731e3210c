"""What many tests share, and the environment they run in."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read by the hub's client when it is imported
os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")

import tiny_models
import torch

GPU = torch.cuda.is_available()
if not GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # read by Triton when our kernels are

Extract = Callable[..., "subprocess.CompletedProcess[str]"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """GPU tests run where there is a GPU, and only there."""
    for item in items:
        if item.get_closest_marker("gpu") and not GPU:
            item.add_marker(pytest.mark.skip(reason="no CUDA card here"))


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny GPT-2 with a tokenizer, saved as `--model FOLDER` takes it."""
    return tiny_models.save(tmp_path_factory.mktemp("model") / "tiny-gpt2")


@pytest.fixture(scope="session")
def command() -> list[str]:
    """How tests start `extract`: the module, without the working folder (and its `kernels`) on the path."""
    return [sys.executable, "-P", "-m", "permafrost.extractor.cli"]


@pytest.fixture
def extract(command: list[str], tmp_path: Path) -> Extract:
    """Run `extract` in a process of its own, in a fresh folder; the caller judges the exit code."""

    def run(*arguments: Any, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*command, *map(str, arguments)],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env=os.environ | environment,
            timeout=200,
            check=False,
        )

    return run


def write_lines(path: Path, lines: list[str]) -> Path:
    """A text file of these lines."""
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path
