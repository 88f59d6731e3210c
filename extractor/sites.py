"""Where in a block each site is read, found by trial instead of by architecture.

A pre-norm block adds two things to the residual stream: post = (pre + attention) + MLP. One forward of a few tokens
records what every module inside a block gives and takes; the two modules whose outputs make that sum come out,
bit for bit, are `attn_out` and `mlp_out` (so a norm behind the attention, as in Gemma 2, counts as part of what is
added), and the module that takes pre + attention in takes `resid_mid`. Blocks that run both in parallel add them
to the same stream: no module ever sees a residual between the two, and `resid_mid` is refused.

Cost: one forward of five tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Any, Literal

import torch
from torch import Tensor, nn

from permafrost.extractor.errors import InputError, UsageError
from permafrost.extractor.hooks import hidden_of
from permafrost.extractor.layers import EMBED, FINAL
from permafrost.extractor.model import FrozenModel

PROBE_TOKENS = 5


@dataclass(frozen=True)
class Point:
    """One thing to keep: what a module takes in or gives out, and its place in the slabs (array, layer).

    A module of None stands for the decoder's own output, after the final norm.
    """

    array: int
    layer: int
    block: int
    module: nn.Module | None
    reads: Literal["input", "output"]


def find_points(model: FrozenModel, sites: Sequence[str], layers: Sequence[str]) -> list[Point]:
    """Each (site, layer) as a module's input or output; raises where the model has no such site."""
    inner = {"resid_mid", "attn_out", "mlp_out"} & set(sites)
    traces = _trace(model) if inner else []
    points = []
    for array, site in enumerate(sites):
        for layer, name in enumerate(layers):
            block = int(name) if name.isdigit() else {EMBED: 0, FINAL: len(model.blocks) - 1}[name]
            module: nn.Module | None = model.blocks[block]
            reads: Literal["input", "output"] = "output"
            if name == FINAL:
                module = None
            elif name == EMBED or site == "resid_pre":
                reads = "input"
            elif site in inner:
                module, reads = _inside(traces[block], model.blocks[block], site, block)
            points.append(Point(array, layer, block, module, reads))
    return points


@dataclass
class _Trace:
    """What a block and the modules in it took in and gave out, by the modules' names, in the order they finished."""

    before: Tensor
    after: Tensor
    inputs: dict[str, Tensor]
    outputs: dict[str, Tensor]
    calls: Counter[str]

    def once(self, states: dict[str, Tensor]) -> list[tuple[str, Tensor]]:
        """Those of modules that ran just once, outermost first: a shared one could not be told apart by a hook."""
        return [(name, x) for name, x in reversed(states.items()) if self.calls[name] == 1]


def _trace(model: FrozenModel) -> list[_Trace]:
    traces = [_Trace(torch.empty(0), torch.empty(0), {}, {}, Counter()) for _ in model.blocks]
    handles = []

    def watch(trace: _Trace, name: str, module: nn.Module) -> None:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            given, taken = hidden_of(output), hidden_of((*args, *kwargs.values()))
            trace.calls[name] += 1
            if given is not None and given.shape == shape:
                trace.outputs[name] = given.clone()
            if taken is not None and taken.shape == shape:
                trace.inputs[name] = taken.clone()

        handles.append(module.register_forward_hook(hook, with_kwargs=True))

    text_config = model.decoder.config.get_text_config()
    shape = torch.Size([PROBE_TOKENS, text_config.hidden_size])
    ids = torch.arange(1, PROBE_TOKENS + 1, device=model.device) * 7 % text_config.vocab_size
    try:
        for trace, block in zip(traces, model.blocks, strict=True):
            for name, module in block.named_modules():
                watch(trace, name, module)
        with torch.inference_mode():
            model.decoder(input_ids=ids[None], use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    for trace in traces:  # the block itself has the empty name
        trace.before, trace.after = trace.inputs.pop(""), trace.outputs.pop("")
    return traces


def _inside(trace: _Trace, block: nn.Module, site: str, number: int) -> tuple[nn.Module, Literal["input", "output"]]:
    """The module that gives (or takes) this site, the outermost where several would do."""
    parallel: tuple[str, str] | None = None
    for (first, a), (second, m) in permutations(trace.once(trace.outputs), 2):
        between = trace.before + a
        if torch.equal(between + m, trace.after):
            takers = [name for name, x in trace.once(trace.inputs) if torch.equal(x, between)]
            if takers:
                name = {"resid_mid": takers[0], "attn_out": first, "mlp_out": second}[site]
                return block.get_submodule(name), "input" if site == "resid_mid" else "output"
        if parallel is None and (
            torch.equal(between + m, trace.after) or torch.equal((a + m) + trace.before, trace.after)
        ):
            parallel = (first, second) if "att" in first else (second, first)
    if parallel is None:
        raise InputError(
            f"--site {site}: found no two modules in block {number} whose outputs add up to what the block adds to "
            "the residual stream; resid_pre and resid_post work with every model"
        )
    if site == "resid_mid":
        raise UsageError(
            f"--site resid_mid: block {number} runs attention and MLP in parallel on the same input (as GPT-J, "
            "GPT-NeoX and Falcon do), so there is no residual between them"
        )
    return block.get_submodule(parallel[0 if site == "attn_out" else 1]), "output"
