"""How far a job is: rows, rates, FLOPs saved and time left, on a terminal or in plain logs."""

from __future__ import annotations

import logging
import sys
import threading
import time
from types import TracebackType
from typing import Any, NamedTuple

import ray
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

from pipeline.commit import Commit, Totals

log = logging.getLogger(__name__)

LOG_INTERVAL_S = 10.0
TERMINAL_INTERVAL_S = 0.5


class Counts(NamedTuple):
    """What replicas have done in units that are not committed yet."""

    replicas: int  # ready so far
    seconds: float  # since the first of them was
    rows: int
    tokens: int


class _BoardActor:
    """Counts the batches of units that are not committed yet."""

    def __init__(self) -> None:
        self._replicas = 0
        self._first_ready = 0.0
        self._units: dict[str, tuple[int, int]] = {}

    def ready(self) -> None:
        self._first_ready = self._first_ready or time.monotonic()
        self._replicas += 1

    def batch_done(self, unit: str, rows: int, tokens: int) -> None:
        done = self._units.get(unit, (0, 0))
        self._units[unit] = (done[0] + rows, done[1] + tokens)

    def read(self, committed: list[str]) -> Counts:
        """Counts in flight, after forgetting units committed since."""
        for unit in committed:
            self._units.pop(unit, None)
        rows, tokens = (sum(counts) for counts in zip(*self._units.values(), strict=True)) if self._units else (0, 0)
        return Counts(self._replicas, time.monotonic() - self._first_ready if self._replicas else 0.0, rows, tokens)


class Board:
    """Handle to the counter that replicas report their batches to. Never waits, so it costs generation nothing."""

    def __init__(self) -> None:
        self._actor: Any = ray.remote(num_cpus=0)(_BoardActor).remote()

    def ready(self) -> None:
        self._actor.ready.remote()

    def batch_done(self, unit: str, rows: int, tokens: int) -> None:
        self._actor.batch_done.remote(unit, rows, tokens)

    def read(self, committed: list[str]) -> Counts:
        """Counts of what is in flight; `committed` names units to forget."""
        counts: Counts = ray.get(self._actor.read.remote(committed))
        return counts


class ProgressReporter:
    """Shows progress while the driver waits for commits. Use as a context manager."""

    def __init__(self, board: Board, total_rows: int, resumed: Totals) -> None:
        self._board = board
        self._total_rows = total_rows
        self._resumed_rows = resumed.rows
        self._totals = Totals()
        self._totals.add(resumed)
        self._generated_before = resumed.generated_tokens
        self._fresh: list[str] = []  # units committed since the board was last read
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._terminal = sys.stderr.isatty()
        self._thread = threading.Thread(target=self._watch, name="progress", daemon=True)

    def committed(self, commit: Commit) -> None:
        with self._lock:
            self._totals.add(commit.totals)
            self._fresh.append(commit.unit)

    def __enter__(self) -> ProgressReporter:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        if not self._terminal:
            while not self._done.wait(LOG_INTERVAL_S):
                log.info("%s", self._line()[1])
            return
        columns = (BarColumn(), TaskProgressColumn(), TextColumn("{task.description}"))
        with Progress(*columns, transient=True) as bar:
            task = bar.add_task("starting", total=self._total_rows)
            while not self._done.wait(TERMINAL_INTERVAL_S):
                rows, line = self._line()
                bar.update(task, completed=rows, description=line)

    def _line(self) -> tuple[int, str]:
        """(rows done, one line of text)."""
        with self._lock:
            fresh, self._fresh = self._fresh, []
            committed = Totals()
            committed.add(self._totals)
        try:
            flight = self._board.read(fresh)
        except ray.exceptions.RayError:
            return committed.rows, "progress is not available"  # the job goes on without it
        if not flight.replicas:
            return committed.rows, "starting replicas"
        elapsed = max(flight.seconds, 1e-9)
        rows = flight.rows + committed.rows
        row_rate = (rows - self._resumed_rows) / elapsed
        token_rate = (flight.tokens + committed.generated_tokens - self._generated_before) / elapsed
        left = _duration((self._total_rows - rows) / row_rate) if row_rate else "unknown"
        saved = committed.flops_full_depth - committed.flops
        share = saved / committed.flops_full_depth if committed.flops_full_depth else 0.0
        return rows, (
            f"{rows:,}/{self._total_rows:,} rows | {row_rate:.1f} rows/s | {token_rate:.0f} output tokens/s | "
            f"FLOPs saved {share:.1%} | {committed.errors} errors | {left} left"
        )


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}"
