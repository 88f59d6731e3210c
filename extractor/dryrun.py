"""`--dry-run` and `extract tokens`: what a run would do, and a text as the model sees it; nothing is written."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from permafrost.extractor.config import ExtractConfig
from permafrost.extractor.engine import Engine
from permafrost.extractor.plan import Plan, make_plan
from permafrost.extractor.prepare import prepare
from permafrost.extractor.report import duration, parity_text, size
from permafrost.extractor.run import load_engine
from permafrost.extractor.shards import BLOCK_ROWS
from permafrost.extractor.store import ROW_ARRAYS, Layout
from permafrost.extractor.tokens import Encoded, TextEncoder
from permafrost.extractor.transfer import Ring

TIMED_SECONDS = 5.0


def tokens_text(encoder: TextEncoder, config: ExtractConfig, ids: NDArray[np.int64]) -> str:
    """The tokens, one after the other; those that make the vector in brackets."""
    shown = [repr(encoder.tokenizer.decode([int(i)]))[1:-1] for i in ids]
    last = len(shown) - 1
    first = last if config.pool == "last" else int(config.skip_first and last > 0)
    return " ".join(f"[{t}]" if i >= first else t for i, t in enumerate(t.replace(" ", "␣") for t in shown))


def dry_run(config: ExtractConfig) -> dict[str, Any]:
    """What a run would do: counted exactly, but truncation and time, which are estimated from a sample."""
    plan = make_plan(config)
    found = prepare(plan.corpus, plan.selection, plan.shard_rows, None, plan.encoder.has_tokens)
    layout = plan.layout(found.rows)
    spread = found.sample[1:] or found.sample
    encoded = plan.encoder.encode([s.text for s in spread], [s.fields for s in spread])
    engine, parity, budget = load_engine(plan, found.sample, layout)
    rate = _timed_rate(plan, engine, encoded, budget, layout)
    mean = float(encoded.lengths.mean())
    return {
        "store": str(plan.out),
        "rows": found.rows,
        "lines": found.lines,
        "duplicates": found.duplicates,
        "skipped": dict(found.skipped),
        "sampled": len(spread),
        "truncated_share": float(encoded.truncated.mean()),
        "tokens_per_row": mean,
        "layers": [*plan.layers],
        "width": layout.width,
        "dtype": layout.dtype,
        "bytes": layout.disk_bytes(layout.shards),
        "files": len(layout.shards) * (len(layout.arrays) + len(ROW_ARRAYS) + 1),
        "shards": len(layout.shards),
        "tokens_per_batch": budget,
        "parity": parity.as_dict(),
        "device": str(plan.device),
        "tokens_per_second": rate,
        "seconds": found.rows * mean / rate,
        "examples": [tokens_text(plan.encoder, config, encoded.sentence(i)) for i in range(min(3, len(spread)))],
    }


def _timed_rate(plan: Plan, engine: Engine, encoded: Encoded, budget: int, layout: Layout) -> float:
    """Tokens a second over a few batches of sampled sentences, after one to warm up."""
    slab = Ring(layout, plan.device, slabs=1).take()
    assert slab is not None
    rows = min(len(encoded.lengths), layout.blocks_of(layout.shards[0]) * BLOCK_ROWS)
    batches = engine.batches(encoded.lengths[:rows], budget)
    tokens, began = 0, 0.0
    with engine.ready():
        engine.run(encoded, batches[0], slab)
        slab.nonfinite.sum().item()
        began = time.perf_counter()
        for batch in batches:
            engine.run(encoded, batch, slab)
            slab.nonfinite.sum().item()  # waits for the device
            tokens += batch.tokens
            if time.perf_counter() - began > TIMED_SECONDS:
                break
    return tokens / (time.perf_counter() - began)


def dry_run_text(plan: dict[str, Any]) -> str:
    skipped = ", ".join(f"{count} {why}" for why, count in plan["skipped"].items()) or "none"
    examples = "\n".join(f"    {text}" for text in plan["examples"])
    return "\n".join(
        [
            f"{plan['store']}: a plan, nothing was written",
            f"  rows        {plan['rows']:,} from {plan['lines']:,} lines ({plan['duplicates']:,} duplicates; skipped: "
            f"{skipped})",
            f"  tokens      {plan['tokens_per_row']:.1f} a row, {plan['truncated_share']:.1%} of rows truncated "
            f"(of {plan['sampled']:,} sampled)",
            f"  each row    {len(plan['layers'])} layers × {plan['width']} × {plan['dtype']}",
            f"  disk        {size(plan['bytes'])} in {plan['shards']:,} shards ({plan['files']:,} files)",
            f"  parity      {parity_text(plan['parity'])}",
            f"  time        about {duration(plan['seconds'])} on {plan['device']} "
            f"({plan['tokens_per_second']:,.0f} tokens/s, {plan['tokens_per_batch']:,} tokens a batch)",
            "  texts as tokens, the kept ones in brackets:",
            examples,
        ]
    )
