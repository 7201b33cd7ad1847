"""Metrics: what a commit's totals say is what is counted."""

from collections import Counter as Tally
from typing import Any

import pytest

from engine import BatchStats
from pipeline.commits.commit import Commit, Totals
from pipeline.monitoring import metrics
from pipeline.monitoring.metrics import COUNTED, ReplicaMeter, RunMeter


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Values by metric, as Ray's own classes are given them: without a cluster it drops them silently."""
    values: dict[str, float] = Tally()

    def inc(self: Any, value: float = 1.0, tags: dict[str, str] | None = None) -> None:
        assert value > 0  # Ray refuses anything else
        values[self.info["name"]] += value

    def set_(self: Any, value: float, tags: dict[str, str] | None = None) -> None:
        values[self.info["name"]] = value

    monkeypatch.setattr(metrics.Counter, "inc", inc)
    monkeypatch.setattr(metrics.Gauge, "set", set_)
    return values


def commit(**totals: Any) -> Commit:
    return Commit("0", "a", "data/0.parquet", "", 1, "in.parquet", 0, totals=Totals(**totals))


def test_counters_are_the_sums_of_what_was_committed(recorded: dict[str, float]) -> None:
    meter, before = RunMeter("run", 100, 0), Totals(rows=40)
    for rows in (3, 4):
        unit = commit(rows=rows, errors=0, prompt_tokens=7, generated_tokens=5, flops_decode=11, audited=1,
                      audit_rouge=0.5)  # fmt: skip
        before += unit.totals
        meter.committed(unit, before)
    meter.failed()
    assert recorded["skipdecode_rows_total"] == 7
    assert recorded["skipdecode_output_tokens_total"] == 10
    assert recorded["skipdecode_flops_decode_total"] == 22
    assert "skipdecode_error_rows_total" not in recorded
    assert recorded["skipdecode_committed_rows"] == 47
    assert recorded["skipdecode_planned_rows"] == 100
    assert recorded["skipdecode_audit_rouge"] == 0.5
    assert recorded["skipdecode_unit_failures_total"] == 1


def test_what_earlier_sessions_committed_is_told_from_the_start(recorded: dict[str, float]) -> None:
    RunMeter("run", 100, 80)
    assert recorded["skipdecode_committed_rows"] == 80


def test_gauges_are_told_again_as_they_stand(recorded: dict[str, float]) -> None:
    """Ray forgets one that is set once: seen on a node's port, it is gone half a minute later."""
    meter, unit = RunMeter("run", 100, 40), commit(rows=3, audited=1, audit_rouge=0.5)
    meter.committed(unit, Totals(rows=40) + unit.totals)
    recorded.clear()
    meter.repeat()
    assert recorded == {"skipdecode_planned_rows": 100, "skipdecode_committed_rows": 43, "skipdecode_audit_rouge": 0.5}


def test_every_counted_field_is_one_of_the_totals() -> None:
    assert set(COUNTED) <= set(Totals.__dataclass_fields__)
    assert len({metric.name for metric in metrics.ALL}) == len(metrics.ALL)


def test_batch_fill_is_the_share_of_seats_that_had_a_row(recorded: dict[str, float]) -> None:
    ReplicaMeter("run").batch_done(
        BatchStats(
            samples=4,
            prompt_tokens=40,
            generated_tokens=10,
            steps=4,
            live_rows=8,
            seats=32,
            flops_padding=0,
            preemptions=3,
            cache_course=(5, 9, 7),
            prefill_seconds=0.5,
            decode_seconds=1.5,
        )
    )
    assert recorded["skipdecode_batch_fill"] == 0.25
    assert recorded["skipdecode_cache_bytes"] == 9
    assert recorded["skipdecode_preemptions_total"] == 3
    assert recorded["skipdecode_busy_seconds_total"] == 2
