"""The progress line says what is known, and nothing that is not."""

import io
import sys
import time
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.commits.commit import Commit, Totals
from pipeline.monitoring import progress
from pipeline.monitoring.board import Counts
from pipeline.monitoring.progress import ProgressReporter


class StillBoard:
    """Says what it was told to."""

    def __init__(self, counts: Counts) -> None:
        self.counts = counts

    def read(self, committed: list[str]) -> Counts:
        return self.counts


def line(counts: Counts, resumed: Totals | None = None, *commits: Totals) -> str:
    board: Any = StillBoard(counts)
    so_far = resumed or Totals()
    reporter = ProgressReporter(board, 100, so_far)
    for number, totals in enumerate(commits):
        so_far += totals
        commit = Commit(f"00000-{number:09d}", "a", "data/x.parquet", "s", 1, "in", 0, totals=totals)
        reporter.committed(commit, so_far)
    return reporter._line()[1]


def test_before_a_row_is_done_it_says_what_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:  # on a busy machine a second may pass
        patch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: 7.0))
        assert line(Counts()) == "loading the model on the replicas, 0 s so far"
    assert line(Counts(replicas=1, seconds=7.0)) == "0/100 rows | first batches under way, 7 s so far"
    assert line(Counts(replicas=1, seconds=7.0), Totals(rows=40)).startswith("40/100 rows | first batches")


def test_rates_and_time_left_are_this_sessions_and_savings_wait_for_a_commit() -> None:
    counts = Counts(replicas=1, seconds=10.0, rows=20, tokens=400)
    assert line(counts) == "20/100 rows | 2.0 rows/s | 40 output tokens/s | 0:00:40 left"
    resumed = Totals(rows=40, flops_prompt=50, flops_decode=25, flops_full_depth=100)
    said = line(counts, resumed)
    assert said == "60/100 rows | 2.0 rows/s | 40 output tokens/s | FLOPs saved 25.0% | 0 errors | 0:00:20 left"


def test_when_all_rows_are_generated_it_says_what_still_takes_time() -> None:
    said = line(Counts(replicas=1, seconds=10.0, rows=100, tokens=400))
    assert said == "100/100 rows | 10.0 rows/s | 40 output tokens/s | last units being audited and written"


@pytest.mark.parametrize("errors", [0, 3])
def test_what_is_committed_counts_with_its_errors(errors: int) -> None:
    done = Totals(rows=10, errors=errors, generated_tokens=50, flops_prompt=60, flops_decode=30, flops_full_depth=100)
    said = line(Counts(replicas=1, seconds=10.0), None, done)
    assert said == f"10/100 rows | 1.0 rows/s | 5 output tokens/s | FLOPs saved 10.0% | {errors} errors | 0:01:30 left"


def test_a_board_that_was_started_anew_does_not_make_a_job_that_goes_on_one_that_loads() -> None:
    done = Totals(rows=10, generated_tokens=50, flops_prompt=60, flops_decode=30, flops_full_depth=100)
    assert line(Counts(), None, done).startswith("10/100 rows | ")


def test_without_a_terminal_it_is_a_line_in_the_log_every_ten_seconds(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    caplog.set_level("INFO", "pipeline")
    board: Any = StillBoard(Counts(replicas=1, seconds=10.0, rows=20, tokens=400))
    reporter = ProgressReporter(board, 100, Totals())
    waited: list[float] = []
    monkeypatch.setattr(reporter._done, "wait", lambda seconds: (waited.append(seconds), len(waited) > 3)[1])
    with reporter:
        reporter._thread.join()
    assert waited == [10.0] * 4
    assert caplog.messages == ["20/100 rows | 2.0 rows/s | 40 output tokens/s | 0:00:40 left"] * 3


def test_the_bar_is_drawn_on_the_terminal_wherever_the_results_go(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    board: Any = StillBoard(Counts(replicas=1, seconds=10.0, rows=20, tokens=400))
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(progress, "TERMINAL_INTERVAL_S", 0.01)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")
    with ProgressReporter(board, 100, Totals()):
        deadline = time.monotonic() + 30
        while "2.0 rows/s" not in terminal.getvalue() and time.monotonic() < deadline:
            time.sleep(0.01)
    assert "2.0 rows/s" in terminal.getvalue()
    assert capsys.readouterr().out == ""
