"""What the benchmarks share: what machine and versions they ran on, interleaved timing, the last line of output.

Ways that are compared run in turns, so that what else the machine does falls on all of them alike; the median of
the turns counts, 10th and 90th percentiles go beside it. Cost: nothing beside what is timed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np


def parser(document: str | None) -> argparse.ArgumentParser:
    """A parser that says what the script's docstring says, with the flags that all of them have."""
    made = argparse.ArgumentParser(description=document, formatter_class=_Formatter)
    made.add_argument("--out", type=Path, metavar="FILE", help="also write the JSON document here")
    return made


class _Formatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """The docstring as it stands, and each flag's default."""


def environment(gpu: bool) -> dict[str, Any]:
    """Hardware, versions and commit; `gpu` says whether one was used."""
    import torch

    from permafrost.extractor.plan import commit, versions

    hardware: dict[str, Any] = {
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "gpu": None,
    }
    if gpu:
        card = torch.cuda.get_device_properties(0)
        hardware |= {"gpu": card.name, "gpu_memory_gib": round(card.total_memory / 2**30, 1)}
    return {"hardware": hardware, "versions": versions(), "commit": commit(), "system": platform.platform()}


def cpu_name() -> str:
    """The processor as /proc/cpuinfo names it; ARM gives numbers there, which are shown as they are."""
    pairs = [line.split(":", 1) for line in Path("/proc/cpuinfo").read_text("utf-8").splitlines() if ":" in line]
    facts = {name.strip(): value.strip() for name, value in pairs}
    arm = f"implementer {facts.get('CPU implementer')} part {facts.get('CPU part')}"
    return f"{facts.get('model name', arm)} ({platform.machine()})"


def interleaved(ways: Mapping[str, Callable[[], float]], repeats: int) -> dict[str, list[float]]:
    """Seconds of each way, measured in turns, the order reversed every other round. Each way times itself and
    returns its seconds; warm it up before."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(repeats):
        for name in ways if turn % 2 == 0 else reversed([*ways]):
            seconds[name].append(ways[name]())
    return seconds


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """Median, 10th and 90th percentile, and from how many."""
    p10, median, p90 = (float(x) for x in np.percentile(values, [10, 50, 90]))
    return {"median": median, "p10": p10, "p90": p90, "n": len(values)}


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Columns as wide as need be, the first to the left, the others to the right."""
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    for row in (header, *rows):
        cells = [
            cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        ]
        print("  ".join(cells).rstrip(), flush=True)


def finish(document: dict[str, Any], out: Path | None) -> None:
    """The result as one JSON document: the last line of stdout, and a file where one was asked for."""
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(document), flush=True)
