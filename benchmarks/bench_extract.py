"""Sentences a second of Permafrost against the loops that people write around Hugging Face models.

Three ways, on the same distinct sentences, in one process, on the same device, dtype and threads:

  loop-32       Hugging Face, batches of 32 in corpus order, padded right, `output_hidden_states=True`
  loop-512      the same, batches of 512 sorted by token count, rows put back in order
  permafrost    `extract`'s own path from the text file to a complete store, fsynced

The loops do the whole job: tokenize, forward, pick the last token of every block's output by the mask, one copy to
the host a batch, one array in memory; they write nothing to disk. They run without a cache of keys and values and
without the model's head, which makes them faster than most. For Permafrost `prepare` and `extract` count (reading,
deduplicating, tokenizing, forward, gather, writing, fsync); resolving names, loading the model, its parity check and
marking the store complete are reported apart.

First a pass of each proves that all three agree, row by row and layer by layer, and warms them up; then they run in
turns and the median counts. Exit code 1 where they do not agree.

Cost: (1 + repeats) passes of each way; with the defaults about a minute on two cores. Memory: two arrays of
rows × layers × width.

    python benchmarks/bench_extract.py --data-dir DATA
"""

from __future__ import annotations

import argparse
import gc
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")  # as the command itself does

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

from permafrost.extractor.config import ExtractConfig
from permafrost.extractor.corpus import open_corpus
from permafrost.extractor.model import find_blocks
from permafrost.extractor.plan import Plan, make_plan
from permafrost.extractor.reader import Store, decode_floats
from permafrost.extractor.run import Summary, run
from permafrost.extractor.transfer import TORCH_DTYPES, stored_view

if TYPE_CHECKING:  # to mypy this folder is a package, to Python it is the script's own
    from benchmarks import common
else:
    import common

LIMITS = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 5e-2}
VOCABULARY = 8000
COMPARE_ROWS = 1024  # rows that are compared at a time
LOOPS = {"loop-32": (32, False), "loop-512": (512, True)}  # batch, sorted by length
OURS = "permafrost"


def arguments() -> argparse.Namespace:
    parser = common.parser(__doc__)
    parser.add_argument("--corpus", default="genericskb", help="as `extract --corpus`")
    parser.add_argument("--data-dir", help="folder with the named sets as files (also PERMAFROST_DATA)")
    parser.add_argument("--limit", type=int, default=4000, help="distinct sentences")
    parser.add_argument("--model", help="as `extract --model`; else a random GPT-2 of the shape below")
    parser.add_argument("--blocks", type=int, default=6, help="of the random GPT-2")
    parser.add_argument("--width", type=int, default=256, help="of the random GPT-2")
    parser.add_argument("--heads", type=int, default=4, help="of the random GPT-2")
    parser.add_argument("--repeats", type=int, default=3, help="timed passes of each way")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--dtype", choices=tuple(LIMITS), help="computed and stored; else by device, as `extract`")
    parser.add_argument("--threads", type=int, help="torch's threads, for all ways alike")
    parser.add_argument("--max-tokens", type=int, help="as `extract --max-tokens`")
    parser.add_argument("--tokens-per-batch", type=int, help="as `extract --tokens-per-batch`")
    parser.add_argument("--shard-size", default="128MiB", help="as `extract --shard-size`")
    parser.add_argument("--dir", type=Path, help="where the stores are written; else the system's temporary folder")
    return parser.parse_args()


def distinct_sentences(corpus: str, data_dir: str | None, limit: int) -> list[str]:
    """The corpus's first `limit` distinct sentences of one line, in file order."""
    opened = open_corpus(corpus, None, data_dir)
    found: dict[str, None] = {}
    for cells, _ in opened.batches(opened.text_columns(())):
        for text in cells[0]:
            if isinstance(text, str) and text.strip() and len(text.splitlines()) == 1:
                found[text] = None
                if len(found) == limit:
                    return [*found]
    return [*found]


def save_random_gpt2(folder: Path, texts: list[str], blocks: int, width: int, heads: int) -> None:
    """A GPT-2 with random weights and a byte-level BPE tokenizer trained on the texts.

    Weights of 1/√width: at GPT-2's own 0.02 all tokens look nearly alike, and a row mixed up with another or with
    its neighbours would pass for right.
    """
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    end = "<|endoftext|>"
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=end, eos_token=end)
    tokenizer.save_pretrained(folder)
    config = transformers.GPT2Config(
        vocab_size=len(tokenizer),
        n_layer=blocks,
        n_embd=width,
        n_head=heads,
        initializer_range=width**-0.5,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    torch.manual_seed(0)
    transformers.GPT2LMHeadModel(config).save_pretrained(folder)


class Loop:
    """The notebook loop: a padded batch at a time, all hidden states, the last token of every block."""

    def __init__(self, plan: Plan, texts: list[str]) -> None:
        self.texts = texts
        self.device = plan.device
        self.dtype = TORCH_DTYPES[plan.compute_dtype]
        self.max_tokens = plan.encoder.max_tokens
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(plan.files.folder, padding_side="right")
        if self.tokenizer.pad_token is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token
        self.model = transformers.AutoModel.from_pretrained(plan.files.folder, dtype=self.dtype).eval().to(self.device)
        self.shape = (len(texts), plan.files.blocks, plan.files.width)

    def run(self, batch: int, by_length: bool, poison: bool = False) -> NDArray[Any]:
        """Every block's last token of every sentence [S, L, D], bfloat16 as its bits; NaN first, where poisoned."""
        out = torch.empty(self.shape, dtype=self.dtype)
        if poison:
            out.fill_(torch.nan)
        with torch.inference_mode(), self._last_block() as last_block:
            for rows, inputs in self._sorted(batch) if by_length else self._in_order(batch):
                inputs = inputs.to(self.device)
                output = self.model(**inputs, output_hidden_states=True, use_cache=False)
                # The last of `hidden_states` is after the final norm, the last block's own output is not.
                states = [*output.hidden_states[1:-1], last_block[0]]
                last = inputs["attention_mask"].sum(1) - 1
                sentence = torch.arange(len(rows), device=self.device)
                out[rows] = torch.stack([hidden[sentence, last] for hidden in states], 1).cpu()
        return stored_view(out)

    def _in_order(self, batch: int) -> Iterator[tuple[Tensor, Any]]:
        for first in range(0, len(self.texts), batch):
            texts = self.texts[first : first + batch]
            options: dict[str, Any] = {"padding": True, "truncation": True, "max_length": self.max_tokens}
            yield torch.arange(first, first + len(texts)), self.tokenizer(texts, return_tensors="pt", **options)

    def _sorted(self, batch: int) -> Iterator[tuple[Tensor, Any]]:
        ids = self.tokenizer(self.texts, truncation=True, max_length=self.max_tokens)["input_ids"]
        for rows in torch.tensor([len(i) for i in ids]).argsort(stable=True).split(batch):
            yield rows, self.tokenizer.pad({"input_ids": [ids[i] for i in rows.tolist()]}, return_tensors="pt")

    @contextmanager
    def _last_block(self) -> Iterator[list[Tensor]]:
        kept: list[Tensor] = []

        def keep(_: Any, __: Any, output: Any) -> None:
            kept[:] = [output[0] if isinstance(output, tuple) else output]

        handle = find_blocks(self.model)[-1].register_forward_hook(keep)
        try:
            yield kept
        finally:
            handle.remove()


@dataclass
class Permafrost:
    """`extract` into a fresh store; what each part of it took is kept."""

    config: ExtractConfig
    parts: dict[str, list[float]]

    def run(self) -> Summary:
        shutil.rmtree(str(self.config.out), ignore_errors=True)
        began = time.perf_counter()
        summary = run(self.config)
        whole = time.perf_counter() - began
        seconds = summary.seconds | {"complete": whole - sum(summary.seconds.values())}
        for name, value in seconds.items():
            self.parts.setdefault(name, []).append(value)
        return summary

    def timed(self) -> float:
        summary = self.run()
        return summary.seconds["prepare"] + summary.seconds["extract"]


def relative_error(read: Callable[[int, int], NDArray[Any]], reference: NDArray[Any]) -> NDArray[np.float64]:
    """‖a − b‖ / ‖b‖ of each row and layer [S, L]; what is not a number counts as wrong by the largest there is."""
    errors = []
    for first in range(0, len(reference), COMPARE_ROWS):
        expected = decode_floats(reference[first : first + COMPARE_ROWS]).astype(np.float64)
        difference = np.linalg.norm(read(first, first + len(expected)) - expected, axis=-1)
        errors.append(difference / np.maximum(np.linalg.norm(expected, axis=-1), 1e-30))
    error = np.concatenate(errors)
    return np.where(np.isfinite(error), error, np.finfo(np.float64).max)


def prove(loop: Loop, ours: Permafrost, limit: float) -> tuple[dict[str, float], Summary]:
    """Run each way once and compare all rows and layers with the first loop's; prints and returns the worst."""
    reference, other = (loop.run(*LOOPS[name], poison=True) for name in ("loop-32", "loop-512"))
    errors = {"loop-512": relative_error(lambda a, b: decode_floats(other[a:b]), reference)}
    summary = ours.run()
    store = Store(summary.store)
    if store.rows != len(reference):
        sys.exit(f"the store has {store.rows} rows, not {len(reference)}: skipped {summary.skipped}")
    errors[OURS] = relative_error(store.read, reference)
    for name, error in errors.items():
        row, layer = (int(i) for i in np.unravel_index(int(error.argmax()), error.shape))
        print(f"{name} against loop-32: largest relative error {error.max():.1e} (row {row}, layer {layer}), ", end="")
        print(f"mean {error.mean():.1e}, {int((error == 0).all(1).sum()):,} rows equal; limit {limit:.0e}")
    return {name: float(error.max()) for name, error in errors.items()}, summary


def timed_loop(loop: Loop, name: str) -> Callable[[], float]:
    def once() -> float:
        gc.collect()
        began = time.perf_counter()
        loop.run(*LOOPS[name])
        return time.perf_counter() - began

    return once


def report(seconds: dict[str, list[float]], ours: Permafrost, rows: int, tokens: int) -> dict[str, Any]:
    """Print the table; returns the same as a document."""
    speeds = {name: common.percentiles([rows / s for s in values]) for name, values in seconds.items()}
    medians = {name: float(np.median(values)) for name, values in seconds.items()}
    ratios = {f"{OURS} to {name}": medians[name] / medians[OURS] for name in LOOPS}
    common.print_table(
        ("", "seconds", "sentences/s", "p10", "p90", "tokens/s", OURS),
        [
            (
                name,
                f"{medians[name]:.2f}",
                *(f"{speeds[name][key]:,.0f}" for key in ("median", "p10", "p90")),
                f"{tokens / medians[name]:,.0f}",
                f"{ratios[f'{OURS} to {name}']:.2f}×" if name in LOOPS else "",
            )
            for name in seconds
        ],
    )
    parts = {name: common.percentiles(values) for name, values in ours.parts.items()}
    print(f"{OURS}, median seconds: " + ", ".join(f"{name} {value['median']:.2f}" for name, value in parts.items()))
    return {
        "seconds": {name: common.percentiles(values) for name, values in seconds.items()},
        "sentences_per_second": speeds,
        "tokens_per_second": {name: tokens / median for name, median in medians.items()},
        "ratios": ratios,
        "permafrost_parts": parts,
    }


def main() -> int:
    flags = arguments()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    if flags.threads:
        torch.set_num_threads(flags.threads)
    with tempfile.TemporaryDirectory(prefix="bench-extract-", dir=flags.dir) as temp:
        return bench(flags, Path(temp))


def bench(flags: argparse.Namespace, temp: Path) -> int:
    texts = distinct_sentences(flags.corpus, flags.data_dir, flags.limit)
    (temp / "sentences.txt").write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
    if flags.model is None:
        save_random_gpt2(temp / "model", texts, flags.blocks, flags.width, flags.heads)
    gpus: dict[str, Literal[0, 1] | None] = {"auto": None, "cpu": 0, "cuda": 1}
    config = ExtractConfig(
        corpus=str(temp / "sentences.txt"),
        model=flags.model or str(temp / "model"),
        out=str(temp / "store.zarr"),
        gpus=gpus[flags.device],
        compute_dtype=flags.dtype,
        max_tokens=flags.max_tokens,
        tokens_per_batch=flags.tokens_per_batch,
        shard_size=flags.shard_size,
        quiet=True,
    )
    plan = make_plan(config)
    loop, ours = Loop(plan, texts), Permafrost(config, {})
    limit = LIMITS[plan.compute_dtype]
    where = f"{plan.device}, {plan.compute_dtype}, {torch.get_num_threads()} threads"
    print(f"{len(texts):,} sentences, {plan.files.blocks} layers of width {plan.files.width}, {where}", flush=True)
    errors, summary = prove(loop, ours, limit)
    document = {
        "benchmark": "extract",
        **common.environment(plan.device.type == "cuda"),
        "sizes": {
            "corpus": flags.corpus,
            "sentences": len(texts),
            "tokens": summary.tokens,
            "model": flags.model or "random GPT-2",
            "layers": plan.files.blocks,
            "width": plan.files.width,
            "dtype": plan.compute_dtype,
            "device": str(plan.device),
            "threads": torch.get_num_threads(),
            "max_tokens": plan.encoder.max_tokens,
            "shard_size": flags.shard_size,
            "repeats": flags.repeats,
        },
        "largest_relative_error": errors,
        "error_limit": limit,
        "agree": max(errors.values()) <= limit,
    }
    if document["agree"]:
        ours.parts.clear()  # the first pass was the warm-up
        ways: dict[str, Callable[[], float]] = {name: timed_loop(loop, name) for name in LOOPS}
        seconds = common.interleaved(ways | {OURS: ours.timed}, flags.repeats)
        document |= report(seconds, ours, len(texts), summary.tokens)
    else:
        print("they do not agree: nothing was timed")
    common.finish(document, flags.out)
    return 0 if document["agree"] else 1


if __name__ == "__main__":
    sys.exit(main())
