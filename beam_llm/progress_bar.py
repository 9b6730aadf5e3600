"""Draws a run's progress on standard error: rows, rate, time left, open requests, and once why requests fail."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from typing import TextIO

from tqdm import tqdm

from beam_llm.progress import Counts

_LOOK_S, _FILE_S = 0.5, 15.0
"""Seconds between looks at the counts, and between lines of a log file, which stay."""

_UNKNOWN_COLUMNS = 80


def _columns(stream: TextIO) -> int:
    try:
        return os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError):  # like a terminal, but without a descriptor: a notebook's
        return 0


def estimate_rows(counts: Counts, total_bytes: int, limit: int | None = None) -> int | None:
    """Rows in the whole input, from the share of its bytes that has been read; None before the first row."""
    if not counts.bytes_read:
        return limit
    estimate = max(counts.rows, round(counts.rows * total_bytes / counts.bytes_read))
    return estimate if limit is None else min(limit, estimate)


class ProgressBar:
    """A bar for the time of a `with` block, drawn from its own thread.

    Args:
        totals: Asked for the counts at every drawing.
        total_bytes: Size of the input.
        limit: Rows wanted at most; None = all.
        stream: Where to draw.
    """

    def __init__(
        self, totals: Callable[[], Counts], total_bytes: int, limit: int | None = None, stream: TextIO = sys.stderr
    ) -> None:
        self._totals = totals
        self._total_bytes = total_bytes
        self._limit = limit
        self._stream = stream
        self._shown: set[str] = set()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._draw, name="beam_llm-progress-bar", daemon=True)

    def __enter__(self) -> ProgressBar:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _draw(self) -> None:
        if self._stream.isatty():
            self._draw_bar()
        else:
            self._write_lines()

    def _draw_bar(self) -> None:
        # A terminal that does not know its width says 0, of which tqdm would draw a bar of no characters.
        known = _columns(self._stream) > 0
        width = {"dynamic_ncols": True} if known else {"ncols": _UNKNOWN_COLUMNS}
        with tqdm(unit="row", desc="beam_llm", file=self._stream, smoothing=0.1, **width) as bar:
            ended = False
            while not ended:
                ended = self._ended.wait(_LOOK_S)
                counts = self._totals()
                for line in self._new_failures(counts):
                    bar.write(line, file=self._stream)
                bar.total = estimate_rows(counts, self._total_bytes, self._limit)
                bar.set_postfix(open=counts.open, sent=counts.sent, failed=counts.failed, refresh=False)
                bar.update(counts.finished - bar.n)
                bar.refresh()

    def _write_lines(self) -> None:
        started_s = told_s = time.monotonic()
        while not self._ended.wait(_LOOK_S):
            counts, now_s = self._totals(), time.monotonic()
            lines = self._new_failures(counts)
            if now_s - told_s >= _FILE_S:
                told_s = now_s
                total = estimate_rows(counts, self._total_bytes, self._limit)
                lines.append(progress_line(counts, total, now_s - started_s))
            for line in lines:
                print(line, file=self._stream, flush=True)

    def _new_failures(self, counts: Counts) -> list[str]:
        """A line for each kind of failure that has none yet, so that a run tells early why it fails, and once."""
        new = [kind for kind in counts.examples if kind not in self._shown]
        self._shown.update(new)
        return [f"beam_llm: requests fail ({kind}), for example {counts.examples[kind]}" for kind in new]


def progress_line(counts: Counts, total: int | None, elapsed_s: float) -> str:
    """One line for a log file.

    Args:
        counts: Of all worker processes.
        total: Rows expected; None if not known yet.
        elapsed_s: Since the start of the run.
    """
    rate = counts.finished / elapsed_s if elapsed_s else 0.0
    left = "?" if not total or not rate else tqdm.format_interval(max(0, total - counts.finished) / rate)
    of = "" if total is None else f" of about {total:,}"
    return (
        f"beam_llm: {counts.finished:,}{of} rows, {rate:,.1f} rows/s, {left} left; "
        f"{counts.open:,} open, {counts.sent:,} sent, {counts.failed:,} failed"
    )
