"""One worker on one device: shards in, files out. Reading ahead, computing and writing overlap.

A thread reads and tokenizes the next shards, this one runs the model, another copies out and writes. What each
waited for is measured, so that the summary can say what bounded the run.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from permafrost.extractor.engine import Engine
from permafrost.extractor.errors import PermafrostError
from permafrost.extractor.shards import Shard
from permafrost.extractor.store import Layout
from permafrost.extractor.tables import read_sentences
from permafrost.extractor.tokens import Encoded, TextEncoder
from permafrost.extractor.transfer import Ring, Slab
from permafrost.extractor.writer import ShardRows, write_shard

READ_AHEAD = 2


@dataclass
class Timing:
    """Seconds: the whole, the model's thread waiting for text and for a free slab, the writer waiting and writing."""

    total: float = 0.0
    text_wait: float = 0.0
    slab_wait: float = 0.0
    copy_wait: float = 0.0
    writing: float = 0.0

    def shares(self) -> dict[str, float]:
        """How the run's time divides into what bounded it: text, forward, storage."""
        busy = self.copy_wait + self.writing
        storage = self.slab_wait * (self.writing / busy if busy else 0.0)
        total = max(self.total, 1e-9)
        forward = total - self.text_wait - storage
        return {"forward": forward / total, "storage": storage / total, "text": self.text_wait / total}


@dataclass(frozen=True)
class Progress:
    """One step of the run: sentences and tokens computed, or bytes written."""

    sentences: int = 0
    tokens: int = 0
    written: int = 0
    shard: Shard | None = None


@dataclass(frozen=True)
class _Text:
    rows: ShardRows
    encoded: Encoded


class Worker:
    """Computes shards of one store on one device."""

    def __init__(
        self, store: Path, layout: Layout, encoder: TextEncoder, engine: Engine, budget: int, record: dict[str, Any]
    ) -> None:
        self._store = store
        self._layout = layout
        self._encoder = encoder
        self._engine = engine
        self._budget = budget
        self._record = record
        self._ring = Ring(layout, engine.model.device)
        self.timing = Timing()

    def run(self, shards: Sequence[Shard], report: Callable[[Progress], None]) -> None:
        """Compute and write the shards in order. What was computed whole is written, whatever ends the run."""
        began = time.perf_counter()
        todo = iter(shards)
        writes: deque[Future[None]] = deque()
        reads: deque[tuple[Shard, Future[_Text]]] = deque()
        with self._engine.ready(), ThreadPoolExecutor(1) as reader, ThreadPoolExecutor(1) as writer:

            def read_ahead() -> None:
                if (shard := next(todo, None)) is not None:
                    reads.append((shard, reader.submit(self._read, shard)))

            try:
                for _ in range(READ_AHEAD):
                    read_ahead()
                while reads:
                    shard, text = reads.popleft()
                    read_ahead()
                    ready = self._wait("text_wait", text)
                    slab = self._free_slab(writes)
                    self._compute(ready.encoded, slab, report)
                    slab.send(self._layout.blocks_of(shard), self._ring.stream)
                    writes.append(writer.submit(self._write, shard, ready, slab, report))
                while writes:
                    writes.popleft().result()
            finally:
                reader.shutdown(wait=False, cancel_futures=True)
                self.timing.total += time.perf_counter() - began

    def _read(self, shard: Shard) -> _Text:
        texts, fields = read_sentences(self._store, shard.index)
        if len(texts) != shard.rows:
            raise PermafrostError(f"sentences.parquet has {len(texts)} rows for shard {shard.index}, not {shard.rows}")
        encoded = self._encoder.encode(texts, fields)
        return _Text(ShardRows.of(texts, encoded), encoded)

    def _compute(self, encoded: Encoded, slab: Slab, report: Callable[[Progress], None]) -> None:
        for batch in self._engine.batches(encoded.lengths, self._budget):
            self._engine.run(encoded, batch, slab)
            report(Progress(sentences=len(batch.rows), tokens=batch.tokens))

    def _write(self, shard: Shard, text: _Text, slab: Slab, report: Callable[[Progress], None]) -> None:
        try:
            began = time.perf_counter()
            slab.wait()
            copied = time.perf_counter()
            tokens = {"tokens": int(text.encoded.lengths.sum()), "truncated": int(text.encoded.truncated.sum())}
            size = write_shard(self._store, self._layout, shard, text.rows, slab, self._record | tokens)
            self.timing.copy_wait += copied - began
            self.timing.writing += time.perf_counter() - copied
            report(Progress(written=size, shard=shard))
        finally:
            self._ring.give_back(slab)

    def _free_slab(self, writes: deque[Future[None]]) -> Slab:
        while writes and writes[0].done():
            writes.popleft().result()
        while (slab := self._ring.take()) is None:
            self._wait("slab_wait", writes.popleft())
        return slab

    def _wait(self, what: str, future: Future[Any]) -> Any:
        began = time.perf_counter()
        result = future.result()
        setattr(self.timing, what, getattr(self.timing, what) + time.perf_counter() - began)
        return result


def prove_budget(engine: Engine, layout: Layout, budget: int, max_tokens: int) -> int:
    """The budget, halved until the largest batch fits the card's memory; on the CPU as it is.

    Runs a batch of `budget` made-up tokens in sentences of the greatest length, with a ring of slabs allocated as in
    the run. Cost: one forward of the largest batch.
    """
    if engine.model.device.type != "cuda":
        return budget
    vocabulary = engine.model.decoder.config.get_text_config().vocab_size
    most_rows = max(shard.rows for shard in layout.shards)
    while True:
        count = max(1, min(budget // max_tokens, most_rows))
        lengths = np.full(count, max_tokens)
        encoded = Encoded(np.arange(int(lengths.sum())) % vocabulary, lengths, np.zeros(count, bool))
        try:
            ring = Ring(layout, engine.model.device)
            slab = ring.take()
            assert slab is not None
            with engine.ready():
                for batch in engine.batches(lengths, budget):
                    engine.run(encoded, batch, slab)
            torch.cuda.synchronize()
        except torch.cuda.OutOfMemoryError:
            torch.cuda.empty_cache()
            if budget // 2 < max_tokens:
                raise PermafrostError(
                    f"not even one text of {max_tokens} tokens fits the GPU beside the weights; lower --max-tokens or "
                    "--shard-size, or use a larger card"
                ) from None
            budget //= 2
        else:
            del ring, slab
            return budget
