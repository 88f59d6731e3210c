"""The driver of one extraction: from a config to a complete store, or to what keeps it from becoming one.

Order: resolve names → compare with the store that is there → load the model → one pass over the corpus → create →
prove parity and token budget → the shards that are left → complete. Killed at any moment, the same config goes on.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from permafrost.extractor.config import SITES, ExtractConfig
from permafrost.extractor.durable import TEMP_SUFFIX
from permafrost.extractor.engine import Engine
from permafrost.extractor.errors import InputError, PermafrostError
from permafrost.extractor.parity import Parity, check_parity, check_sentences
from permafrost.extractor.plan import Plan, commit, differences, machine, make_plan, versions
from permafrost.extractor.prepare import prepare
from permafrost.extractor.progress import ProgressBar, say
from permafrost.extractor.shards import Shard, ranges, shards_left
from permafrost.extractor.store import (
    FORMAT,
    LINES,
    RECORDS,
    ROW_ARRAYS,
    SENTENCES,
    Layout,
    complete_metadata,
    create_metadata,
    read_attributes,
)
from permafrost.extractor.tables import Sentence, read_sample
from permafrost.extractor.worker import Worker, prove_budget
from permafrost.extractor.writer import is_done, read_record

CHECK_ROWS = 64  # rows noted at creation, from which a resumed run draws its check sentences
_OWN_NAMES = {SENTENCES, LINES, RECORDS, "activations", "pairs", "triplets", *ROW_ARRAYS, *SITES}


@dataclass
class Summary:
    """What came out of a run, in plain types."""

    store: str
    state: str  # "complete" or "already complete"
    rows: int
    lines: int
    duplicates: int
    skipped: dict[str, int]
    truncated: int
    tokens: int
    store_bytes: int
    computed: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    sentences_per_second: float = 0.0
    tokens_per_second: float = 0.0
    gigabytes_per_second: float = 0.0
    bound_by: dict[str, float] = field(default_factory=dict)
    parity: dict[str, Any] | None = None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def run(config: ExtractConfig) -> Summary:
    """Extract, or finish what an earlier run began; returns what there is to say about it."""
    seconds: dict[str, float] = {}
    with _timed(seconds, "resolve"):
        plan = make_plan(config)
        meaning = plan.meaning()
    store = plan.out
    if config.gpus is not None and config.gpus > 1:
        say(f"one worker in this version: running on {plan.device}, the first of {config.gpus} GPUs")
    with _locked(store):
        attributes = _existing(store, meaning, config)
        if attributes is None:
            with _timed(seconds, "load"):
                _ = plan.loaded  # before the pass, which may take long: a model that does not fit is refused now
            with _timed(seconds, "prepare"), _cleared_on_failure(store):
                attributes = _create(plan, meaning)
        summary = _summary(store, attributes)
        if attributes["complete"]:
            summary.state = "already complete"
        else:
            with _cleared_on_failure(store):
                _fill(plan, attributes, seconds, summary)
        if config.no_text:
            (store / SENTENCES).unlink(missing_ok=True)
    summary.seconds = seconds
    return summary


def _fill(plan: Plan, attributes: dict[str, Any], seconds: dict[str, float], summary: Summary) -> None:
    """Compute the shards that are left and complete the store; fills in the summary."""
    store, layout = plan.out, Layout.from_dict(attributes["layout"])
    done = [shard for shard in layout.shards if is_done(store, layout, shard)]
    left = shards_left(layout.rows, layout.shard_rows, {shard.index for shard in done})
    if done:
        say(f"going on with {store}: {len(done)} of {len(layout.shards)} shards are done")
    if left:
        check_space(store, layout, left)
        earlier = read_record(store, done[0])["machine"] if done else None
        sample = read_sample(store, attributes["check_rows"], layout.shard_rows)
        with _timed(seconds, "load"):
            _ = plan.loaded
        with _timed(seconds, "prove"):
            engine, parity, budget = load_engine(plan, sample, layout, earlier)
        here = machine(plan.device, parity.attention, budget)
        _compare_machines(earlier, here, plan.config.strict)
        record = {"machine": here, "parity": parity.as_dict()}
        worker = Worker(store, layout, plan.encoder, engine, budget, record)
        bar = ProgressBar(layout.rows, sum(shard.rows for shard in done), plan.config.quiet)
        try:
            worker.run(left, bar.update)
        finally:
            bar.close()
        seconds["extract"] = worker.timing.total
        summary.computed = bar.sentences
        summary.sentences_per_second = bar.sentences / worker.timing.total
        summary.tokens_per_second = bar.tokens / worker.timing.total
        summary.gigabytes_per_second = bar.written / worker.timing.total / 1e9
        summary.bound_by = worker.timing.shares()
    with _timed(seconds, "complete"):
        _complete(store, layout, attributes)
    finished = _summary(store, attributes)
    summary.state, summary.store_bytes = "complete", finished.store_bytes
    summary.tokens, summary.truncated, summary.parity = finished.tokens, finished.truncated, finished.parity


def load_engine(
    plan: Plan, sample: list[Sentence], layout: Layout, earlier: dict[str, Any] | None = None
) -> tuple[Engine, Parity, int]:
    """Find how the model runs right, and prove the token budget; a resumed run keeps the earlier budget."""
    config = plan.config
    model, wanted = plan.loaded
    rows, encoded = check_sentences(sample, plan.encoder, config.check)
    parity = check_parity(model, wanted, rows, encoded)
    if parity.mode == "equal":
        say(f"not packed, in batches of one length instead (right, but slower): {parity.not_packed_because}")
    engine = Engine(model, wanted, parity.mode)
    asked = plan.budget()
    if earlier is not None and config.tokens_per_batch is None:
        asked = max(int(earlier["tokens_per_batch"]), plan.encoder.max_tokens)
    budget = prove_budget(engine, layout, asked, plan.encoder.max_tokens)
    if budget != asked:
        say(f"{asked} tokens a batch do not fit the GPU's memory: using {budget} for the whole run")
    return engine, parity, budget


def _existing(store: Path, meaning: dict[str, Any], config: ExtractConfig) -> dict[str, Any] | None:
    """The attributes of a store to go on with; None where one is to be created, in place of what is there."""
    if not store.exists() or not any(store.iterdir()):
        return None
    if not (store / "zarr.json").exists():
        foreign = [p.name for p in store.iterdir() if p.name.removesuffix(TEMP_SUFFIX) not in _OWN_NAMES]
        if foreign:
            raise InputError(f"{store} is not a store and not empty ({foreign[0]}, …): choose another --out")
        return None  # an unfinished preparation: nothing was computed yet
    attributes = read_attributes(store)
    if config.overwrite:
        return None
    different = differences(attributes["meaning"], meaning)
    if different:
        lines = "\n  ".join(different)
        raise InputError(
            f"{store} holds something else; use --overwrite to replace it, or another --out. What differs:\n  {lines}"
        )
    return attributes


def _clear(store: Path) -> None:
    """Delete a store; its metadata first, so that what is left never looks like one."""
    (store / "zarr.json").unlink(missing_ok=True)
    for path in store.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def _create(plan: Plan, meaning: dict[str, Any]) -> dict[str, Any]:
    """One pass over the corpus, then the metadata: from here on the store exists."""
    _clear(plan.out)
    found = prepare(plan.corpus, plan.selection, plan.shard_rows, plan.out, plan.encoder.has_tokens)
    picked = np.unique(np.linspace(0, len(found.sample) - 1, min(CHECK_ROWS, len(found.sample))).astype(int))
    layout = plan.layout(found.rows)
    attributes = {
        "format": FORMAT,
        "complete": False,
        "layout": layout.as_dict(),
        "meaning": meaning,
        "names": plan.names(),
        "config": plan.config.as_dict(),
        "versions": versions(),
        "commit": commit(),
        "created": _now(),
        "counts": {"lines": found.lines, "duplicates": found.duplicates, "skipped": dict(found.skipped)},
        "check_rows": [found.sample[i].row for i in picked],
    }
    create_metadata(plan.out, layout, attributes, found.flat)
    return attributes


def _complete(store: Path, layout: Layout, attributes: dict[str, Any]) -> None:
    """Gather the shards' records and mark the store complete. The only other time that metadata is written."""
    by_machine: dict[str, tuple[dict[str, Any], list[int]]] = {}
    records = [(shard, read_record(store, shard)) for shard in layout.shards]
    for shard, record in records:
        by_machine.setdefault(repr(record["machine"]), (record["machine"], []))[1].append(shard.index)
    attributes["machines"] = [{**m, "shards": ranges(indices)} for m, indices in by_machine.values()]
    attributes["parity"] = max((r["parity"] for _, r in records), key=lambda parity: float(parity["error"]))
    attributes["counts"] |= {key: sum(r[key] for _, r in records) for key in ("tokens", "truncated")}
    attributes["complete"], attributes["finished"] = True, _now()
    complete_metadata(store, attributes)


def _compare_machines(earlier: dict[str, Any] | None, here: dict[str, Any], strict: bool) -> None:
    different = differences(earlier, here) if earlier is not None else []
    if not different:
        return
    lines = "\n  ".join(different)
    if strict:
        raise InputError(f"--strict: the store was begun on another kind of machine. What differs:\n  {lines}")
    say(f"the store was begun on another kind of machine; numbers agree within the parity tolerance:\n  {lines}")


def check_space(store: Path, layout: Layout, left: list[Shard]) -> None:
    """Raise unless the disk holds what is still to be written."""
    needed, free = layout.disk_bytes(left), shutil.disk_usage(store).free
    if needed > free:
        raise InputError(
            f"not enough disk for the plan: {needed / 1e9:.2f} GB are to be written to {store}, {free / 1e9:.2f} GB "
            "are free. Fewer --layers, --dtype bfloat16, --limit or another --out would do."
        )


def _summary(store: Path, attributes: dict[str, Any]) -> Summary:
    counts = attributes["counts"]
    return Summary(
        store=str(store),
        state="begun",
        rows=attributes["layout"]["rows"],
        lines=counts["lines"],
        duplicates=counts["duplicates"],
        skipped=counts["skipped"],
        truncated=counts.get("truncated", 0),
        tokens=counts.get("tokens", 0),
        store_bytes=sum(p.stat().st_size for p in store.rglob("*") if p.is_file()),
        parity=attributes.get("parity"),
    )


@contextlib.contextmanager
def _locked(store: Path) -> Iterator[None]:
    """One writer a store: a second one is refused, not queued. Filesystems without locks go unguarded."""
    if store.exists() and not store.is_dir():
        raise InputError(f"{store} is a file; choose another --out")
    try:
        store.mkdir(parents=True, exist_ok=True)
        fd = os.open(store, os.O_RDONLY)
    except OSError as error:
        raise InputError(f"--out {store}: cannot be made: {error.strerror}") from None
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise PermafrostError(f"another run is writing {store}; wait for it, or stop it") from None
        except OSError:
            pass
        yield
    finally:
        os.close(fd)
        if not any(store.iterdir()):
            with contextlib.suppress(OSError):  # it may be a place that is mounted
                store.rmdir()  # nothing came of it


@contextlib.contextmanager
def _cleared_on_failure(store: Path) -> Iterator[None]:
    """Where a run is refused before any shard is done, its store goes again: another config may take the place."""
    try:
        yield
    except PermafrostError:
        if not any(store.glob("*/c/*/0/0")):
            _clear(store)
        raise


@contextlib.contextmanager
def _timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    began = time.perf_counter()
    yield
    seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - began


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat("T", "seconds")
