"""Right numbers, end to end: what a store holds against plain Hugging Face forwards, one sentence at a time.

For each of fifteen architectures a tiny random model is saved, extracted from text to disk by the real run, and read
back; the reference loads the same folder and uses nothing of ours. Covers packed and equal-length modes, sliding
windows shorter than the texts, soft-capped scores, parallel blocks, experts and a state-space model. A leak between
packed sentences shows as 0.02 or more, rounding as less than 2e-6.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models
import torch
import transformers
from conftest import write_lines
from numpy.typing import NDArray

from permafrost.extractor.config import ExtractConfig
from permafrost.extractor.reader import Store
from permafrost.extractor.run import run

LIMIT = 1e-5
TEXTS = [
    "a",
    "The cat sat on the mat.",
    "Birds have feathers, and fish swim in the sea while the dog runs after the cat in the rain.",
    "on the mat",
    "The dog ran.",
    "the rain the rain the rain the rain",
    "z",
    "Fish swim, and the cat sat on the mat and ran after the dog, and the rain ran after them all, again and again.",
    "and so on",
]


def plain_forward(model: Any, tokenizer: Any, text: str) -> dict[str, NDArray[np.float32]]:
    """Every token's residual, by layer name [tokens, width], from one plain forward of this text alone."""
    blocks = next(m for m in model.modules() if isinstance(m, torch.nn.ModuleList) and len(m) == 4)
    caught: dict[str, torch.Tensor] = {}

    def catch(name: str) -> Any:
        def hook(_: Any, args: Any, kwargs: Any, output: Any) -> None:
            caught[name] = output[0] if isinstance(output, tuple) else output
            if name == "0":
                caught["embed"] = args[0] if args else kwargs["hidden_states"]

        return hook

    handles = [b.register_forward_hook(catch(str(i)), with_kwargs=True) for i, b in enumerate(blocks)]
    with torch.no_grad():
        caught["final"] = model.base_model(**tokenizer(text, return_tensors="pt").to(model.device)).last_hidden_state
    for handle in handles:
        handle.remove()
    return {name: state[0].float().cpu().numpy() for name, state in caught.items()}


def relative_error(found: NDArray[Any], expected: NDArray[Any]) -> float:
    """The largest ‖a − b‖ / ‖b‖ over rows and layers."""
    difference = np.linalg.norm((found - expected).astype(np.float64), axis=-1)
    return float((difference / np.linalg.norm(expected.astype(np.float64), axis=-1)).max())


def load(folder: Path) -> tuple[Any, Any]:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return model, transformers.AutoTokenizer.from_pretrained(folder)


NOT_PACKED = {"gptj", "falcon", "bloom", "mamba"}


@pytest.mark.parametrize("arch", tiny_models.CONFIGS)
def test_stored_vectors_equal_plain_forwards(arch: str, tmp_path: Path) -> None:
    folder = tiny_models.save(tmp_path / arch, arch)
    corpus = write_lines(tmp_path / "corpus.txt", TEXTS)
    out = tmp_path / "store.zarr"
    summary = run(
        ExtractConfig(corpus=str(corpus), model=str(folder), layers="all,embed,final", out=str(out), quiet=True)
    )
    assert summary.state == "complete"
    assert summary.parity is not None
    if arch != "gemma2":  # transformers 5.17 leaves its soft cap out of plain forwards: packed then differs from them
        assert summary.parity["mode"] == ("equal" if arch in NOT_PACKED else "packed")
    assert summary.parity["error"] <= LIMIT

    store = Store(out)
    model, tokenizer = load(folder)
    expected = [plain_forward(model, tokenizer, text) for text in TEXTS]
    stacked = np.stack([np.stack([e[layer][-1] for layer in store.layers]) for e in expected])
    assert store.layers == ("embed", "0", "1", "2", "3", "final")
    assert relative_error(store.read(), stacked) <= LIMIT
    assert store.read_rows("length").tolist() == [len(e["embed"]) for e in expected]


@pytest.mark.parametrize("arch", sorted({*tiny_models.CONFIGS} - {"mamba"}))  # Mamba's hidden_states have no embed
def test_layer_names_map_to_hidden_states(arch: str, tmp_path: Path) -> None:
    folder = tiny_models.save(tmp_path / arch, arch)
    corpus = write_lines(tmp_path / "corpus.txt", TEXTS[1:2])
    out = str(tmp_path / "store.zarr")
    run(ExtractConfig(corpus=str(corpus), model=str(folder), layers="all,embed,final", out=out, quiet=True))
    model, tokenizer = load(folder)
    with torch.no_grad():
        states = model(**tokenizer(TEXTS[1], return_tensors="pt"), output_hidden_states=True).hidden_states
    store = Store(out)
    for k, layer in enumerate(("embed", "0", "1", "2")):
        assert relative_error(store.read(layers=[layer])[0], states[k][:, -1].numpy()) <= LIMIT
    assert relative_error(store.read(layers=["final"])[0], states[-1][:, -1].numpy()) <= LIMIT


@pytest.mark.parametrize("arch", ["gpt2", "mistral", "bloom"])
@pytest.mark.parametrize("pool", ["mean", "weighted_mean", "sum"])
@pytest.mark.parametrize("skip_first", [False, True])
def test_pooled_vectors_equal_pooled_plain_forwards(arch: str, pool: Any, skip_first: bool, tmp_path: Path) -> None:
    folder = tiny_models.save(tmp_path / arch, arch)
    corpus = write_lines(tmp_path / "corpus.txt", TEXTS)
    out = str(tmp_path / "store.zarr")
    run(ExtractConfig(corpus=str(corpus), model=str(folder), pool=pool, skip_first=skip_first, out=out, quiet=True))
    model, tokenizer = load(folder)
    rows = []
    for text in TEXTS:
        states = plain_forward(model, tokenizer, text)
        layers = []
        for layer in "0123":
            tokens = states[layer][1:] if skip_first and len(states[layer]) > 1 else states[layer]
            count = np.arange(1, len(tokens) + 1)[:, None]
            ones = np.ones_like(count)
            weight = {"mean": ones / len(tokens), "sum": ones, "weighted_mean": count / count.sum()}[pool]
            layers.append((tokens * weight).sum(0))
        rows.append(layers)
    assert relative_error(Store(out).read(), np.array(rows)) <= LIMIT


@pytest.mark.parametrize("arch", ["gpt2", "gpt_neox", "falcon"])
@pytest.mark.parametrize("layers", ["-1", "0", "embed", "1-2,final", "2"])
def test_some_layers_equal_the_same_layers_of_all(arch: str, layers: str, tmp_path: Path) -> None:
    folder = tiny_models.save(tmp_path / arch, arch)
    corpus = write_lines(tmp_path / "corpus.txt", TEXTS)
    stores = []
    for name, spec in (("all", "all,embed,final"), ("some", layers)):
        out = str(tmp_path / f"{name}.zarr")
        run(ExtractConfig(corpus=str(corpus), model=str(folder), layers=spec, out=out, quiet=True))
        stores.append(Store(out))
    everything, some = stores
    np.testing.assert_array_equal(some.read(), everything.read(layers=some.layers))


def test_blocks_past_the_last_wanted_one_are_not_run(tmp_path: Path) -> None:
    folder = tiny_models.save(tmp_path / "gpt2")
    model, _ = load(folder)
    with torch.no_grad():  # a model whose later blocks give NaN: running them would fail the shard
        for block in model.transformer.h[2:]:
            block.mlp.c_proj.bias.fill_(torch.nan)
    model.save_pretrained(folder)
    corpus = write_lines(tmp_path / "corpus.txt", TEXTS)
    config: dict[str, Any] = {"corpus": str(corpus), "model": str(folder), "quiet": True}
    assert run(ExtractConfig(**config, layers="0-1", out=str(tmp_path / "a.zarr"))).state == "complete"
    ran: list[int] = []
    hook = torch.nn.modules.module.register_module_forward_hook(
        lambda module, _, __: ran.append(module.layer_idx) if type(module).__name__ == "GPT2Attention" else None
    )
    try:
        run(ExtractConfig(**config, layers="embed,1", out=str(tmp_path / "b.zarr")))
    finally:
        hook.remove()
    assert set(ran) == {0, 1}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_stores_round_the_float32_numbers(dtype: Any, tmp_path: Path) -> None:
    folder = tiny_models.save(tmp_path / "gpt2")
    corpus = write_lines(tmp_path / "corpus.txt", TEXTS)
    config: dict[str, Any] = {"corpus": str(corpus), "model": str(folder), "quiet": True}
    run(ExtractConfig(**config, out=str(tmp_path / "full.zarr")))
    run(ExtractConfig(**config, out=str(tmp_path / "half.zarr"), dtype=dtype))
    full, half = Store(tmp_path / "full.zarr").read(), Store(tmp_path / "half.zarr").read()
    rounded = torch.from_numpy(full).to(getattr(torch, dtype)).float().numpy()
    np.testing.assert_array_equal(half.astype(np.float32), rounded)


def test_a_value_that_is_not_finite_fails_the_shard_by_name(tmp_path: Path) -> None:
    from permafrost.extractor.errors import PermafrostError

    folder = tiny_models.save(tmp_path / "gpt2")
    model, _ = load(folder)
    with torch.no_grad():
        model.transformer.h[1].mlp.c_proj.bias[3] = 1e6  # finite in float32, infinite in float16
    model.save_pretrained(folder)
    corpus = write_lines(tmp_path / "corpus.txt", TEXTS)
    out = tmp_path / "store.zarr"
    with pytest.raises(PermafrostError, match=r"row 0, layer 1 .*not finite in float16") as failure:
        run(ExtractConfig(corpus=str(corpus), model=str(folder), out=str(out), dtype="float16", quiet=True))
    assert failure.value.exit_code == 1
    assert not list(out.glob("activations/c/**/0"))


def test_a_model_that_sees_the_future_is_refused(tmp_path: Path) -> None:
    from permafrost.extractor.errors import InputError

    config = transformers.BertConfig(
        vocab_size=tiny_models.VOCAB,
        hidden_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=64,
        initializer_range=0.2,
    )
    transformers.BertForMaskedLM(config).save_pretrained(tmp_path / "bert")
    tiny_models.tokenizer().save_pretrained(tmp_path / "bert")
    corpus = write_lines(tmp_path / "corpus.txt", TEXTS)
    out = tmp_path / "s.zarr"
    with pytest.raises(InputError, match="not causal"):
        run(ExtractConfig(corpus=str(corpus), model=str(tmp_path / "bert"), out=str(out), quiet=True))
    assert not out.exists()


def test_the_mean_and_the_sum_have_the_same_direction(tmp_path: Path) -> None:
    folder = tiny_models.save(tmp_path / "gpt2")
    corpus = write_lines(tmp_path / "corpus.txt", TEXTS)
    vectors = []
    for pool in ("mean", "sum"):
        out = str(tmp_path / f"{pool}.zarr")
        run(ExtractConfig(corpus=str(corpus), model=str(folder), pool=pool, out=out, quiet=True))
        read = Store(out).read().astype(np.float64)
        vectors.append(read / np.linalg.norm(read, axis=-1, keepdims=True))
    np.testing.assert_allclose(vectors[0], vectors[1], atol=1e-6)
