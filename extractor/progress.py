"""What a person sees while a run goes on: one bar on a terminal, else a line every 30 seconds; all on stderr."""

from __future__ import annotations

import sys
import threading
import time

from tqdm import tqdm

from permafrost.extractor.worker import Progress

LINE_EVERY = 30.0


def say(message: str) -> None:
    """A line for the user, above the bar if there is one."""
    tqdm.write(message, file=sys.stderr)


class ProgressBar:
    """Counts sentences, tokens and bytes; safe to update from several threads."""

    def __init__(self, rows: int, done: int, quiet: bool) -> None:
        self.sentences = self.tokens = self.written = self.shards = 0
        self._rows, self._done = rows, done
        self._began = self._said = time.perf_counter()
        self._lock = threading.Lock()
        self._lines = not quiet and not sys.stderr.isatty()
        self._bar = tqdm(
            total=rows,
            initial=done,
            unit=" sentences",
            unit_scale=True,
            smoothing=0.05,
            dynamic_ncols=True,
            file=sys.stderr,
            disable=quiet or self._lines,
        )

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._began

    def update(self, step: Progress) -> None:
        """Take one step into account."""
        with self._lock:
            self.sentences += step.sentences
            self.tokens += step.tokens
            self.written += step.written
            self.shards += step.shard is not None
            seconds = max(self.seconds, 1e-9)
            rates = f"{self.tokens / seconds:,.0f} tokens/s, {self.written / seconds / 1e9:.3f} GB/s"
            self._bar.set_postfix_str(rates, refresh=False)
            self._bar.update(step.sentences)
            if self._lines and time.perf_counter() - self._said >= LINE_EVERY:
                self._said = time.perf_counter()
                self._line(rates, seconds)

    def _line(self, rates: str, seconds: float) -> None:
        done = self._done + self.sentences
        speed = self.sentences / seconds
        left = (self._rows - done) / max(speed, 1e-9)
        print(
            f"{done:,} of {self._rows:,} sentences ({done / self._rows:.0%}), {speed:,.1f} sentences/s, {rates}, "
            f"{tqdm.format_interval(left)} left",
            file=sys.stderr,
            flush=True,
        )

    def close(self) -> None:
        self._bar.close()
