"""The whole path on a CUDA card: numbers, memory and determinism where the CPU's tests cannot look.

float32 on the card takes the equal-length attention, bfloat16 the variable-length FlashAttention; both are compared
with plain Hugging Face forwards of single sentences on the same card in the same dtype.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models
import torch
import transformers
from conftest import write_lines
from test_extract import TEXTS, plain_forward, relative_error

from permafrost.extractor.config import ExtractConfig
from permafrost.extractor.reader import Store
from permafrost.extractor.run import run

pytestmark = pytest.mark.gpu

# Tiny models whose heads are as wide as FlashAttention takes them.
WIDE = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 2, "num_key_value_heads": 1}
SHAPES: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 128, "n_head": 2},
    "llama": WIDE,
    "mistral": WIDE | {"head_dim": 64},
    "qwen2": WIDE,
    "qwen3": WIDE | {"head_dim": 64},
    "gemma2": WIDE | {"head_dim": 64},
    "gemma3": WIDE | {"head_dim": 64},
    "phi3": WIDE,
    "gpt_neox": WIDE | {"num_key_value_heads": 2},
    "mixtral": WIDE,
    "opt": {"hidden_size": 128, "ffn_dim": 256, "num_attention_heads": 2, "word_embed_proj_dim": 128},
    "gptj": {"n_embd": 128, "n_head": 2},
    "falcon": {"hidden_size": 128, "num_attention_heads": 2},
    "bloom": {"hidden_size": 128, "n_head": 2},
}


def extract(folder: Path, corpus: Path, out: Path, **settings: Any) -> Store:
    run(ExtractConfig(corpus=str(corpus), model=str(folder), out=str(out), quiet=True, **settings))
    return Store(out)


@pytest.mark.parametrize("arch", SHAPES)
@pytest.mark.parametrize(("dtype", "limit"), [("float32", 1e-5), ("bfloat16", 5e-2)])
def test_stored_vectors_equal_plain_forwards_on_the_card(arch: str, dtype: Any, limit: float, tmp_path: Path) -> None:
    # Weights of the usual size: bfloat16 is for real models, not for ones that amplify rounding.
    folder = tiny_models.save(tmp_path / arch, arch, **SHAPES[arch], initializer_range=0.05)
    corpus = write_lines(tmp_path / "corpus.txt", TEXTS)
    store = extract(folder, corpus, tmp_path / "s.zarr", layers="all,embed,final", compute_dtype=dtype)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval().cuda()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    rows = [plain_forward(model, tokenizer, text) for text in TEXTS]
    expected = np.stack([np.stack([row[layer][-1] for layer in store.layers]) for row in rows])
    assert relative_error(store.read(), expected) <= limit
    assert store.layout.dtype == dtype


def corpus_of(path: Path, rows: int) -> Path:
    return write_lines(path, [f"{i:06d} cats sat on the mat {'and ran ' * (i % 6)}." for i in range(rows)])


def test_two_runs_give_the_same_bits(tmp_path: Path) -> None:
    folder = tiny_models.save(tmp_path / "gpt2", "gpt2", **SHAPES["gpt2"])
    corpus = corpus_of(tmp_path / "c.txt", 3000)
    stores = [extract(folder, corpus, tmp_path / f"{i}.zarr", shard_size="1MiB") for i in range(2)]
    first, second = ([p.read_bytes() for p in sorted((s.path / "activations").rglob("c/*/0/0"))] for s in stores)
    assert first == second


def test_memory_on_the_card_does_not_grow_with_the_corpus(tmp_path: Path) -> None:
    folder = tiny_models.save(tmp_path / "gpt2", "gpt2", **SHAPES["gpt2"])
    peaks = []
    for rows in (2000, 40000):
        torch.cuda.reset_peak_memory_stats()
        corpus = corpus_of(tmp_path / f"{rows}.txt", rows)
        extract(folder, corpus, tmp_path / f"{rows}.zarr", shard_size="1MiB", tokens_per_batch=4096)
        peaks.append(torch.cuda.max_memory_allocated())
    assert peaks[1] <= peaks[0] * 1.01


LITTLE_MEMORY = """
import sys, torch
from permafrost.extractor.cli import main
torch.cuda.set_per_process_memory_fraction(0.012)  # about 1.7 GB of 139: too little for a million tokens
sys.exit(main(sys.argv[1:]))
"""


def test_a_budget_that_does_not_fit_is_halved_and_recorded(tmp_path: Path) -> None:
    folder = tiny_models.save(tmp_path / "gpt2", "gpt2", **SHAPES["gpt2"] | {"n_embd": 1024, "n_head": 16})
    corpus, out = corpus_of(tmp_path / "c.txt", 9000), tmp_path / "s.zarr"
    flags = ["--corpus", corpus, "--model", folder, "--out", out, "--tokens-per-batch", 1 << 20]
    command = [sys.executable, "-P", "-c", LITTLE_MEMORY, *map(str, flags)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    budget = Store(out).attributes["machines"][0]["tokens_per_batch"]
    assert budget < 1 << 20
    assert f"using {budget} for the whole run" in done.stderr


def test_a_value_that_is_not_finite_is_found_on_the_card(tmp_path: Path) -> None:
    from permafrost.extractor.errors import PermafrostError

    folder = tiny_models.save(tmp_path / "gpt2", "gpt2", **SHAPES["gpt2"])
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        model.transformer.h[2].mlp.c_proj.bias[5] = 1e6
    model.save_pretrained(folder)
    with pytest.raises(PermafrostError, match=r"layer 2 .*not finite in float16"):
        extract(folder, corpus_of(tmp_path / "c.txt", 300), tmp_path / "s.zarr", dtype="float16")
