"""What a run of many nights keeps, refuses, spends, plans and reports."""

import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from engine_double import Echo, EchoBackend, NoEngineBackend
from fixture_types import Job, WriteParquet
from inline_session import InlineSession, run_until
from pydantic import ValidationError

from pipeline import run
from pipeline.commits.failed import read_failures, record_failure
from pipeline.errors import JobError, JobStopped, NothingToDo, UnitsFailed
from pipeline.forecaster import forecast_run
from pipeline.inputs.known_files import read_known_files
from pipeline.inspection import inspect, verify
from pipeline.reporting.forecast import write_forecast
from pipeline.run import run_job
from pipeline.storage.storage import Storage
from tests.pipeline.preparing.nights import Put, by, everything, generations, in_order, snapshot, texts


def test_the_commits_of_a_snapshot_are_found_again(
    nightly: Job, put: Put, inline: type[InlineSession], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.commits.commit.SNAPSHOT_EVERY", 3)
    config = nightly()
    for night in range(4):
        put(f"file {night}", 7)
        put("changing", 5, f"v{night}")
        run_job(config, by(f"night {night}"))
    assert Path(config.output, "_snapshot.json.gz").exists()
    assert inline.units_done == 4 * (2 + 2)
    parts = [texts(f"night {night}", f"file {night}", 7) for night in range(4)]
    assert generations(config.output) == everything(*parts, texts("night 3", "changing", 5, "v3"))


def test_the_report_of_a_night_that_failed_counts_each_file_once(
    nightly: Job, put: Put, inline: type[InlineSession], monkeypatch: pytest.MonkeyPatch
) -> None:
    config, told = nightly(), []
    put("a", 6)
    put("b", 9)
    run_job(config, by("one"))
    put("b", 10, "v2")

    def fails(self: InlineSession, pending: Any) -> Any:
        done = session(self, pending[1:])
        done.failed = [record_failure(Storage(config.output), pending[0], 3, "no")]
        return done

    session, write = inline.run, run.write_report
    monkeypatch.setattr(inline, "run", fails)
    monkeypatch.setattr(run, "write_report", lambda *what: (told.append(what[5]), write(*what)))
    with pytest.raises(UnitsFailed):
        run_job(config, by("two"))
    (totals,) = told
    assert totals.rows == inspect(Storage(config.output)).totals.rows == 6 + (10 - 4)
    monkeypatch.setattr(inline, "run", session)
    run_job(config, by("two"))
    assert generations(config.output) == everything(texts("one", "a", 6), texts("two", "b", 10, "v2"))


def test_nights_that_come_to_more_units_than_a_manifest_lists_are_refused_by_name(
    nightly: Job, put: Put, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(run, "MOST_UNITS", 3)
    config = nightly()
    put("a", 8, "old")
    run_job(config, by("one"))
    put("a", 8)  # whose units take the place of the old ones
    run_job(config, by("one"))
    (tmp_path / "in/a.parquet").unlink()
    put("b", 8)
    before = snapshot(config.output)
    with pytest.raises(JobError, match="would hold more than 3 work units"):
        run_job(config, NoEngineBackend())
    assert {path for path in snapshot(config.output) if path not in before} == set()
    assert Path(config.output, "_SUCCESS.json").exists()


def test_failures_of_a_file_that_was_mended_are_forgotten(
    nightly: Job, put: Put, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = nightly()
    put("a", 6)
    put("b", 3)

    def fails(self: InlineSession, pending: Any) -> Any:
        done = session(self, [unit for unit in pending if "b.parquet" not in unit.path])
        failed = [unit for unit in pending if "b.parquet" in unit.path]
        done.failed = [record_failure(Storage(config.output), unit, 3, "unreadable") for unit in failed]
        return done

    session = InlineSession.run
    with monkeypatch.context() as patch:
        patch.setattr(InlineSession, "run", fails)
        with pytest.raises(UnitsFailed, match=r"1 of 3 units \(3 rows\) failed"):
            run_job(config, by("one"))
    assert inspect(Storage(config.output)).state == "incomplete: some units failed"
    put("b", 4, "mended")
    run_job(config, by("two"))
    assert read_failures(Storage(config.output)) == []
    assert generations(config.output) == everything(texts("one", "a", 6), texts("two", "b", 4, "mended"))


@pytest.mark.parametrize("options", [{}, {"keep_columns": ["text", "lang", "n"]}])
def test_a_run_keeps_the_columns_that_it_began_with_whatever_a_night_brings(
    nightly: Job, write_parquet: WriteParquet, tmp_path: Path, options: dict[str, Any]
) -> None:
    first = {"text": ["one"], "lang": ["en"], "n": pa.array([1], pa.int64())}
    write_parquet(tmp_path / "in/a.parquet", first)
    config = nightly(**options)
    run_job(config, EchoBackend())
    (tmp_path / "in/a.parquet").unlink()
    write_parquet(tmp_path / "in/b.parquet", {"text": ["two"], "n": pa.array([2], pa.int32())})
    run_job(config, EchoBackend())
    files = [Path(config.output, commit.file) for commit in in_order(config.output)]
    rows = [row for file in files for row in pq.read_table(file).select(["text", "lang", "n"]).to_pylist()]
    assert rows == [{"text": "one", "lang": "en", "n": 1}, {"text": "two", "lang": None, "n": 2}]
    assert len({pq.read_schema(file) for file in files}) == 1
    write_parquet(tmp_path / "in/c.parquet", {"text": ["three"], "n": pa.array([0.5])})
    with pytest.raises(JobError, match=r"column 'n' is int64 in the output but double in '.*c\.parquet'"):
        run_job(config, NoEngineBackend())
    write_parquet(tmp_path / "in/c.parquet", {"text": ["three"], "lang": pa.array(["de"], pa.large_string())})
    run_job(config, EchoBackend())
    written = [Path(config.output, commit.file) for commit in in_order(config.output)]
    assert [pq.read_schema(file).field("lang").type for file in written] == [pa.string()] * 3
    write_parquet(tmp_path / "in/d.parquet", {"text": ["four"], "n": pa.array([1], pa.decimal128(20, 2))})
    with pytest.raises(JobError, match=r"column 'n' is int64 in the output but decimal128\(20, 2\) in '.*d\.parquet'"):
        run_job(config, NoEngineBackend())


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"seed": 1}, "sampling"),
        ({"rows_per_unit": 5}, "rows_per_unit"),
        ({"keep_columns": []}, r"input: input\.kept"),
        ({"incremental": False}, "input"),
        ({"input": "in/a.parquet"}, r"input: input\.root"),
    ],
)
def test_other_settings_are_another_run(
    nightly: Job, put: Put, tmp_path: Path, change: dict[str, Any], part: str
) -> None:
    put("a", 6)
    run_job(nightly(), by("one"))
    if "input" in change:
        change = {"input": str(tmp_path / change["input"])}
    with pytest.raises(JobError, match=f"which differs in {part}"):
        run_job(nightly(**change), NoEngineBackend())


def test_a_start_without_incremental_is_told_to_name_it(nightly: Job, put: Put) -> None:
    put("a", 6)
    run_job(nightly(), by("one"))
    with pytest.raises(
        JobError, match=r"input\.incremental true -> null; .*, start it with --incremental to resume it"
    ):
        run_job(nightly(incremental=False), NoEngineBackend())


def test_a_run_that_is_not_incremental_is_left_as_it_is(nightly: Job, put: Put) -> None:
    put("a", 6)
    run_job(nightly(incremental=False), by("one"))
    before = snapshot(nightly().output)
    with pytest.raises(JobError, match=r"belongs to run \w+, which is not incremental: leave --incremental out"):
        run_job(nightly(), NoEngineBackend())
    assert snapshot(nightly().output) == before
    run_job(nightly(fresh=True), by("two"))


def test_fresh_forgets_what_was_done(nightly: Job, put: Put) -> None:
    put("a", 6)
    put("gone", 2)
    run_job(nightly(), by("one"))
    Path(nightly().input, "gone.parquet").unlink()
    run_job(nightly(fresh=True, rows_per_unit=3), by("two"))
    assert generations(nightly().output) == texts("two", "a", 6)
    storage = Storage(nightly().output)
    assert list(read_known_files(storage) or {}) == ["a.parquet"]
    run_job(nightly(fresh=True, incremental=False), by("three"))
    assert read_known_files(storage) is None
    assert verify(storage, inspect(storage)) == []


def test_a_limit_is_a_contradiction(nightly: Job) -> None:
    with pytest.raises(ValidationError, match="limit 5 cannot be combined with incremental"):
        nightly(limit=5)


def test_a_ceiling_is_each_nights_own(nightly: Job, put: Put) -> None:
    """Units take an hour. Sessions here look at no ceiling, so what is checked before they start is all there is."""
    config = nightly(max_gpu_hours=2.0)
    put("a", 12)
    run_job(config, by("one"))
    put("b", 4)
    run_job(config, by("two"))
    assert generations(config.output) == everything(texts("one", "a", 12), texts("two", "b", 4))
    whole = nightly(incremental=False, output=f"{config.output} of a plain run", max_gpu_hours=2.0)
    run_until(whole, by("one"), units=2)
    with pytest.raises(JobStopped, match=r"2 replica-hours of max_gpu_hours 2 are spent, with 8 of 16 rows left"):
        run_job(whole, NoEngineBackend())


@pytest.mark.usefixtures("cluster")
def test_on_ray_a_night_stops_at_its_ceiling_and_the_next_goes_on(nightly_on_ray: Job, put: Put) -> None:
    put("a", 400)  # more than are done before a busy machine tells of the first commit
    put("b", 3)
    config = nightly_on_ray(rows_per_unit=4, batch_size=4, max_flops=1.0, keep_columns=["text"])
    backend = EchoBackend(Echo("one: ", seconds_per_batch=0.5))
    with pytest.raises(JobStopped, match=r"with \d+ of 403 rows left: start the job again to go on with as much again"):
        run_job(config, backend)
    first = inspect(Storage(config.output)).totals.rows
    assert 4 <= first < 403
    with pytest.raises(JobStopped, match=f"of {403 - first} rows left"):
        run_job(config, backend)
    assert inspect(Storage(config.output)).totals.rows > first


def test_a_plan_is_of_what_is_new_and_the_report_compares_it_with_that(
    nightly: Job, put: Put, caplog: pytest.LogCaptureFixture
) -> None:
    put("a", 6)
    config = nightly(plan_output_tokens=8)
    storage = Storage(config.output)
    assert forecast_run(config, NoEngineBackend()).rows == 6
    run_job(config, by("one"))
    with pytest.raises(NothingToDo, match=r"nothing is new in .*: all 1 files are done$"):
        forecast_run(config, NoEngineBackend())
    damaged = Path(config.input, "damaged.parquet")
    damaged.write_bytes(b"PAR1")
    with pytest.raises(NothingToDo, match=r": all 1 files that can be read are done, 1 cannot be read$"):
        forecast_run(config, NoEngineBackend())
    assert "damaged.parquet' cannot be read" in caplog.text
    with pytest.raises(UnitsFailed):
        run_job(config, NoEngineBackend())
    report = Path(config.output, "report.html")
    assert "not complete: 1 whole file failed" in " ".join(report.read_text().split())
    damaged.unlink()
    run_job(config, NoEngineBackend())
    assert "not complete" not in report.read_text()
    assert forecast_run(nightly(fresh=True), NoEngineBackend()).rows == 6
    put("b", 9)
    forecast = forecast_run(config, NoEngineBackend())
    assert (forecast.rows, forecast.work_units, forecast.prompt_tokens) == (9, 3, 9 * len("b v1 0"))
    write_forecast(storage, forecast)
    run_job(config, by("two"))
    report = " ".join(Path(config.output, "report.html").read_text().split())
    assert '<th scope="row">rows</th><td>9</td><td>9</td><td>1.000</td>' in report
    assert "15 rows" in report
    put("c", 2)
    run_job(config, by("three"))
    assert "Plan against actual" not in Path(config.output, "report.html").read_text()


def test_a_plan_is_silent_about_a_file_that_became_unreadable_when_it_was_done(
    nightly: Job, put: Put, caplog: pytest.LogCaptureFixture
) -> None:
    put("a", 6)
    put("b", 2)
    config = nightly(plan_output_tokens=8)
    run_job(config, by("one"))
    path = Path(config.input, "a.parquet")
    status = path.stat()
    path.write_bytes(bytes(status.st_size))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    with pytest.raises(NothingToDo, match=r": all 2 files are done$"):
        forecast_run(config, NoEngineBackend())
    put("c", 3)
    caplog.clear()
    assert forecast_run(config, NoEngineBackend()).rows == 3
    assert "cannot be read" not in caplog.text
