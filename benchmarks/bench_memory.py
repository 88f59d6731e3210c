"""Host memory against corpus size: bytes of peak resident memory for each additional distinct row.

Runs the real command, `python -m permafrost.extractor.cli`, in a process of its own on a tiny GPT-2 (2 layers, width
32) with a small and with a large number of distinct rows of seven words each, and reads each process's peak resident
memory from the kernel (`wait4`). Growth is the difference of the medians over the difference in rows; 40 bytes or
less is wanted.

The peak falls where the run stands highest, and the index of distinct rows is gone before the model's first batch:
what the pass over the corpus needs can hide under what a forward needs. So the high-water mark is also read at the
moment the pass has ended (the store's `zarr.json` appears), and that pass's growth is given apart; both must hold.

What would blur it is held still: rows have the same length in both; shards of 1 MiB, so that both have many and
their buffers are of one size; `MALLOC_ARENA_MAX=2`, since glibc opens arenas by chance of timing; and
`ARROW_DEFAULT_MEMORY_POOL=system`, since pyarrow's own pool keeps freed pages for a while. This process imports no
torch before it has measured: a child's peak never lies below what its parent held when it was started.

Cost: about five minutes with the defaults on two cores, and 0.5 GB of disk.

    python benchmarks/bench_memory.py
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # to mypy this folder is a package, to Python it is the script's own
    from benchmarks import common
else:
    import common

TARGET = 40.0
POLL_SECONDS = 0.005
DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
STEADY = {"MALLOC_ARENA_MAX": "2", "ARROW_DEFAULT_MEMORY_POOL": "system", "HF_HUB_OFFLINE": "1"}


@dataclass(frozen=True)
class Peak:
    """One run: its peak resident bytes, those at the end of the pass over the corpus, its seconds."""

    whole: int
    prepare: int
    seconds: float


def arguments() -> argparse.Namespace:
    parser = common.parser(__doc__)
    parser.add_argument("--rows", type=int, nargs=2, default=(100_000, 1_000_000), metavar=("A", "B"))
    parser.add_argument("--repeats", type=int, default=2, help="runs of each size, in turns")
    parser.add_argument("--shard-size", default="1MiB", help="as `extract --shard-size`")
    parser.add_argument("--dir", type=Path, help="where corpus and stores lie; else the system's temporary folder")
    return parser.parse_args()


def save_tiny_gpt2(folder: Path) -> None:
    """A GPT-2 of 2 layers and width 32, whose tokenizer has a token for each of the ten words."""
    import torch
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {word: i for i, word in enumerate(("<unk>", "<eos>", *DIGITS))}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", eos_token="<eos>")
    transformers.logging.disable_progress_bar()
    tokenizer.save_pretrained(folder)
    config = transformers.GPT2Config(
        vocab_size=len(tokenizer), n_layer=2, n_embd=32, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=1
    )
    torch.manual_seed(0)
    transformers.GPT2LMHeadModel(config).save_pretrained(folder)


def write_corpus(path: Path, rows: int) -> None:
    """Numbers as seven words, a line each."""
    with path.open("w", encoding="utf-8") as file:
        for number in range(rows):
            file.write(" ".join(DIGITS[int(digit)] for digit in f"{number:07d}") + "\n")


def extract(corpus: Path, rows: int, model: Path, store: Path, shard_size: str) -> Peak:
    """Run the command and watch its memory."""
    command = [sys.executable, "-m", "permafrost.extractor.cli", "--corpus", str(corpus), "--model", str(model)]
    command += ["--out", str(store), "--shard-size", shard_size, "--gpus", "0", "--quiet", "--json"]
    summary, messages = store.with_suffix(".json"), store.with_suffix(".log")
    began = time.perf_counter()
    with summary.open("wb") as out, messages.open("wb") as log:
        child = subprocess.Popen(command, env=os.environ | STEADY, cwd=store.parent, stdout=out, stderr=log)
    prepare = 0
    while not (store / "zarr.json").exists() and (mark := high_water(child.pid)):
        prepare = mark
        time.sleep(POLL_SECONDS)
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode != 0:
        sys.exit(f"extract ended with {child.returncode}:\n{messages.read_text('utf-8')}")
    done = json.loads(summary.read_text("utf-8"))
    if (done["state"], done["rows"], done["duplicates"]) != ("complete", rows, 0):
        sys.exit(f"expected {rows} distinct rows, got {done}")
    shutil.rmtree(store)
    return Peak(usage.ru_maxrss * 1024, prepare, time.perf_counter() - began)


def high_water(pid: int) -> int:
    """The process's peak resident bytes so far; 0 once it has ended."""
    try:
        found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text("ascii"))
    except FileNotFoundError:
        return 0
    return int(found[1]) * 1024 if found else 0


def measure(flags: argparse.Namespace, temp: Path) -> dict[int, list[Peak]]:
    """The peaks of each size's runs."""
    maker = multiprocessing.get_context("spawn").Process(target=save_tiny_gpt2, args=(temp / "model",))
    maker.start()
    maker.join()
    if maker.exitcode != 0:
        sys.exit("the tiny model could not be made")
    peaks: dict[int, list[Peak]] = {rows: [] for rows in flags.rows}
    for rows in flags.rows:
        write_corpus(temp / f"{rows}.txt", rows)
    for _ in range(flags.repeats):
        for rows in flags.rows:
            peak = extract(temp / f"{rows}.txt", rows, temp / "model", temp / f"{rows}.zarr", flags.shard_size)
            print(f"{rows:>9,} rows: {peak.whole / 1e6:.1f} MB, {peak.seconds:.0f} s", file=sys.stderr, flush=True)
            peaks[rows].append(peak)
    return peaks


def report(peaks: dict[int, list[Peak]]) -> dict[str, Any]:
    """Print the table; returns the same as a document."""
    kinds = {"whole run": "whole", "pass over the corpus": "prepare"}
    marks = {
        kind: {rows: common.percentiles([getattr(p, name) for p in runs]) for rows, runs in peaks.items()}
        for kind, name in kinds.items()
    }
    few, many = sorted(peaks)
    growth = {kind: (by[many]["median"] - by[few]["median"]) / (many - few) for kind, by in marks.items()}
    common.print_table(
        ("peak resident memory", f"{few:,} rows", f"{many:,} rows", "bytes a row"),
        [
            (kind, *(f"{by[rows]['median'] / 1e6:.1f} MB" for rows in (few, many)), f"{growth[kind]:.1f}")
            for kind, by in marks.items()
        ],
    )
    print(f"wanted: {TARGET:.0f} bytes or less for each additional distinct row")
    return {
        "peak_bytes": marks,
        "seconds": {rows: common.percentiles([p.seconds for p in runs]) for rows, runs in peaks.items()},
        "bytes_a_row": growth,
        "target": TARGET,
        "met": max(growth.values()) <= TARGET,
    }


def main() -> None:
    flags = arguments()
    if len({*flags.rows}) != 2 or max(flags.rows) > 10_000_000:
        sys.exit(f"--rows: expected two different numbers up to 10,000,000, got {flags.rows}")
    with tempfile.TemporaryDirectory(prefix="bench-memory-", dir=flags.dir) as temp:
        peaks = measure(flags, Path(temp))
    sizes = {"rows": sorted(flags.rows), "shard_size": flags.shard_size, "layers": 2, "width": 32}
    document = {
        "benchmark": "memory",
        **common.environment(gpu=False),
        "sizes": sizes | {"repeats": flags.repeats, "environment": STEADY},
        **report(peaks),
    }
    common.finish(document, flags.out)


if __name__ == "__main__":
    main()
