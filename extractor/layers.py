"""Which layers: `all`, `0,5,10-12`, `-1`, and the names `embed` and `final`; pure."""

from __future__ import annotations

import re

from permafrost.extractor.errors import UsageError

EMBED, FINAL = "embed", "final"


def parse_layers(spec: str, blocks: int) -> tuple[str, ...]:
    """The layers' names in the order in which the model runs them, each once: `embed`, block numbers, `final`."""
    wanted: set[int] = set()
    for part in (p.strip() for p in spec.split(",")):
        if part == "all":
            wanted |= set(range(blocks))
        elif part in (EMBED, FINAL):
            wanted.add(-1 if part == EMBED else blocks)
        elif match := re.fullmatch(r"(-?\d+)(?:-(-?\d+))?", part):
            first = _block(int(match[1]), blocks, spec)
            last = first if match[2] is None else _block(int(match[2]), blocks, spec)
            if last < first:
                raise UsageError(f"--layers {spec}: {part} runs backwards")
            wanted |= set(range(first, last + 1))
        else:
            raise UsageError(f"--layers {spec}: {part!r} is none of all, a number, a range as 3-7, embed, final")
    return tuple(EMBED if n == -1 else FINAL if n == blocks else str(n) for n in sorted(wanted))


def check_sites(sites: tuple[str, ...], layers: tuple[str, ...]) -> None:
    """Raise where a layer that is no block is asked of a site that only blocks have."""
    if set(sites) - {"resid_post"} and {EMBED, FINAL} & set(layers):
        raise UsageError("--layers embed and final are points of the residual stream: they go with --site resid_post")


def last_block(layers: tuple[str, ...], blocks: int) -> int:
    """The last block that must run, -1 if none; all of them for `final`."""
    if FINAL in layers:
        return blocks - 1
    return max(-1 if layer == EMBED else int(layer) for layer in layers)


def _block(number: int, blocks: int, spec: str) -> int:
    if not -blocks <= number < blocks:
        raise UsageError(f"--layers {spec}: there is no block {number}; the model has blocks 0 to {blocks - 1}")
    return number % blocks
