"""A job as a whole: every row once, resumable, and an output that says what it is."""

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from engine_double import LAYERS, SUMMED, Echo, EchoBackend, NoEngineBackend
from fixture_types import Job, ReadOutput, WriteParquet
from trap_double import Company

from pipeline import run
from pipeline.commits.commit import read_commits
from pipeline.config import JobConfig
from pipeline.errors import JobError, JobStopped
from pipeline.preparing import preparation
from pipeline.preparing.preparation import prepare_run
from pipeline.preparing.run_record import claim_output
from pipeline.run import RunResult, run_job
from pipeline.storage.storage import Storage

SCHEDULE = {"format": 1, "layers": LAYERS, "skip_order": ["a2", "m2"], "skipped": [[0, 1], [5, 2]], "name": "test"}
TEXTS = [f"file {file} row {row}" for file in range(3) for row in range(33)]
BAD_ROW = 40  # its text is null


@pytest.fixture(scope="module")
def finished(
    tmp_path_factory: pytest.TempPathFactory, cluster: None, write_parquet: WriteParquet
) -> tuple[JobConfig, RunResult]:
    """A run over three files of 33 rows in units of 10, one row of them bad."""
    folder = tmp_path_factory.mktemp("finished")
    texts = [None if row == BAD_ROW else text for row, text in enumerate(TEXTS)]
    for file in range(3):
        rows = slice(33 * file, 33 * file + 33)
        table = pa.table({"id": range(rows.start, rows.stop), "text": pa.array(texts[rows], pa.string())})
        write_parquet(folder / f"in/{file}.parquet", table, [5, 0, 28])
    (folder / "schedule.json").write_text(json.dumps(SCHEDULE))
    config = JobConfig(
        input=str(folder / "in"),
        output=str(folder / "out"),
        schedule=str(folder / "schedule.json"),
        prompt_format="raw",
        max_new_tokens=10,
        rows_per_unit=10,
        replicas=1,
    )
    return config, run_job(config, EchoBackend(Echo("first ")))


@pytest.fixture
def copied(finished: tuple[JobConfig, RunResult], tmp_path: Path) -> JobConfig:
    """The finished run with an output of one's own to do things to."""
    shutil.copytree(finished[0].output, tmp_path / "out")
    return finished[0].model_copy(update={"output": str(tmp_path / "out")})


def test_a_run_that_another_job_finished_meanwhile_keeps_its_manifest(
    copied: JobConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one's last commits come between the listing and the look at the manifest."""
    manifest = Path(copied.output, "_SUCCESS.json")
    before, listings = manifest.read_bytes(), [2, None]
    monkeypatch.setattr(run, "read_commits", lambda *of, **how: read_commits(*of, **how)[: listings.pop(0)])
    assert run_job(copied, NoEngineBackend()).totals.rows == 99
    assert manifest.read_bytes() == before
    assert not listings


@pytest.mark.usefixtures("inline")
def test_at_full_depth_nothing_is_audited_and_it_is_said(
    job: Job, write_parquet: WriteParquet, tmp_path: Path, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    write_parquet(tmp_path / "in/0.parquet", {"text": ["one"]})
    run_job(job(audit_fraction=0.5), EchoBackend())
    assert "and so nothing is audited: full depth would be compared with itself" in caplog.messages


def test_every_row_is_generated_exactly_once_and_in_order(
    finished: tuple[JobConfig, RunResult], read_output: ReadOutput
) -> None:
    config, result = finished
    rows = read_output(config.output)
    assert rows["id"].to_pylist() == list(range(99))
    expected = [None if row == BAD_ROW else f"first {text[:10]}" for row, text in enumerate(TEXTS)]
    assert rows["generation"].to_pylist() == expected
    assert (result.totals.rows, result.totals.errors, result.rows_resumed) == (99, 1, 0)


def test_the_manifest_says_what_ran_and_lists_every_file_with_its_rows_and_checksum(
    finished: tuple[JobConfig, RunResult],
) -> None:
    config, _ = finished
    output = Path(config.output)
    manifest = json.loads((output / "_SUCCESS.json").read_text())
    assert manifest["format"] == 1
    assert manifest["schedule"] == SCHEDULE
    assert manifest["sampling"]["max_new_tokens"] == 10
    assert manifest["model"][0] == config.model
    assert manifest["fingerprint"] == json.loads((output / "_run.json").read_text())["fingerprint"]
    assert [entry["unit"] for entry in manifest["commits"]] == [
        f"{file:05d}-{start:09d}" for file in range(3) for start in (0, 10, 20, 30)
    ]
    for entry in manifest["commits"]:
        content = (output / entry["file"]).read_bytes()
        assert entry["checksum"] == f"sha256:{hashlib.sha256(content).hexdigest()}"
        assert entry["rows"] == pq.read_table(pa.BufferReader(content)).num_rows


def test_the_manifests_totals_are_the_sums_over_all_rows(
    finished: tuple[JobConfig, RunResult], read_output: ReadOutput
) -> None:
    config, result = finished
    totals = json.loads((Path(config.output) / "_SUCCESS.json").read_text())["totals"]
    rows = read_output(config.output)
    for name in SUMMED:
        assert totals[name] == getattr(result.totals, name) == sum(rows[name].to_pylist()) > 0
    assert (totals["rows"], totals["errors"]) == (99, 1)


def test_the_output_holds_nothing_but_what_the_contract_names(finished: tuple[JobConfig, RunResult]) -> None:
    output = Path(finished[0].output)
    assert {path.name for path in output.iterdir()} == {
        "data", "_commits", "_input", "_run.json", "_SUCCESS.json", "report.html"
    }  # fmt: skip
    assert len(list((output / "data").iterdir())) == len(list((output / "_commits").iterdir())) == 12


def test_the_result_names_a_report_that_exists(finished: tuple[JobConfig, RunResult]) -> None:
    assert "99 rows" in Path(finished[1].report).read_text()


def test_the_report_keeps_ray_datas_account_of_every_stage(finished: tuple[JobConfig, RunResult]) -> None:
    report = Path(finished[1].report).read_text()
    for stage in ("read", "Replica", "commit"):
        assert f"MapBatches({stage}): " in report
    assert "12 blocks produced" in report  # one per work unit


def test_a_finished_run_started_again_generates_and_changes_nothing(copied: JobConfig) -> None:
    before = {path: path.stat().st_mtime_ns for path in Path(copied.output).rglob("*")}
    result = run_job(copied, NoEngineBackend())
    assert result.rows_resumed == result.totals.rows == 99
    assert {path: path.stat().st_mtime_ns for path in Path(copied.output).rglob("*")} == before


def test_a_run_that_died_before_its_manifest_only_writes_manifest_and_report(copied: JobConfig) -> None:
    output = Path(copied.output)
    manifest = (output / "_SUCCESS.json").read_text()
    (output / "_SUCCESS.json").unlink()
    (output / "report.html").unlink()
    run_job(copied, NoEngineBackend())
    assert (output / "_SUCCESS.json").read_text() == manifest
    assert (output / "report.html").exists()


@pytest.mark.usefixtures("inline")
def test_a_report_that_cannot_be_made_costs_no_run(
    job: Job, write_parquet: WriteParquet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_parquet(tmp_path / "in/a.parquet", {"text": ["x"] * 4})

    def fail(*_: object) -> None:
        raise MemoryError("too much")

    config = job()
    with monkeypatch.context() as patch:
        patch.setattr(run, "write_report", fail)
        assert run_job(config, EchoBackend()).totals.rows == 4
    assert json.loads(Path(config.output, "_SUCCESS.json").read_text())["totals"]["rows"] == 4
    assert not Path(config.output, "report.html").exists()
    run_job(config, NoEngineBackend())
    assert "4 rows" in Path(config.output, "report.html").read_text()


def test_a_report_in_whose_place_a_directory_is_costs_a_warning_and_is_not_announced(
    copied: JobConfig, caplog: pytest.LogCaptureFixture
) -> None:
    report = Path(copied.output, "report.html")
    report.unlink()
    (report / "mine").mkdir(parents=True)
    assert run_job(copied, NoEngineBackend()).report == ""
    assert "the report could not be made (StorageRefused: " in caplog.text
    assert "Traceback" not in caplog.text
    assert not list(Path(copied.output).glob(".report.html.*"))


@pytest.mark.usefixtures("inline")
def test_a_run_that_died_between_manifest_and_report_makes_the_report_of_all_its_rows(
    job: Job, write_parquet: WriteParquet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_parquet(tmp_path / "in/a.parquet", {"text": ["x"] * 4})
    config = job(rows_per_unit=2)
    run_job(config, EchoBackend())
    whole = Path(config.output, "report.html").read_text()
    stale = re.sub("commits [0-9a-f]{64}", "commits of two rows", whole).replace("4 rows", "2 rows")

    def die(*_: object) -> None:
        raise JobStopped("killed")

    Path(config.output, "_SUCCESS.json").unlink()
    Path(config.output, "report.html").write_text(stale)  # of what an earlier session had committed
    with monkeypatch.context() as patch:
        patch.setattr(run, "write_report", die)
        with pytest.raises(JobStopped):
            run_job(config, NoEngineBackend())
    assert Path(config.output, "_SUCCESS.json").exists()
    run_job(config, NoEngineBackend())
    assert "4 rows" in Path(config.output, "report.html").read_text()


def test_a_finished_run_is_billed_at_a_price_that_is_named_later(copied: JobConfig) -> None:
    output = Path(copied.output)
    manifest = (output / "_SUCCESS.json").stat().st_mtime_ns
    run_job(copied.model_copy(update={"price_per_gpu_hour": 2.5}), NoEngineBackend())
    assert "at 2.5 an hour" in (output / "report.html").read_text()
    assert (output / "_SUCCESS.json").stat().st_mtime_ns == manifest


def test_resuming_generates_only_what_is_not_committed_and_sweeps_what_died(
    copied: JobConfig, read_output: ReadOutput, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "pipeline")
    output = Path(copied.output)
    lost = ["00000-000000010", "00002-000000030"]
    for unit in lost:
        (output / f"_commits/{unit}.json").unlink()  # their data files are there: written, never committed
    (output / "_SUCCESS.json").unlink()
    standing = read_commits(Storage(copied.output))
    result = run_job(copied, EchoBackend(Echo("again ")))
    assert result.rows_resumed == 99 - 13
    spare = "removed 2 spare data files, as of attempts that came second or versions that were replaced: every row of "
    assert f"{spare}the output is in others" in caplog.messages
    commits = read_commits(Storage(copied.output))
    assert [commit for commit in commits if commit.unit not in lost] == standing
    assert {f"data/{path.name}" for path in (output / "data").iterdir()} == {commit.file for commit in commits}
    rows = read_output(output)
    assert rows["id"].to_pylist() == list(range(99))
    again = [*range(10, 20), *range(96, 99)]
    assert [row["id"] for row in rows.to_pylist() if (row["generation"] or "").startswith("again ")] == again


def test_a_run_that_an_earlier_version_began_under_another_spelling_of_its_input_goes_on(
    job: Job, write_parquet: WriteParquet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_parquet(tmp_path / "in/0.parquet", {"text": ["a", "b"]})
    spelt = f"{tmp_path}/in/../in"
    with monkeypatch.context() as earlier:
        earlier.setattr(preparation, "absolute", str)
        begun = prepare_run(job(input=spelt), NoEngineBackend())
        claim_output(Storage(begun.config.output), begun.description)
    for again in (spelt, str(tmp_path / "in")):
        assert prepare_run(job(input=again), NoEngineBackend()).fingerprint == begun.fingerprint
    fresh = prepare_run(job(input=spelt, fresh=True), NoEngineBackend())
    assert fresh.config.input == str(tmp_path / "in")


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"max_new_tokens": 11}, "sampling"),
        ({"seed": 1}, "sampling"),
        ({"prompt": "Say: {text}"}, "prompt"),
        ({"overlong": "reject"}, "prompt"),
        ({"schedule": None}, "schedule"),
        ({"dtype": "bfloat16"}, "model"),
        ({"rows_per_unit": 11}, "rows_per_unit"),
        ({"limit": 50}, "input"),
        ({"keep_columns": ["id"]}, "input"),
    ],
)
def test_the_output_of_another_run_is_refused_and_the_difference_named(
    finished: tuple[JobConfig, RunResult], change: dict[str, object], part: str
) -> None:
    config, _ = finished
    with pytest.raises(JobError, match=f"belongs to run .*, which differs in {part}: ") as refused:
        run_job(config.model_copy(update=change), NoEngineBackend())
    assert config.output in str(refused.value)


def test_how_a_run_is_spread_may_change_between_sessions(copied: JobConfig) -> None:
    other = {"batch_size": 3, "replicas": 2, "threads_per_replica": 1}
    assert run_job(copied.model_copy(update=other), NoEngineBackend()).rows_resumed == 99


@pytest.mark.parametrize("groups", [[], [0, 0]])
def test_an_input_without_rows_succeeds(
    tmp_path: Path, job: Job, write_parquet: WriteParquet, groups: list[int]
) -> None:
    write_parquet(tmp_path / "in/a.parquet", {"text": pa.array([], pa.string())}, groups)
    result = run_job(job(), NoEngineBackend())
    assert result.totals.rows == 0
    assert json.loads((tmp_path / "out/_SUCCESS.json").read_text())["commits"] == []
    assert "0 rows" in (tmp_path / "out/report.html").read_text()


@pytest.fixture(scope="module")
def spread(
    tmp_path_factory: pytest.TempPathFactory, cluster: None, write_parquet: WriteParquet, read_output: ReadOutput
) -> pa.Table:
    """Output of the first 250 of 400 rows in two files of one row group each, by two replicas that sign their work."""
    folder = tmp_path_factory.mktemp("spread")
    for file in range(2):
        columns = {"id": range(200), "text": [f"{file}.{row}" for row in range(200)], "note": ["n"] * 200}
        write_parquet(folder / f"in/{file}.parquet", columns)
    config = JobConfig(
        input=str(folder / "in"),
        output=str(folder / "out"),
        prompt_format="raw",
        limit=250,
        keep_columns=["note"],
        rows_per_unit=5,
        replicas=2,
    )
    meeting = tmp_path_factory.mktemp("meeting")
    run_job(config, EchoBackend(Company(signed=True, seconds_per_batch=0.1, folder=str(meeting))))
    return read_output(config.output)


def test_limit_takes_the_first_rows_and_two_replicas_give_the_rows_of_one(spread: pa.Table) -> None:
    texts = [generation.split(" ")[1] for generation in spread["generation"].to_pylist()]
    assert texts == [f"0.{row}" for row in range(200)] + [f"1.{row}" for row in range(50)]


def test_the_units_of_one_file_reach_both_replicas(spread: pa.Table) -> None:
    first_file = spread["generation"].to_pylist()[:200]
    assert len({generation.split(" ")[0] for generation in first_file}) == 2


def test_only_kept_columns_come_out(spread: pa.Table) -> None:
    assert spread.column_names[:2] == ["note", "generation"]


@pytest.mark.usefixtures("cluster")
def test_a_dirty_input_through_the_real_engine_accounts_for_every_row(
    tmp_path: Path,
    job: Job,
    texts: list[str],
    write_parquet: WriteParquet,
    strings_of_bytes: Callable[[Sequence[bytes | None]], pa.Array],
    read_output: ReadOutput,
) -> None:
    dirty = [texts[0].encode(), None, b"", b" \n ", b"\xed\xa0\x80\xed", "👩‍🚀 नमस्ते".encode(), b"word " * 10_000]
    first = pa.table({"id": [1, 2, 2, 3, 4, 5, 6], "text": strings_of_bytes(dirty), "title": ["t"] * 7})
    write_parquet(tmp_path / "in/a.parquet", first, [3, 0, 4])
    write_parquet(tmp_path / "in/b.parquet", {"id": [1, 1], "text": [texts[1], texts[2]]})  # lacks the title
    config = job(
        prompt="{title} {text}", prompt_format="chat", max_prompt_tokens=600, max_new_tokens=4, rows_per_unit=4
    )
    result = run_job(config)
    rows = read_output(config.output).to_pylist()
    assert [row["id"] for row in rows] == [1, 2, 2, 3, 4, 5, 6, 1, 1]
    assert result.totals.flops_prefix > 0
    assert [row["shared_prefix_tokens"] > 0 for row in rows] == [row["error"] is None for row in rows]
    errors: list[Any] = [row["error"] for row in rows]
    assert errors[:1] + errors[5:] == [None] * 5
    assert errors[1:4] == ["text is null", "text is empty", "text is empty"]
    assert errors[4].startswith("text is not valid UTF-8")
    for row in rows:
        assert (row["finish_reason"] == "error") == (row["error"] is not None)
        assert (row["generation"] is None) == (row["error"] is not None)
        assert (1 <= row["generated_tokens"] <= 4) == (row["error"] is None)
    assert [row["prompt_truncated"] for row in rows] == [row["id"] == 6 for row in rows]
    assert 590 <= rows[6]["prompt_tokens"] <= 600
    assert (result.totals.rows, result.totals.errors, result.totals.truncated) == (9, 4, 1)
