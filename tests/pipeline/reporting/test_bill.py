"""Cost ceilings: what counts, and that a job which has spent what it may stops, and can be resumed."""

from pathlib import Path

import pytest
from engine_double import Echo, EchoBackend, NoEngineBackend
from fixture_types import Job, ReadOutput, WriteParquet
from pydantic import ValidationError

from pipeline.commits.commit import Commit, Totals, read_commits, total
from pipeline.errors import JobStopped
from pipeline.execution import session
from pipeline.reporting.bill import bill, check_ceiling, reached_ceiling
from pipeline.run import run_job
from pipeline.storage.storage import Storage

PARTS = ("flops_prompt", "flops_decode", "flops_prefix", "flops_padding", "flops_audit")


@pytest.mark.parametrize("part", PARTS)
def test_every_flop_that_is_computed_counts(job: Job, part: str) -> None:
    totals = Totals(**{part: 1000})  # type: ignore[arg-type]
    assert reached_ceiling(job(max_flops=1000), totals) == "1000 FLOPs of max_flops 1000"
    assert not reached_ceiling(job(max_flops=1001), totals)


def test_what_full_depth_would_have_cost_does_not_count(job: Job) -> None:
    assert not reached_ceiling(job(max_flops=1), Totals(flops_full_depth=1000))


def test_gpu_hours_are_those_of_the_bill(job: Job) -> None:
    totals = Totals(seconds=3 * 3600)
    halves, ceiling = Totals(seconds=3 * 3600, gpu_seconds=1.5 * 3600), job(max_gpu_hours=1.5)
    assert bill(None, halves) == {"GPU-hours": "1.5000"}
    assert reached_ceiling(ceiling, halves) == "1.5 GPU-hours of max_gpu_hours 1.5"
    assert not reached_ceiling(job(max_gpu_hours=1.6), halves)
    assert reached_ceiling(job(max_gpu_hours=3), totals) == "3 replica-hours of max_gpu_hours 3"
    resumed_on_fewer_gpus = halves + Totals(seconds=3600, gpu_seconds=0.5 * 3600)
    assert bill(None, resumed_on_fewer_gpus) == {"GPU-hours": "2.0000"}


def test_without_a_ceiling_none_is_reached(job: Job) -> None:
    assert not reached_ceiling(job(), Totals(flops_decode=10**30, seconds=1e12))


def test_the_message_names_spent_ceiling_rows_left_and_the_way_on(job: Job) -> None:
    with pytest.raises(JobStopped) as stopped:
        check_ceiling(job(max_flops=1e18), Totals(rows=1000, flops_decode=12 * 10**17), 3500)
    assert str(stopped.value) == (
        "1.2e+18 FLOPs of max_flops 1e+18 are spent, with 2,500 of 3,500 rows left: start the job again to "
        "resume it with a higher ceiling or without one"
    )


@pytest.mark.parametrize("option", ["max_flops", "max_gpu_hours"])
def test_a_ceiling_of_nothing_is_a_mistake(job: Job, option: str) -> None:
    with pytest.raises(ValidationError, match="greater than 0"):
        job(**{option: 0})


ROWS, PER_UNIT, ROW_FLOPS = 400, 4, 7 * 130  # Echo: 100 for each byte of a prompt and 30 for each of its answer
UNIT_FLOPS = PER_UNIT * ROW_FLOPS + 7  # and 7 of padding for each batch


@pytest.fixture
def short_rows(tmp_path: Path, write_parquet: WriteParquet) -> None:
    write_parquet(tmp_path / "in/a.parquet", {"id": range(ROWS), "text": [f"row {row:03d}" for row in range(ROWS)]})


@pytest.mark.slow
@pytest.mark.usefixtures("cluster", "short_rows")
def test_a_job_stops_at_its_ceiling_and_goes_on_with_a_higher_one(
    job: Job, read_output: ReadOutput, monkeypatch: pytest.MonkeyPatch
) -> None:
    received: list[Commit] = []
    meter = session.RunMeter.committed
    monkeypatch.setattr(
        session.RunMeter,
        "committed",
        lambda self, commit, totals: (received.append(commit), meter(self, commit, totals)),
    )
    config = job(rows_per_unit=PER_UNIT, batch_size=PER_UNIT, max_flops=3 * UNIT_FLOPS)
    with pytest.raises(JobStopped, match=r"FLOPs of max_flops 10941 are spent, with \d+ of 400 rows left"):
        run_job(config, EchoBackend(Echo(seconds_per_batch=0.5)))
    spent = total(read_commits(Storage(config.output)))
    # Units in flight finished: two of the replica, and what its queue had begun to hand it.
    assert 3 * UNIT_FLOPS <= spent.flops_spent < ROWS / PER_UNIT * UNIT_FLOPS
    # The job heard of each of them before it ended.
    assert len(received) == spent.rows // PER_UNIT

    # Started again as it is, it stops before an engine is loaded.
    with pytest.raises(JobStopped, match="are spent"):
        run_job(config, NoEngineBackend())
    result = run_job(config.model_copy(update={"max_flops": None}), EchoBackend())
    assert result.rows_resumed == spent.rows
    assert read_output(config.output)["id"].to_pylist() == list(range(ROWS))


@pytest.mark.slow
@pytest.mark.usefixtures("cluster", "short_rows")
def test_a_ceiling_that_the_last_units_reach_ends_nothing(job: Job) -> None:
    config = job(rows_per_unit=ROWS, max_flops=1)
    assert run_job(config, EchoBackend()).totals.rows == ROWS
    assert run_job(config, NoEngineBackend()).totals.rows == ROWS
