"""Packed attention against a plain softmax in float64, one sentence and one head at a time; and its place in
transformers.

| regime | the bug it would catch |
|---|---|
| 4 heads over 1, 2 and 4 key/value heads | key heads repeated in the wrong order |
| many one-token sentences, runs of several lengths | a run's first token or count off by one |
| window of 1, below, at and above the lengths | the window off by one; the causal path taken where it must not be |
| soft cap, with and without a window, custom scale | cap before scale; a mask capped with the scores; scale dropped |
| inputs as models pass them: transposed, cut from a fused projection | a view that only fits contiguous memory |
| values narrower than keys | the output shaped after the query |
| NaN in one sentence | any read across a sentence's bounds |

Tolerances. float32: scores of size up to 50 (128 products, scale 1.5) carry 2⁻²⁴ of that, and so do the weights: 5e-5
is room enough. Half precision: inputs are rounded before both, so what is left is the rounding of weights and output,
2⁻⁹ (bfloat16) or 2⁻¹² (float16) of values of size up to 4, and on the capped path of the scores too, several times:
less than 16 units. Every mistake in the table moves some value by 0.1 or more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import pytest
import tiny_models
import torch
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from permafrost.extractor.attention import NAME, UnsupportedAttentionError, packed, packed_implementation
from permafrost.kernels.attention import Packing, packed_attention, uses_varlen

HEADS = 4
LENGTHS = [1] * 9 + [2, 2, 5, 5, 5, 8, 13]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"scale": 0.3},
    {"window": 1},
    {"window": 4},
    {"window": 5},
    {"window": 100},
    {"softcap": 2.0},
    {"softcap": 2.0, "window": 4},
    {"softcap": 2.0, "window": 100, "scale": 0.7},
    {"scale": 1.5, "window": 3},
]
TOLERANCE = {torch.float32: 5e-5, torch.float16: 8e-3, torch.bfloat16: 5e-2}

options = pytest.mark.parametrize("option", OPTIONS, ids=str)
groups = pytest.mark.parametrize("kv_heads", [1, 2, 4])


def pack(lengths: Sequence[int], device: str = "cpu") -> Packing:
    """Where sentences of these lengths lie, equal ones adjoining."""
    runs, first = [], 0
    for length, same in groupby(lengths):
        count = len(list(same))
        runs.append((first, count, length))
        first += count * length
    bounds = torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)
    return Packing(bounds, max(lengths), tuple(runs))


def make_heads(heads: int, tokens: int, width: int, dtype: torch.dtype, device: str, seed: int) -> Tensor:
    """[heads, tokens, width], transposed as models give it."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, heads, width, generator=generator).to(device, dtype).transpose(0, 1)


def make_inputs(
    kv_heads: int, width: int = 8, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> tuple[Tensor, Tensor, Tensor]:
    tokens = sum(LENGTHS)
    sizes = ((HEADS, 0), (kv_heads, 1), (kv_heads, 2))
    query, key, value = (make_heads(heads, tokens, width, dtype, device, seed) for heads, seed in sizes)
    return query, key, value


def by_sentence(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: Sequence[int],
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """What attention means, token by token in float64 [T, H, D]."""
    query, key, value = (x.cpu().double() for x in (query, key, value))
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    group = query.shape[0] // key.shape[0]
    out = torch.full((query.shape[1], query.shape[0], value.shape[-1]), torch.nan, dtype=torch.float64)
    start = 0
    for length in lengths:
        for position in range(length):
            first = 0 if window is None else max(0, position - window + 1)
            seen = slice(start + first, start + position + 1)
            for head in range(query.shape[0]):
                scores = key[head // group, seen] @ query[head, start + position] * scale
                if softcap is not None:
                    scores = softcap * torch.tanh(scores / softcap)
                weights = torch.exp(scores - scores.max())
                out[start + position, head] = (weights / weights.sum()) @ value[head // group, seen]
        start += length
    return out


def assert_near(found: Tensor, expected: Tensor) -> None:
    tolerance = TOLERANCE[found.dtype]
    torch.testing.assert_close(found.cpu().double(), expected, rtol=tolerance, atol=tolerance)


@groups
@options
def test_equals_attention_of_each_sentence_alone(kv_heads: int, option: dict[str, Any]) -> None:
    inputs = make_inputs(kv_heads)
    found = packed_attention(*inputs, pack(LENGTHS), **option)
    assert found.shape == (sum(LENGTHS), HEADS, 8)
    assert_near(found, by_sentence(*inputs, LENGTHS, **option))


@pytest.mark.parametrize("lengths", [[1], [1, 1, 1], [7], [3, 1, 3, 3, 2, 2, 1]], ids=str)
@pytest.mark.parametrize("option", [{}, {"window": 2}, {"softcap": 2.0}], ids=str)
def test_takes_any_mix_of_lengths(lengths: list[int], option: dict[str, Any]) -> None:
    inputs = [x[:, : sum(lengths)] for x in make_inputs(2)]
    found = packed_attention(inputs[0], inputs[1], inputs[2], pack(lengths), **option)
    assert_near(found, by_sentence(inputs[0], inputs[1], inputs[2], lengths, **option))


@pytest.mark.parametrize("layout", ["contiguous", "fused", "interleaved"])
@pytest.mark.parametrize("option", [{}, {"window": 4}, {"softcap": 2.0}], ids=str)
def test_takes_inputs_as_models_lay_them_out(layout: str, option: dict[str, Any]) -> None:
    """Contiguous by head (after rotary embeddings), cut from one projection (GPT-2), interleaved by head (NeoX)."""
    tokens, width = sum(LENGTHS), 8
    fused = torch.randn(tokens, 3 * HEADS * width, generator=torch.Generator().manual_seed(0))
    if layout == "interleaved":
        parts = fused.view(tokens, HEADS, 3 * width).transpose(0, 1).chunk(3, dim=-1)
    else:
        parts = tuple(x.view(tokens, HEADS, width).transpose(0, 1) for x in fused.split(HEADS * width, dim=1))
    if layout == "contiguous":
        parts = tuple(x.contiguous() for x in parts)
    query, key, value = parts
    found = packed_attention(query, key, value, pack(LENGTHS), **option)
    assert_near(found, by_sentence(query, key, value, LENGTHS, **option))


@pytest.mark.parametrize("option", [{}, {"window": 4}, {"softcap": 2.0}], ids=str)
def test_values_may_be_narrower_than_keys(option: dict[str, Any]) -> None:
    query, key, value = make_inputs(2)
    found = packed_attention(query, key, value[..., :5], pack(LENGTHS), **option)
    assert_near(found, by_sentence(query, key, value[..., :5], LENGTHS, **option))


def check_no_leak(option: dict[str, Any], dtype: torch.dtype, device: str, width: int) -> None:
    """Poison one sentence of each length in turn; every other must come out as before, bit by bit."""
    inputs = make_inputs(2, width, dtype, device)
    packing = pack(LENGTHS, device)
    clean = packed_attention(*inputs, packing, **option)
    assert clean.isfinite().all()
    bounds = packing.bounds.tolist()
    for sentence in (0, 4, 9, 12, len(LENGTHS) - 2, len(LENGTHS) - 1):
        poisoned = [x.clone() for x in inputs]
        inside = slice(bounds[sentence], bounds[sentence + 1])
        for x in poisoned:
            x[:, inside] = torch.nan
        found = packed_attention(poisoned[0], poisoned[1], poisoned[2], packing, **option)
        others = torch.ones(len(found), dtype=torch.bool)
        others[inside] = False
        assert torch.equal(found[others], clean[others])
        assert found[inside].isnan().all()


@options
def test_nothing_leaks_between_sentences(option: dict[str, Any]) -> None:
    check_no_leak(option, torch.float32, "cpu", 8)


@pytest.mark.parametrize("option", [{}, {"window": 4}, {"softcap": 2.0}], ids=str)
def test_later_tokens_do_not_change_earlier_ones(option: dict[str, Any]) -> None:
    inputs = make_inputs(2)
    packing = pack(LENGTHS)
    changed = [x.clone() for x in inputs]
    for x in changed:
        x[:, -1] = 50.0  # the last token of the longest sentence
    before = packed_attention(*inputs, packing, **option)
    after = packed_attention(changed[0], changed[1], changed[2], packing, **option)
    torch.testing.assert_close(after[:-1], before[:-1], rtol=0, atol=1e-6)
    assert not torch.allclose(after[-1], before[-1])


def test_the_one_call_path_is_for_half_precision_on_a_gpu_alone() -> None:
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        assert not uses_varlen(torch.empty(HEADS, 3, 64, dtype=dtype))


@pytest.mark.gpu
def test_the_one_call_path_is_taken_visibly() -> None:
    for dtype in (torch.float16, torch.bfloat16):
        heads = torch.empty(HEADS, 3, 80, dtype=dtype, device="cuda")
        assert uses_varlen(heads)
        assert not uses_varlen(heads, softcap=2.0)
        assert not uses_varlen(heads[..., :20])
        assert not uses_varlen(heads.float())


@pytest.mark.gpu
@groups
@options
@pytest.mark.parametrize("width", [64, 80, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_equals_attention_of_each_sentence_alone_on_a_gpu(
    kv_heads: int, option: dict[str, Any], width: int, dtype: torch.dtype
) -> None:
    inputs = make_inputs(kv_heads, width, dtype, "cuda")
    found = packed_attention(*inputs, pack(LENGTHS, "cuda"), **option)
    assert found.dtype == dtype
    assert_near(found, by_sentence(*inputs, LENGTHS, **option))


@pytest.mark.gpu
@pytest.mark.parametrize("width", [20, 300])
def test_odd_head_widths_work_on_a_gpu(width: int) -> None:
    inputs = make_inputs(2, width, torch.bfloat16, "cuda")
    found = packed_attention(*inputs, pack(LENGTHS, "cuda"), window=4)
    assert_near(found, by_sentence(*inputs, LENGTHS, window=4))


@pytest.mark.gpu
@options
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_nothing_leaks_between_sentences_on_a_gpu(option: dict[str, Any], dtype: torch.dtype) -> None:
    check_no_leak(option, dtype, "cuda", 64)


# Its place in transformers.


@pytest.fixture(scope="module")
def decoder() -> Any:
    return tiny_models.tiny("llama").base_model


def call_attention(decoder: Any, module: Any = None, batch: int = 1, **keywords: Any) -> tuple[Tensor, None]:
    """Our function as a model calls it: by its name in transformers, on three sentences, 1 + 2 + 2 tokens."""
    heads = torch.randn(batch, HEADS, 5, 8, generator=torch.Generator().manual_seed(0))
    arguments = {"query": heads, "key": heads, "value": heads, "attention_mask": None} | keywords
    with packed_implementation(decoder), packed(pack([1, 2, 2])):
        result: tuple[Tensor, None] = ALL_ATTENTION_FUNCTIONS[NAME](module or torch.nn.Module(), **arguments)
    return result


def test_the_registered_function_is_packed_attention(decoder: Any) -> None:
    out, weights = call_attention(decoder, scaling=0.3, sliding_window=1, softcap=None, position_ids=torch.arange(5))
    heads = torch.randn(1, HEADS, 5, 8, generator=torch.Generator().manual_seed(0))[0]
    assert weights is None
    assert torch.equal(out[0], packed_attention(heads, heads, heads, pack([1, 2, 2]), 0.3, 1))


@pytest.mark.parametrize(
    "keywords",
    [
        {"s_aux": torch.zeros(HEADS)},
        {"sinks": torch.zeros(HEADS)},
        {"head_mask": torch.ones(HEADS)},
        {"a_keyword_of_next_year": 1},
        {"a_keyword_of_next_year": False},
        {"is_causal": False},
        {"dropout": 0.1},
        {"attention_mask": torch.ones(1, 1, 5, 5)},
        {"batch": 2},
        {"key": torch.zeros(1, HEADS, 9, 8), "value": torch.zeros(1, HEADS, 9, 8)},
    ],
    ids=lambda keywords: "-".join(keywords),
)
def test_what_is_not_honoured_raises(decoder: Any, keywords: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedAttentionError):
        call_attention(decoder, **keywords)


def test_the_error_names_the_module_and_the_keyword(decoder: Any) -> None:
    with pytest.raises(UnsupportedAttentionError, match="Linear: s_aux"):
        call_attention(decoder, module=torch.nn.Linear(1, 1), s_aux=torch.zeros(HEADS))


def test_a_module_that_is_not_causal_raises(decoder: Any) -> None:
    module = torch.nn.Module()
    module.is_causal = False  # type: ignore[assignment]
    with pytest.raises(UnsupportedAttentionError, match="not causal"):
        call_attention(decoder, module=module)


@pytest.mark.parametrize(
    "keywords", [{"s_aux": None}, {"use_cache": False}, {"is_causal": True}, {"output_attentions": False}], ids=str
)
def test_what_says_nothing_about_the_scores_passes(decoder: Any, keywords: dict[str, Any]) -> None:
    assert torch.equal(call_attention(decoder, **keywords)[0], call_attention(decoder)[0])


def test_outside_of_packed_it_raises_also_after_an_exception(decoder: Any) -> None:
    heads = torch.zeros(1, HEADS, 5, 8)
    with pytest.raises(ZeroDivisionError), packed(pack([1, 2, 2])):
        raise ZeroDivisionError
    with packed_implementation(decoder), pytest.raises(RuntimeError, match="outside of"):
        ALL_ATTENTION_FUNCTIONS[NAME](torch.nn.Module(), heads, heads, heads, None)


@pytest.mark.parametrize("own", ["eager", "sdpa"])
def test_the_decoders_own_attention_comes_back(own: str) -> None:
    decoder: Any = tiny_models.tiny("llama").base_model
    decoder.set_attn_implementation(own)
    with packed_implementation(decoder):
        assert decoder.config._attn_implementation == NAME
    assert decoder.config._attn_implementation == own


@pytest.mark.parametrize("own", ["eager", "sdpa"])
def test_the_decoders_own_attention_comes_back_when_an_exception_passes(own: str) -> None:
    decoder: Any = tiny_models.tiny("llama").base_model
    decoder.set_attn_implementation(own)
    ids = torch.arange(5)[None]
    before = decoder(ids, use_cache=False).last_hidden_state
    with pytest.raises(KeyboardInterrupt), packed_implementation(decoder):
        raise KeyboardInterrupt
    assert decoder.config._attn_implementation == own
    assert torch.equal(decoder(ids, use_cache=False).last_hidden_state, before)


def test_every_block_asks_it_and_sentences_stay_apart(decoder: Any) -> None:
    ids = torch.tensor([7, 11, 12, 21, 22])
    positions = torch.tensor([0, 0, 1, 0, 1])
    with torch.inference_mode():
        with packed_implementation(decoder), packed(pack([1, 2, 2])) as state:
            found = decoder(ids[None], position_ids=positions[None], use_cache=False).last_hidden_state[0]
            assert state.calls == 4
        alone = [decoder(part[None], use_cache=False).last_hidden_state[0] for part in ids.split([1, 2, 2])]
    torch.testing.assert_close(found, torch.cat(alone), rtol=1e-5, atol=1e-5)
