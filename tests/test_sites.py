"""Sites found by trial, against the modules a reader of each architecture would name.

Covers norms behind attention and MLP (Gemma), residuals added inside the submodules (Bloom), an MLP without a module
of its own (OPT), parallel blocks, and blocks with one addition only (Mamba).
"""

from __future__ import annotations

from typing import Any

import pytest
import tiny_models
import torch

from permafrost.extractor.errors import InputError, UsageError
from permafrost.extractor.hooks import capture
from permafrost.extractor.layers import check_sites
from permafrost.extractor.model import FrozenModel, freeze
from permafrost.extractor.sites import find_points

NAMED = {  # architecture → (what attention adds, what the MLP adds), as submodules of a block
    "gpt2": ("attn", "mlp"),
    "opt": ("self_attn", "fc2"),
    "gpt_neox": ("attention", "mlp"),
    "gptj": ("attn", "mlp"),
    "llama": ("self_attn", "mlp"),
    "mistral": ("self_attn", "mlp"),
    "qwen2": ("self_attn", "mlp"),
    "qwen3": ("self_attn", "mlp"),
    "gemma2": ("post_attention_layernorm", "post_feedforward_layernorm"),
    "gemma3": ("post_attention_layernorm", "post_feedforward_layernorm"),
    "phi3": ("self_attn", "mlp"),
    "falcon": ("self_attention", "mlp"),
    "bloom": ("self_attention.dense", "mlp.dense_4h_to_h"),
    "mixtral": ("self_attn", "mlp"),
}
PARALLEL = {"gpt_neox", "gptj", "falcon"}
IDS = torch.tensor([[5, 17, 90, 4, 200, 31]])
LAYERS = ("0", "1", "2", "3")


def frozen(arch: str, **changes: Any) -> FrozenModel:
    return freeze(tiny_models.tiny(arch, **changes), torch.device("cpu"), torch.float32)


def read_sites(
    model: FrozenModel, sites: list[str], layers: tuple[str, ...] = LAYERS
) -> dict[tuple[str, int], torch.Tensor]:
    """Each site of each layer [tokens, width], as the hooks hand it over."""
    found: dict[tuple[str, int], torch.Tensor] = {}

    def keep(array: int, layer: int, hidden: torch.Tensor) -> None:
        found[sites[array], layer] = hidden.clone()

    with capture(model, find_points(model, sites, layers), layers, keep) as run:
        run(IDS)
    return found


@pytest.mark.parametrize("arch", NAMED)
def test_what_is_added_is_what_the_named_modules_give(arch: str) -> None:
    model = frozen(arch)
    found = read_sites(model, ["attn_out", "mlp_out"])
    caught: dict[tuple[str, int], torch.Tensor] = {}

    def catch(site: str, layer: int) -> Any:
        def hook(_: Any, __: Any, output: Any) -> None:
            output = output[0] if isinstance(output, tuple) else output
            caught[site, layer] = output.reshape(-1, output.shape[-1]).clone()  # Falcon adds to it in place

        return hook

    for layer, block in enumerate(model.blocks):
        for site, name in zip(("attn_out", "mlp_out"), NAMED[arch], strict=True):
            block.get_submodule(name).register_forward_hook(catch(site, layer))
    with torch.no_grad():
        model.decoder(input_ids=IDS, use_cache=False)
    for key, expected in caught.items():
        torch.testing.assert_close(found[key], expected, rtol=0, atol=0)


@pytest.mark.parametrize("arch", NAMED)
def test_the_additions_make_the_block(arch: str) -> None:
    found = read_sites(frozen(arch), ["resid_pre", "attn_out", "mlp_out", "resid_post"])
    for layer in range(4):
        total = found["resid_pre", layer] + found["attn_out", layer] + found["mlp_out", layer]
        torch.testing.assert_close(total, found["resid_post", layer], rtol=1e-5, atol=1e-5)
        if layer:
            assert torch.equal(found["resid_pre", layer], found["resid_post", layer - 1])


@pytest.mark.parametrize("arch", sorted({*NAMED} - PARALLEL))
def test_resid_mid_lies_between_attention_and_mlp(arch: str) -> None:
    found = read_sites(frozen(arch), ["resid_pre", "attn_out", "resid_mid"])
    for layer in range(4):
        expected = found["resid_pre", layer] + found["attn_out", layer]
        torch.testing.assert_close(found["resid_mid", layer], expected, rtol=0, atol=0)


@pytest.mark.parametrize("arch", sorted(PARALLEL))
def test_resid_mid_is_refused_for_parallel_blocks(arch: str) -> None:
    with pytest.raises(UsageError, match="in parallel"):
        find_points(frozen(arch), ["resid_mid"], LAYERS)


def test_a_gpt_neox_without_parallel_residual_has_a_resid_mid() -> None:
    found = read_sites(frozen("gpt_neox", use_parallel_residual=False), ["resid_pre", "attn_out", "resid_mid"])
    assert torch.equal(found["resid_mid", 2], found["resid_pre", 2] + found["attn_out", 2])


@pytest.mark.parametrize("site", ["attn_out", "mlp_out", "resid_mid"])
def test_a_block_with_one_addition_has_no_inner_sites(site: str) -> None:
    with pytest.raises(InputError, match="resid_pre and resid_post work with every model"):
        find_points(frozen("mamba"), [site], LAYERS)


@pytest.mark.parametrize("layer", ["embed", "final"])
def test_embed_and_final_are_of_the_residual_stream_only(layer: str) -> None:
    with pytest.raises(UsageError, match="resid_post"):
        check_sites(("resid_post", "attn_out"), (layer, "0"))


def test_hooks_are_gone_after_an_error() -> None:
    model = frozen("llama")
    points = find_points(model, ["resid_post", "resid_pre", "mlp_out"], LAYERS)

    def fail(*_: Any) -> None:
        raise RuntimeError("full")

    with pytest.raises(RuntimeError, match="full"), capture(model, points, ("0",), fail) as run:
        run(IDS)
    for module in model.decoder.modules():
        assert not module._forward_hooks and not module._forward_pre_hooks
