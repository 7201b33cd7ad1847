"""How far a job is: rows, rates, FLOPs saved and time left, on a terminal or in plain logs."""

import logging
import sys
import threading
import time
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

from pipeline import logs
from pipeline.commits.commit import Commit, Totals
from pipeline.monitoring.board import Board
from pipeline.reporting.audit import audit_estimate

log = logging.getLogger(__name__)

LOG_INTERVAL_S = 10.0
TERMINAL_INTERVAL_S = 0.5


class ProgressReporter:
    """Shows progress while the driver waits for commits. Use as a context manager."""

    def __init__(self, board: Board, total_rows: int, resumed: Totals) -> None:
        self._board = board
        self._total_rows = total_rows
        self._resumed = self._totals = resumed
        self._fresh: list[str] = []  # units committed since the board was last read
        self._start = time.monotonic()
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._terminal = sys.stderr.isatty() and not logs.for_machines()
        self._thread = threading.Thread(target=self._watch, name="progress", daemon=True)

    def committed(self, commit: Commit, totals: Totals) -> None:
        """A unit is committed; `totals` are those of the run so far."""
        with self._lock:
            self._totals = totals
            self._fresh.append(commit.unit)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        if not self._terminal:
            while not self._done.wait(LOG_INTERVAL_S):
                log.info("%s", self._line()[1])
            return
        columns = (BarColumn(), TaskProgressColumn(), TextColumn("{task.description}"))
        with Progress(*columns, transient=True, console=Console(stderr=True)) as bar:
            task = bar.add_task("starting", total=self._total_rows)
            while not self._done.wait(TERMINAL_INTERVAL_S):
                rows, line = self._line()
                bar.update(task, completed=rows, description=line)

    def _line(self) -> tuple[int, str]:
        """(rows done, one line of text)."""
        with self._lock:
            fresh, self._fresh, committed = self._fresh, [], self._totals
        flight = self._board.read(fresh)
        rows = flight.rows + committed.rows
        since_start = time.monotonic() - self._start
        if not flight.replicas and rows == self._resumed.rows:
            return rows, f"loading the model on the replicas, {since_start:.0f} s so far"
        # A board that had to be started anew knows of no replica until another one begins.
        elapsed = max(flight.seconds if flight.replicas else since_start, 1e-9)
        if rows == self._resumed.rows:
            return rows, f"{rows:,}/{self._total_rows:,} rows | first batches under way, {elapsed:.0f} s so far"
        row_rate = (rows - self._resumed.rows) / elapsed
        token_rate = (flight.tokens + committed.generated_tokens - self._resumed.generated_tokens) / elapsed
        facts = [
            f"{rows:,}/{self._total_rows:,} rows", f"{row_rate:.1f} rows/s", f"{token_rate:.0f} output tokens/s"
        ]  # fmt: skip
        if committed.rows:  # what is known of committed units alone
            share = 1 - committed.flops / committed.flops_full_depth if committed.flops_full_depth else 0.0
            facts += [f"FLOPs saved {share:.1%}", f"{committed.errors} errors", audit_estimate(committed)]
        left = max(0, int((self._total_rows - rows) / row_rate))
        ends = f"{left // 3600}:{left // 60 % 60:02}:{left % 60:02} left"
        facts.append(ends if rows < self._total_rows else "last units being audited and written")
        return rows, " | ".join(filter(None, facts))
