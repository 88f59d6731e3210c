"""A config, resolved: which corpus, columns, model, tokens, layout; what the store means and what machine this is.

Resolving loads the tokenizer and reads fingerprints, not the model's weights: enough to compare with a store that is
there, and to refuse it with what differs.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import subprocess
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from permafrost.extractor.config import ExtractConfig
from permafrost.extractor.corpus import Corpus, open_corpus
from permafrost.extractor.engine import Wanted
from permafrost.extractor.errors import InputError, UsageError
from permafrost.extractor.layers import check_sites, parse_layers
from permafrost.extractor.model import FrozenModel, ModelFiles, find_model, load_model, load_tokenizer
from permafrost.extractor.prepare import select
from permafrost.extractor.shards import rows_per_shard
from permafrost.extractor.sites import find_points
from permafrost.extractor.store import FORMAT, STORED, Layout
from permafrost.extractor.tables import Selection
from permafrost.extractor.tokens import TextEncoder, template_fields
from permafrost.extractor.transfer import TORCH_DTYPES

DEFAULT_MAX_TOKENS = 512
# 8,192 was measured (benchmarks/NOTES.md). 65,536 is not tuned: a batch never crosses a shard, and few shards reach it.
DEFAULT_BUDGET = {"cpu": 8192, "cuda": 65536}
PACKAGES = ("permafrost", "torch", "transformers", "tokenizers", "triton", "zarr", "numcodecs", "numpy", "pyarrow")


@dataclass(frozen=True)
class Plan:
    """All that a run needs to know before it reads the corpus or loads the model."""

    config: ExtractConfig
    corpus: Corpus
    selection: Selection
    files: ModelFiles
    encoder: TextEncoder
    layers: tuple[str, ...]
    device: torch.device
    compute_dtype: str
    dtype: str
    out: Path

    @cached_property
    def loaded(self) -> tuple[FrozenModel, Wanted]:
        """The model on its device, and what is kept of it; loaded on first use, which refuses sites it lacks."""
        model = load_model(self.files, self.device, TORCH_DTYPES[self.compute_dtype])
        points = find_points(model, self.config.site, self.layers)
        return model, Wanted(points, self.layers, self.config.pool, self.config.skip_first)

    @property
    def shard_rows(self) -> int:
        row = len(self.layers) * self.files.width * STORED[self.dtype].itemsize
        return rows_per_shard(row, self.config.shard_bytes)

    def layout(self, rows: int) -> Layout:
        """Where the numbers of so many rows lie."""
        config = self.config
        return Layout(rows, self.layers, self.files.width, self.dtype, self.shard_rows, config.codec, config.site)

    def budget(self) -> int:
        """Tokens a batch, before any proof that they fit."""
        return max(self.config.tokens_per_batch or DEFAULT_BUDGET[self.device.type], self.encoder.max_tokens)

    def meaning(self) -> dict[str, Any]:
        """What a store's numbers and lines depend on, machine apart: a store that differs in any of it is refused."""
        config, selection = self.config, self.selection
        return {
            "format": FORMAT,
            "model": self.files.fingerprint,
            "tokenizer": self.encoder.fingerprint(),
            "bos": self.encoder.has_bos,
            "template": self.encoder.template,
            "max_tokens": self.encoder.max_tokens,
            "layers": [*self.layers],
            "site": [*config.site],
            "pool": config.pool,
            "skip_first": config.skip_first,
            "compute_dtype": self.compute_dtype,
            "dtype": self.dtype,
            "codec": config.codec,
            "shard_rows": self.shard_rows,
            "corpus": self.corpus.fingerprint,
            "split": self.corpus.split,
            "column": [*selection.texts],
            "limit": selection.limit,
            "id": selection.id,
            "keep": [*selection.kept],
            "dedup": selection.dedup,
            "no_text": config.no_text,
        }

    def names(self) -> dict[str, Any]:
        """What the model and the corpus are called here; recorded, never compared."""
        return {"model": self.files.name, "revision": self.files.revision, "corpus": self.corpus.name, "adapter": None}


def make_plan(config: ExtractConfig) -> Plan:
    """Resolve every name in the config; raises on what does not exist or does not fit together."""
    device = pick_device(config.gpus)
    corpus = open_corpus(config.corpus, config.split, config.data_dir)
    fields = template_fields(config.template_text)
    selection = select(corpus, config.column, fields, config.id, config.keep, config.limit, config.dedup)
    files = find_model(config.model, config.revision)
    layers = parse_layers(config.layers, files.blocks)
    check_sites(config.site, layers)
    encoder = make_encoder(config, files)
    compute = config.compute_dtype or ("float32" if device.type == "cpu" else _half(device))
    return Plan(
        config=config,
        corpus=corpus,
        selection=selection,
        files=files,
        encoder=encoder,
        layers=layers,
        device=device,
        compute_dtype=compute,
        dtype=config.dtype or compute,
        out=Path(config.out or f"{_slug(config.corpus)}-{_slug(config.model)}.zarr"),
    )


def make_encoder(config: ExtractConfig, files: ModelFiles) -> TextEncoder:
    """The tokenizer with the config's template, BOS and truncation."""
    limit = files.max_tokens
    if config.max_tokens and limit and config.max_tokens > limit:
        raise UsageError(f"--max-tokens is {config.max_tokens}, but {files.name} has {limit} positions")
    max_tokens = config.max_tokens or min(limit or DEFAULT_MAX_TOKENS, DEFAULT_MAX_TOKENS)
    return TextEncoder(load_tokenizer(files), max_tokens, config.template_text, config.bos)


def pick_device(gpus: int | None) -> torch.device:
    """The GPU if there is one and it is not refused, else the CPU."""
    there = torch.cuda.device_count()
    if gpus is not None and gpus > there:
        raise InputError(f"--gpus {gpus}: this machine has {there}; leave the flag away, or use --gpus 0 for the CPU")
    return torch.device("cuda:0") if there and gpus != 0 else torch.device("cpu")


def _half(device: torch.device) -> str:
    return "bfloat16" if torch.cuda.get_device_capability(device) >= (8, 0) else "float16"


def _slug(name: str) -> str:
    stem = re.sub(r"(\.(txt|jsonl|csv|tsv|parquet|gguf|gz))+$", "", name.rstrip("/").removeprefix("hf:"))
    return re.sub(r"[^\w.-]+", "-", Path(stem).name).strip("-.") or "corpus"


def machine(device: torch.device, attention: str, budget: int) -> dict[str, Any]:
    """What the bits may depend on beside the meaning; two runs that differ here may differ in rounding."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu {platform.machine()}"
    return {
        "device": name,
        "torch": torch.__version__,
        "transformers": _version("transformers"),
        "triton": _version("triton") if device.type == "cuda" else None,
        "attention": attention,
        "compile": None,
        "tokens_per_batch": budget,
        "threads": torch.get_num_threads() if device.type == "cpu" else None,
    }


def versions() -> dict[str, str | None]:
    return {name: _version(name) for name in PACKAGES} | {"python": platform.python_version()}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def commit() -> str | None:
    """The commit of this code where it runs from a checkout."""
    here = Path(__file__).resolve().parent.parent
    if not (here / ".git").exists():
        return None
    command = ["git", "-C", os.fspath(here), "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """What differs between two descriptions, a line each."""
    return [
        f"{key}: the store has {_short(old.get(key))}, this run {_short(new.get(key))}"
        for key in {**old, **new}
        if old.get(key) != new.get(key)
    ]


def _short(value: Any) -> str:
    text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
    return text if len(text) <= 60 else text[:57] + "…"
