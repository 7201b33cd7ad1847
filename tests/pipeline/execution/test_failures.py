"""What rows, processes and units can do to a job, and what the job makes of it."""

import json
import logging
import os
from pathlib import Path

import pytest
from engine_double import Echo, EchoBackend
from fixture_types import Job, ReadOutput, WriteParquet
from trap_double import Company, TrapBackend, trap_backend

from engine import ModelError
from pipeline.commits.commit import read_commits
from pipeline.commits.failed import read_failures
from pipeline.config import GenerationConfig
from pipeline.errors import JobError, UnitsFailed
from pipeline.preparing.backend import ModelIdentity
from pipeline.rows.row_generator import MOST_QUARANTINED
from pipeline.run import run_job
from pipeline.storage.storage import Storage

pytestmark = pytest.mark.usefixtures("cluster")


def test_a_row_that_kills_is_found_and_costs_nobody_else_a_generation(
    tmp_path: Path, job: Job, write_parquet: WriteParquet, read_output: ReadOutput
) -> None:
    write_parquet(tmp_path / "in/a.parquet", {"id": range(2), "text": ["row 0", "row 1 KILL"]})
    config = job(rows_per_unit=2, max_new_tokens=20)
    totals = run_job(config, trap_backend(tmp_path)).totals
    good, bad = read_output(config.output).to_pylist()
    assert (good["generation"], good["error"], bad["generation"]) == ("row 0", None, None)
    assert bad["error"].startswith("its process died 2 times with this row alone (SYSTEM_ERROR: ")
    assert (totals.rows, totals.errors) == (2, 1)


@pytest.mark.slow
def test_rows_that_kill_raise_or_break_the_device_cost_nobody_else_a_generation(
    tmp_path: Path, job: Job, write_parquet: WriteParquet, read_output: ReadOutput
) -> None:
    texts = [f"row {row}" for row in range(6)]
    texts[1], texts[2], texts[5] = "row 1 RAISE", "row 2 KILL", "row 5 BREAK"
    write_parquet(tmp_path / "in/a.parquet", {"id": range(6), "text": texts})
    config = job(rows_per_unit=2, max_new_tokens=20)
    totals = run_job(config, trap_backend(tmp_path)).totals
    rows = read_output(config.output).to_pylist()
    assert [row["id"] for row in rows] == list(range(6))
    assert [row["generation"] for row in rows] == [None if row in (1, 2) else texts[row] for row in range(6)]
    assert rows[1]["error"] == "ValueError: cannot generate for 'row 1 RAISE'"
    assert rows[2]["error"].startswith("its process died 2 times with this row alone (SYSTEM_ERROR: ")
    assert (totals.rows, totals.errors) == (6, 2)
    assert json.loads((tmp_path / "out/_SUCCESS.json").read_text())["totals"]["errors"] == 2


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_row_that_kills_its_reader_costs_few_units_more_than_their_reading(
    tmp_path: Path, job: Job, write_parquet: WriteParquet, read_output: ReadOutput, caplog: pytest.LogCaptureFixture
) -> None:
    """Though 160 of them are read together: those before it come out, those behind it do not."""
    texts = [f"row {row}" for row in range(320)]
    texts[101] += " POISON"
    write_parquet(tmp_path / "in/a.parquet", {"id": range(320), "text": texts})
    config = job(rows_per_unit=2, max_new_tokens=20)
    caplog.set_level("WARNING")
    totals = run_job(config, trap_backend(tmp_path)).totals
    rows = read_output(config.output).to_pylist()
    assert [row["id"] for row in rows if row["error"]] == [101]
    assert rows[101]["error"].startswith("its process died 2 times with this row alone (")
    assert (totals.rows, totals.errors) == (320, 1)
    lost = [int(record.message.split()[0]) for record in caplog.records if "were lost" in record.message]
    assert 110 <= lost[0] <= 160
    assert lost[1] <= 64
    assert lost[2] <= 4
    assert len(lost) == 3
    assert sum("keeps losing its process" in record.message for record in caplog.records) <= 4


def test_replicas_join_a_run_that_began_with_fewer(tmp_path: Path, job: Job, write_parquet: WriteParquet) -> None:
    """Neither would end its first unit without the other."""
    write_parquet(tmp_path / "in/a.parquet", {"id": range(12), "text": ["row"] * 12})
    (meeting := tmp_path / "meeting").mkdir()
    config = job(rows_per_unit=1, batch_size=1, replicas=2, min_replicas=1, threads_per_replica=1)
    assert run_job(config, EchoBackend(Company(folder=str(meeting)))).totals.rows == 12
    assert len(list(meeting.iterdir())) == 2


def test_a_unit_that_keeps_failing_is_recorded_and_retried_by_the_next_session(
    tmp_path: Path, job: Job, write_parquet: WriteParquet, read_output: ReadOutput
) -> None:
    bad = MOST_QUARANTINED + 1  # rows one after the other: not their fault
    texts = [f"row {row}" for row in range(2 * bad)] + [f"RAISE {row}" for row in range(bad)]
    write_parquet(tmp_path / "in/a.parquet", {"id": range(3 * bad), "text": texts})
    config = job(rows_per_unit=bad, unit_attempts=2)
    with pytest.raises(UnitsFailed) as ended:
        run_job(config, trap_backend(tmp_path))
    said = str(ended.value)
    assert f"1 of 3 units ({bad} rows) failed" in said
    assert f"ValueError: cannot generate for 'RAISE {bad - 1}'" in said
    assert "start the job again to retry only those" in said
    (failed,) = read_failures(Storage(config.output))
    assert (failed.unit, failed.start, failed.rows, failed.attempts) == (f"00000-{2 * bad:09d}", 2 * bad, bad, 2)
    assert len(read_commits(Storage(config.output))) == 2
    assert not (tmp_path / "out/_SUCCESS.json").exists()

    assert run_job(config, EchoBackend(Echo())).rows_resumed == 2 * bad
    assert read_output(config.output)["id"].to_pylist() == list(range(3 * bad))
    assert read_failures(Storage(config.output)) == []
    assert (tmp_path / "out/_SUCCESS.json").exists()


@pytest.mark.slow
def test_a_file_that_became_unreadable_costs_its_own_units_only(
    tmp_path: Path, job: Job, write_parquet: WriteParquet
) -> None:
    for name in ("a", "b"):
        write_parquet(tmp_path / f"in/{name}.parquet", {"text": ["x"] * 4})

    class Spoiler(EchoBackend):
        """The tokenizer is asked for after the plan and before the first read."""

        def identity(self, config: GenerationConfig) -> ModelIdentity:
            path = tmp_path / "in/b.parquet"
            status = path.stat()
            path.write_bytes(path.read_bytes()[:20].ljust(status.st_size, b"\0"))
            os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))  # else it counts as another file
            return super().identity(config)

    with pytest.raises(UnitsFailed, match=r"2 of 4 units \(4 rows\) failed.*b\.parquet' cannot be read"):
        run_job(job(rows_per_unit=2), Spoiler())
    assert [commit.path.rsplit("/", 1)[-1] for commit in read_commits(Storage(str(tmp_path / "out")))] == [
        "a.parquet",
        "a.parquet",
    ]


def test_an_engine_that_cannot_start_ends_the_job_in_its_own_words_and_no_others(
    tmp_path: Path, job: Job, write_parquet: WriteParquet, caplog: pytest.LogCaptureFixture
) -> None:
    write_parquet(tmp_path / "in/a.parquet", {"text": ["x"]})
    rays = logging.getLogger("ray.data.exceptions")  # who hands on to nobody
    rays.addHandler(caplog.handler)
    with pytest.raises(ModelError, match=r"^too little memory$"):
        run_job(job(), TrapBackend(refuses="too little memory"))
    rays.removeHandler(caplog.handler)
    assert rays.name not in [record.name for record in caplog.records]


@pytest.mark.slow
def test_replicas_that_die_while_they_load_the_model_end_the_job(
    tmp_path: Path, job: Job, write_parquet: WriteParquet
) -> None:
    write_parquet(tmp_path / "in/a.parquet", {"text": ["x"]})
    with pytest.raises(JobError, match=r"died . times in a row while they loaded model"):
        run_job(job(), TrapBackend(dies_loading=True))
