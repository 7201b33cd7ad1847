"""Incremental runs: only what is new is done, a changed file's rows are replaced, and one job works at a time."""

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import count
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from engine_double import Echo, EchoBackend, NoEngineBackend
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from inline_session import InlineSession, without_ray
from pydantic import ValidationError
from servers import BUCKET, S3Server, wait_until

from jobs import command_line, inspect_run, summarize_corpus
from pipeline import run
from pipeline.commits.commit import COMMITS, Commit, read_commits
from pipeline.commits.failed import read_failures, record_failure
from pipeline.config import JobConfig
from pipeline.errors import JobError, JobStopped, NothingToDo, UnitsFailed
from pipeline.forecaster import forecast_run
from pipeline.inputs.known_files import INPUTS_FILE, read_known_files
from pipeline.inspection import inspect, verify
from pipeline.preparing import incremental
from pipeline.reporting.forecast import write_forecast
from pipeline.run import run_job
from pipeline.storage import lease
from pipeline.storage.lease import Holder, Lease
from pipeline.storage.storage import Storage
from pipeline.storage.stores import LocalStore, stamp

Job = Callable[..., JobConfig]
WriteParquet = Callable[..., Path]
Put = Callable[..., None]


@pytest.fixture
def put(tmp_path: Path, write_parquet: WriteParquet) -> Put:
    """Writes an input file of so many rows; its texts name file, version and row."""

    def write(name: str, rows: int, version: str = "v1") -> None:
        texts = [f"{name} {version} {row}" for row in range(rows)]
        write_parquet(tmp_path / f"in/{name}.parquet", {"text": pa.array(texts, pa.string())})

    return write


@pytest.fixture
def nightly(job: Job) -> Job:
    """An incremental job in units of four rows."""
    return lambda **options: job(**{"incremental": True, "rows_per_unit": 4, "max_new_tokens": 40, **options})


@pytest.fixture(autouse=True)
def leases_of_the_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    """What dead jobs leave behind is taken over at once: jobs here come one after the other."""
    monkeypatch.setattr(lease, "LEASE_S", 0.0)


@pytest.fixture
def inline(monkeypatch: pytest.MonkeyPatch) -> type[InlineSession]:
    return without_ray(monkeypatch)


def by(name: str) -> EchoBackend:
    """An engine whose generations begin with a name."""
    return EchoBackend(Echo(f"{name}: "))


def generations(output: str, leftovers: bool = False) -> list[str]:
    """What a reader finds through the manifest, sorted; no data lies beside it, unless there may be leftovers."""
    manifest = json.loads(Path(output, "_SUCCESS.json").read_text())
    files = [entry["file"] for entry in manifest["commits"]]
    assert leftovers or Storage(output).names("data") == sorted(files)
    rows = [row for file in files for row in pq.read_table(Path(output, file)).to_pylist()]
    assert manifest["totals"]["rows"] == manifest["input"]["rows"] == len(rows)
    found = inspect(Storage(output))
    assert (found.state, found.rows, found.replaced) == ("done", len(rows), [])
    assert verify(Storage(output), found) == []
    assert all(row["generation"].split(": ")[1] == row["text"] for row in rows)
    return sorted(row["generation"] for row in rows)


def in_order(output: str) -> list[Commit]:
    """The commits that a manifest lists, in its order."""
    commits = {commit.file: commit for commit in read_commits(Storage(output))}
    return [commits[entry["file"]] for entry in json.loads(Path(output, "_SUCCESS.json").read_text())["commits"]]


def texts(by: str, name: str, rows: int, version: str = "v1") -> list[str]:
    return [f"{by}: {name} {version} {row}" for row in range(rows)]


def everything(*parts: Sequence[str]) -> list[str]:
    return sorted(text for part in parts for text in part)


def snapshot(output: str) -> dict[Path, int]:
    """Every file of an output but the lease, with its time."""
    return {path: path.stat().st_mtime_ns for path in Path(output).rglob("*") if "_lease" not in path.parts}


@pytest.mark.usefixtures("cluster")
def test_on_ray_a_night_does_new_and_changed_files_and_no_others(nightly: Job, put: Put) -> None:
    config = nightly()
    put("a", 6)
    put("c", 9)
    run_job(config, by("one"))
    put("b", 5)
    put("c", 7, "v2")
    result = run_job(config, by("two"))
    expected = everything(texts("one", "a", 6), texts("two", "b", 5), texts("two", "c", 7, "v2"))
    assert generations(config.output) == expected
    assert (result.rows_resumed, result.totals.rows) == (15, 18)


@pytest.mark.usefixtures("inline")
def test_progress_messages_and_manifest_say_what_is_new_and_what_is_there(
    nightly: Job, put: Put, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "pipeline")
    put("b", 6)
    put("empty", 0)
    run_job(nightly(), by("one"))
    assert "2 of 2 files" not in caplog.text
    put("a", 9)
    run_job(nightly(), by("two"))
    assert ": 1 of 3 files are new or changed: 9 rows in 3 units to do, 6 rows already committed" in caplog.text
    manifest = json.loads(Path(nightly().output, "_SUCCESS.json").read_text())
    assert (manifest["input"]["files"], manifest["input"]["rows"], manifest["totals"]["rows"]) == (2, 15, 15)
    # Files in the order of their names, rows in order.
    listed = [(Path(commit.path).stem, commit.start) for commit in in_order(nightly().output)]
    assert listed == [("a", 0), ("a", 4), ("a", 8), ("b", 0), ("b", 4)]


def test_with_nothing_new_no_cluster_and_no_engine_is_started_and_nothing_written(
    nightly: Job,
    put: Put,
    inline: type[InlineSession],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    put("a", 6)
    run_job(nightly(), by("one"))
    before = snapshot(nightly().output)
    monkeypatch.setattr(run, "connect", None)
    caplog.set_level("INFO", "pipeline")
    assert run_job(nightly(), NoEngineBackend()).totals.rows == 6
    assert "nothing is new: all 1 files are done; the output holds 6 rows" in caplog.text
    assert snapshot(nightly().output) == before


@pytest.mark.usefixtures("inline")
def test_an_input_that_was_emptied_has_nothing_new_and_one_that_is_gone_or_another_is_refused(
    nightly: Job, put: Put, tmp_path: Path
) -> None:
    put("a", 4)
    config = nightly()
    run_job(config, by("one"))
    (tmp_path / "in/a.parquet").unlink()
    with pytest.raises(NothingToDo, match="holds no files any more"):
        run_job(config, NoEngineBackend())
    Path(config.output, "_SUCCESS.json").rename(tmp_path / "taken")  # as of a run that was stopped with work left
    with pytest.raises(JobError, match="holds no Parquet files"):
        run_job(config, NoEngineBackend())
    (tmp_path / "taken").rename(Path(config.output, "_SUCCESS.json"))
    (tmp_path / "other").mkdir()
    with pytest.raises(JobError, match="holds no Parquet files"):
        run_job(nightly(input=str(tmp_path / "other")), NoEngineBackend())
    (tmp_path / "in").rmdir()  # as where a disk is not mounted
    with pytest.raises(JobError, match="does not exist"):
        run_job(config, NoEngineBackend())


@pytest.mark.usefixtures("inline")
def test_a_file_that_was_copied_again_is_not_new_and_is_read_but_once(
    nightly: Job, put: Put, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = Storage(nightly().output)
    put("a", 6)
    run_job(nightly(), by("one"))
    path = tmp_path / "in/a.parquet"
    os.utime(path, (1e9, 1e9))
    run_job(nightly(), NoEngineBackend())
    assert (read_known_files(storage) or {})["a.parquet"].stamp == stamp(storage.info(str(path)))
    monkeypatch.setattr("pipeline.inputs.work.hashlib.file_digest", None)
    run_job(nightly(), NoEngineBackend())


@pytest.mark.usefixtures("inline")
def test_a_file_that_vanished_keeps_its_output_and_comes_back_done(nightly: Job, put: Put, tmp_path: Path) -> None:
    config = nightly()
    put("a", 6)
    put("b", 5)
    run_job(config, by("one"))
    away = (tmp_path / "in/a.parquet").rename(tmp_path / "a.parquet")
    put("c", 3)
    run_job(config, by("two"))
    expected = everything(texts("one", "a", 6), texts("one", "b", 5), texts("two", "c", 3))
    assert generations(config.output) == expected
    away.rename(tmp_path / "in/a.parquet")
    run_job(config, NoEngineBackend())
    assert generations(config.output) == expected


@pytest.mark.usefixtures("inline")
def test_rows_that_are_lost_of_a_file_that_is_gone_are_said_and_come_back_with_it(
    nightly: Job, put: Put, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = nightly()
    put("a", 10)
    put("b", 2)
    run_job(config, by("one"))
    away = (tmp_path / "in/a.parquet").rename(tmp_path / "a.parquet")
    put("c", 2)
    run_job(config, by("one"))
    lost, *_ = (commit for commit in in_order(config.output) if commit.path.endswith("a.parquet"))
    Path(config.output, f"_commits/{lost.unit}.json").unlink()
    Path(config.output, "_SUCCESS.json").unlink()
    caplog.clear()
    run_job(config, NoEngineBackend())
    left = 10 - lost.totals.rows
    assert f"a.parquet' is gone, and of its 10 rows the output has {left}: put it back" in caplog.text
    caplog.clear()
    put("d", 2)
    run_job(config, by("one"))
    assert "put it back" not in caplog.text
    away.rename(tmp_path / "in/a.parquet")
    run_job(config, by("two"))
    found = generations(config.output)
    assert len(found) == 16
    assert sum(text.startswith("two: a") for text in found) == lost.totals.rows


@pytest.mark.usefixtures("inline")
def test_a_file_that_changes_every_night_leaves_no_trace_of_what_it_was(nightly: Job, put: Put) -> None:
    config = nightly()
    for night in range(5):
        put("a", 6, f"v{night}")
        run_job(config, by("one"))
    assert generations(config.output) == texts("one", "a", 6, "v4")
    known = read_known_files(Storage(config.output))
    assert known is not None
    assert len(known["a.parquet"].versions) == 1


@pytest.mark.usefixtures("inline")
def test_a_file_that_vanished_keeps_its_output_though_another_has_what_it_held_before(
    nightly: Job, put: Put, tmp_path: Path
) -> None:
    """Such as the placeholder that each week's file begins as: the new one is no rename of the old."""
    config = nightly()
    week, other = tmp_path / "in/week.parquet", tmp_path / "in/other.parquet"
    put("always", 2)
    put("week", 6)
    run_job(config, by("one"))
    placeholder = week.read_bytes()
    put("week", 5, "v2")
    run_job(config, by("two"))
    week.unlink()
    other.write_bytes(placeholder)
    run_job(config, by("three"))
    always = texts("one", "always", 2)
    expected = everything(always, texts("two", "week", 5, "v2"), texts("three", "week", 6))
    assert generations(config.output) == expected
    other.unlink()
    run_job(config, NoEngineBackend())
    assert generations(config.output) == expected


def test_until_a_changed_file_is_done_its_old_rows_stay_and_nothing_claims_to_be_complete(
    nightly: Job,
    put: Put,
    inline: type[InlineSession],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = nightly()
    put("a", 6)
    put("b", 9)
    run_job(config, by("one"))
    put("b", 10, "v2")
    inline.stop_after = 2
    with pytest.raises(JobStopped):
        run_job(config, by("two"))
    assert not Path(config.output, "_SUCCESS.json").exists()
    found = inspect(Storage(config.output))
    assert (found.state, found.rows, found.totals.rows) == ("unfinished", 16, 14)
    assert sum(commit.totals.rows for commit in found.replaced) == 9
    assert verify(Storage(config.output), found) == []
    monkeypatch.setattr(sys, "argv", ["inspect_run.py", config.output, "--verify"])
    assert inspect_run.main() == 4
    assert "14 of 16 rows in 4 units" in " ".join(capsys.readouterr().out.split())

    inline.stop_after = None
    run_job(config, by("three"))
    expected = everything(texts("one", "a", 6), texts("two", "b", 10, "v2")[:8], texts("three", "b", 10, "v2")[8:])
    assert generations(config.output) == expected


def test_a_file_that_vanishes_half_done_in_its_new_version_keeps_its_old_rows(
    nightly: Job, put: Put, inline: type[InlineSession], tmp_path: Path
) -> None:
    config = nightly()
    put("a", 6)
    put("b", 9)
    run_job(config, by("one"))
    for version in ("v2", "v3"):  # of the second nothing is left once there is a third
        put("b", 10, version)
        inline.stop_after = 1
        with pytest.raises(JobStopped):
            run_job(config, by(version))
    assert len(read_commits(Storage(config.output))) == 2 + 3 + 1
    (tmp_path / "in/b.parquet").unlink()
    run_job(config, NoEngineBackend())
    assert generations(config.output) == everything(texts("one", "a", 6), texts("one", "b", 9))


def test_a_file_that_vanishes_half_done_for_the_first_time_keeps_what_is_done(
    nightly: Job, put: Put, inline: type[InlineSession], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = nightly()
    put("a", 10)
    put("b", 2)
    inline.stop_after = 2
    with pytest.raises(JobStopped):
        run_job(config, by("one"))
    first, _ = read_commits(Storage(config.output))
    Path(config.output, f"_commits/{first.unit}.json").unlink()  # as if the second unit had been the faster one
    away = (tmp_path / "in/a.parquet").rename(tmp_path / "a.parquet")
    inline.stop_after = None
    run_job(config, by("two"))
    assert "'a.parquet' vanished when 4 of its 10 rows were done" in caplog.text
    Path(config.output, first.file).unlink()  # its attempt might be another job's
    assert generations(config.output) == everything(texts("one", "a", 8)[4:], texts("two", "b", 2))
    away.rename(tmp_path / "in/a.parquet")
    run_job(config, by("three"))
    a = [*texts("three", "a", 4), *texts("one", "a", 8)[4:], *texts("three", "a", 10)[8:]]
    whole = everything(a, texts("two", "b", 2))
    assert generations(config.output) == whole


def test_a_file_that_changes_back_is_done_again(nightly: Job, put: Put, inline: type[InlineSession]) -> None:
    config = nightly()
    for night, version in (("one", "v1"), ("two", "v2"), ("three", "v1")):
        put("a", 6, version)
        run_job(config, by(night))
        assert generations(config.output) == texts(night, "a", 6, version)
    put("a", 0)
    run_job(config, NoEngineBackend())
    assert generations(config.output) == []


@pytest.fixture
def move(tmp_path: Path) -> Callable[[str, str], None]:
    """Renames an input file."""

    def move(old: str, new: str) -> None:
        to = tmp_path / f"in/{new}.parquet"
        to.parent.mkdir(exist_ok=True)
        (tmp_path / f"in/{old}.parquet").rename(to)

    return move


Move = Callable[[str, str], None]


def lose_record(output: str, how: str) -> None:
    path = Path(output, INPUTS_FILE)
    if how == "lost":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-9] if how == "cut short" else b'{"format": 1, "files": {"a.parquet": 7}}')


LOSSES = ("lost", "cut short", "nonsense")


@pytest.mark.usefixtures("inline")
def test_a_renamed_file_keeps_its_rows_and_is_not_done_again(
    nightly: Job, put: Put, move: Move, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "pipeline")
    config = nightly()
    put("a", 6)
    put("b", 5)
    run_job(config, by("one"))
    move("a", "older/a")
    run_job(config, NoEngineBackend())
    assert "1 input files were renamed, such as 'a.parquet', which is 'older/a.parquet' now" in caplog.text
    expected = everything(texts("one", "a", 6), texts("one", "b", 5))
    assert generations(config.output) == expected
    assert list(read_known_files(Storage(config.output)) or {}) == ["b.parquet", "older/a.parquet"]
    move("older/a", "c")
    move("b", "a")
    run_job(config, NoEngineBackend())
    assert generations(config.output) == expected
    put("c", 3)
    run_job(config, by("two"))
    assert generations(config.output) == everything(texts("one", "b", 5), texts("two", "c", 3))


@pytest.mark.usefixtures("inline")
def test_files_that_move_up_one_name_a_night_are_each_done_once(nightly: Job, put: Put, move: Move) -> None:
    """As logs do: the newest is always called the same."""
    config = nightly()
    parts = []
    for night in range(5):
        for old in reversed(range(1, night)):
            move(f"log.{old}", f"log.{old + 1}")
        if night:
            move("log", "log.1")
        put("log", 6, f"v{night}")
        run_job(config, by(f"night {night}"))
        parts.append(texts(f"night {night}", "log", 6, f"v{night}"))
        assert generations(config.output) == everything(*parts)
        listed = [commit.start for commit in in_order(config.output)]
        assert listed == [0, 4] * (night + 1)


@pytest.mark.usefixtures("inline")
def test_a_file_that_was_moved_over_another_replaces_its_rows(nightly: Job, put: Put, move: Move) -> None:
    config = nightly()
    put("a", 6)
    put("b", 9)
    run_job(config, by("one"))
    move("a", "b")
    run_job(config, NoEngineBackend())
    assert generations(config.output) == texts("one", "a", 6)


@pytest.mark.usefixtures("inline")
def test_copies_are_files_of_their_own_whatever_their_originals_were_called(
    nightly: Job, put: Put, move: Move, tmp_path: Path
) -> None:
    config = nightly()
    put("a", 6)
    run_job(config, by("one"))
    shutil.copy(tmp_path / "in/a.parquet", tmp_path / "in/b.parquet")
    run_job(config, by("two"))
    assert generations(config.output) == everything(texts("one", "a", 6), texts("two", "a", 6))
    move("a", "c")
    run_job(config, NoEngineBackend())
    shutil.copy(tmp_path / "in/b.parquet", tmp_path / "in/a.parquet")  # under a name that its content once had
    run_job(config, by("three"))
    expected = everything(*[texts(night, "a", 6) for night in ("one", "two", "three")])
    assert generations(config.output) == expected
    (tmp_path / "in/a.parquet").unlink()
    run_job(config, NoEngineBackend())
    assert generations(config.output) == expected


def test_a_file_that_is_renamed_half_done_is_finished_under_its_new_name(
    nightly: Job, put: Put, move: Move, inline: type[InlineSession]
) -> None:
    config = nightly()
    put("b", 5)
    run_job(config, by("one"))
    put("b", 10, "v2")
    inline.stop_after = 1
    with pytest.raises(JobStopped):
        run_job(config, by("two"))
    move("b", "c")
    with pytest.raises(JobStopped):
        run_job(config, by("three"))
    assert len(read_commits(Storage(config.output))) == 2 + 2
    found = inspect(Storage(config.output))
    assert (found.rows, found.totals.rows, sum(commit.totals.rows for commit in found.replaced)) == (10, 8, 5)
    inline.stop_after = None
    run_job(config, by("four"))
    b = texts("x", "b", 10, "v2")
    nights = ["two"] * 4 + ["three"] * 4 + ["four"] * 2
    assert generations(config.output) == sorted(row.replace("x", night) for row, night in zip(b, nights, strict=True))


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.usefixtures("inline")
def test_without_the_record_of_files_what_is_done_is_told_from_the_commits(
    nightly: Job, put: Put, move: Move, tmp_path: Path, caplog: pytest.LogCaptureFixture, loss: str
) -> None:
    config = nightly()
    for name in ("same", "renamed", "changed", "gone"):
        put(name, 6)
    run_job(config, by("one"))
    move("renamed", "other")
    run_job(config, NoEngineBackend())
    before = generations(config.output)
    lose_record(config.output, loss)
    assert generations(config.output) == before  # for an inspection
    move("other", "third")
    put("changed", 9, "v2")
    (tmp_path / "in/gone.parquet").unlink()
    run_job(config, by("two"))
    assert "_inputs.json" in caplog.text
    kept = [texts("one", name, 6) for name in ("same", "renamed", "gone")]
    assert generations(config.output) == everything(*kept, texts("two", "changed", 9, "v2"))
    lose_record(config.output, loss)
    run_job(config, NoEngineBackend())
    assert generations(config.output) == everything(*kept, texts("two", "changed", 9, "v2"))


@pytest.mark.usefixtures("inline")
def test_without_the_record_a_file_whose_name_another_took_is_still_known(nightly: Job, put: Put, move: Move) -> None:
    """As logs are rotated: the commits of both are of one name."""
    config = nightly()
    put("log", 6)
    run_job(config, by("one"))
    move("log", "log.1")
    put("log", 9, "v2")
    run_job(config, by("two"))
    Path(config.output, INPUTS_FILE).unlink()
    put("new", 3)
    run_job(config, by("three"))
    expected = everything(texts("one", "log", 6), texts("two", "log", 9, "v2"), texts("three", "new", 3))
    assert generations(config.output) == expected


@pytest.mark.parametrize("gone", [False, True])
def test_without_the_record_a_half_done_change_is_finished_or_forgotten(
    nightly: Job, put: Put, inline: type[InlineSession], tmp_path: Path, gone: bool
) -> None:
    config = nightly()
    put("a", 6)
    put("b", 9)
    run_job(config, by("one"))
    put("b", 10, "v2")
    inline.stop_after = 1
    with pytest.raises(JobStopped):
        run_job(config, by("two"))
    inline.stop_after = None
    lose_record(config.output, "lost")
    if gone:
        (tmp_path / "in/b.parquet").unlink()
        run_job(config, NoEngineBackend())
        b = texts("one", "b", 9)
    else:
        run_job(config, by("three"))
        b = texts("two", "b", 10, "v2")[:4] + texts("three", "b", 10, "v2")[4:]
    assert generations(config.output) == everything(texts("one", "a", 6), b)


@pytest.mark.usefixtures("inline")
def test_with_an_older_record_put_back_old_and_new_rows_of_a_file_are_never_both_there(
    nightly: Job, put: Put, tmp_path: Path
) -> None:
    config = nightly()
    put("a", 6)
    run_job(config, by("one"))
    shutil.copy(Path(config.output, INPUTS_FILE), tmp_path / "older")
    put("a", 7, "v2")
    put("b", 2)
    run_job(config, by("two"))
    shutil.copy(tmp_path / "older", Path(config.output, INPUTS_FILE))
    put("a", 8, "v3")
    run_job(config, by("three"))
    assert generations(config.output) == everything(texts("three", "a", 8, "v3"), texts("two", "b", 2))


class Killed(BaseException):
    """As good as kill -9: nothing in the job handles it."""


@pytest.fixture
def unsettled(nightly: Job, put: Put, inline: type[InlineSession], monkeypatch: pytest.MonkeyPatch) -> JobConfig:
    """An output in which the new version of one of two files is committed as a whole, beside its old one."""
    config = nightly()
    put("a", 6)
    put("b", 9)
    run_job(config, by("one"))
    put("b", 10, "v2")
    settle = incremental.History.settle

    def dies(self: incremental.History, commits: Any) -> Any:
        if inline.units_done > 5:
            raise Killed
        return settle(self, commits)

    with monkeypatch.context() as patch:
        patch.setattr(incremental.History, "settle", dies)
        with pytest.raises(Killed):
            run_job(config, by("two"))
    assert len(read_commits(Storage(config.output))) == 2 + 3 + 3
    return config


class DeathAt:
    """Dies before one write or removal, counted from 0 (None: never), and leaves its lease behind."""

    def __init__(self, step: int | None) -> None:
        self._left = -1 if step is None else step
        self._patch = pytest.MonkeyPatch()

    def __enter__(self) -> None:
        for owner, name in ((LocalStore, "_write_scratch"), (os, "link"), (os, "replace"), (os, "unlink")):
            self._patch.setattr(owner, name, self._counted(getattr(owner, name)))
        self._patch.setattr(Lease, "__exit__", lambda self, *of: self._left.set())

    def __exit__(self, *of: object) -> None:
        self._patch.undo()

    def _counted(self, operation: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*of: Any, **options: Any) -> Any:
            self._left -= 1
            if self._left == -1:
                raise Killed
            return operation(*of, **options)

        return counted


@pytest.fixture
def plain_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """A report without charts, which take longer to draw than the rest of a job here."""
    monkeypatch.setattr(run, "write_report", lambda storage, *of: storage.write("report.html", b""))


@pytest.mark.usefixtures("plain_report")
def test_dying_at_any_step_while_a_version_is_replaced_leaves_every_row_once(
    unsettled: JobConfig, tmp_path: Path
) -> None:
    expected = everything(texts("one", "a", 6), texts("two", "b", 10, "v2"))
    for step in count():
        output = str(tmp_path / f"killed at {step}")
        shutil.copytree(unsettled.output, output)
        config = unsettled.model_copy(update={"output": output})
        try:
            with DeathAt(step):
                run_job(config, NoEngineBackend())
        except Killed:
            run_job(config, NoEngineBackend())
            assert generations(output) == expected
        else:
            assert generations(output) == expected
            break
    assert step > 15


@pytest.mark.usefixtures("plain_report", "inline")
@pytest.mark.parametrize("loses_record", [False, True])
def test_a_night_that_dies_at_any_write_and_is_started_again_ends_as_one_that_did_not(
    nightly: Job, put: Put, move: Move, tmp_path: Path, loses_record: bool
) -> None:
    """With a new file, a changed one, a renamed one, one moved over another and one that vanished."""
    first = nightly()
    for name, rows in (("same", 2), ("changed", 6), ("renamed", 5), ("moved", 4), ("under", 7), ("gone", 3)):
        put(name, rows)
    run_job(first, by("x"))
    put("new", 6)
    put("changed", 5, "v2")
    move("renamed", "other")
    move("moved", "under")
    (tmp_path / "in/gone.parquet").unlink()
    kept = [texts("x", name, rows) for name, rows in (("same", 2), ("renamed", 5), ("moved", 4), ("gone", 3))]
    expected = everything(*kept, texts("x", "new", 6), texts("x", "changed", 5, "v2"))
    for step in count():
        output = str(tmp_path / f"killed at {step}")
        shutil.copytree(first.output, output)
        config = first.model_copy(update={"output": output})
        done = False
        try:
            with DeathAt(step):
                run_job(config, by("x"))
            done = True
        except Killed:
            if loses_record:
                Path(output, INPUTS_FILE).unlink()
            run_job(config, by("x"))
        # Without the record nobody knows that no job will commit what was already taken out.
        assert generations(output, leftovers=loses_record) == expected
        shutil.rmtree(output)
        if done:
            break
    assert step > 4 * 5 + 8  # of each of four units there are five, beside those of records and removals


NAMES = ("a", "b", "c")
put_file = st.tuples(st.just("put"), st.sampled_from(NAMES), st.integers(1, 3))
remove_file = st.tuples(st.just("remove"), st.sampled_from(NAMES))
run_once = st.tuples(st.just("run"), st.none() | st.integers(0, 40), st.none() | st.integers(1, 3))


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(events=st.lists(put_file | remove_file | run_once, min_size=4, max_size=14))
@pytest.mark.usefixtures("plain_report")
def test_after_any_history_of_files_stops_and_deaths_every_row_is_there_once(
    nightly: Job, write_parquet: WriteParquet, inline: type[InlineSession], tmp_path: Path, events: list[Any]
) -> None:
    """Of a file that is there its present version, whole; of one that is gone one version, whole if any ever was."""
    folder = Path(tempfile.mkdtemp(dir=tmp_path))
    config = nightly(input=str(folder / "in"), output=str(folder / "out"), rows_per_unit=2)
    write_parquet(folder / "in/always.parquet", {"text": ["always v1 0"]})
    size = {1: 5, 2: 4, 3: 0}  # rows of a version
    there: dict[str, int] = {}
    once_whole: set[str] = set()
    keeps: set[str] = set()  # that have been whole with rows, and not been emptied since
    for event in [*events, ("run", None, None)]:
        if event[0] == "put":
            _, name, version = event
            rows = [f"{name} v{version} {row}" for row in range(size[version])]
            write_parquet(folder / f"in/{name}.parquet", {"text": pa.array(rows, pa.string())})
            there[name] = version
            keeps -= {name} if size[version] == 0 else set()
        elif event[0] == "remove" and event[1] in there:
            (folder / f"in/{event[1]}.parquet").unlink()
            del there[event[1]]
        elif event[0] == "run":
            inline.stop_after = event[2]
            try:
                with DeathAt(event[1]):
                    run_job(config, by("x"))
                once_whole |= there.keys()
                keeps |= {name for name, version in there.items() if size[version]}
            except (Killed, JobStopped):
                assert event != ("run", None, None)

    manifest = json.loads((folder / "out/_SUCCESS.json").read_text())
    found: dict[str, dict[int, list[int]]] = {}
    for entry in manifest["commits"]:
        for text in pq.read_table(folder / "out" / entry["file"])["generation"].to_pylist():
            name, version, row = text.removeprefix("x: ").split()
            found.setdefault(name, {}).setdefault(int(version[1:]), []).append(int(row))
    assert found.pop("always") == {1: [0]}
    for name in NAMES:
        versions = found.get(name, {})
        if name in there:
            rows = list(range(size[there[name]]))
            assert versions == ({there[name]: rows} if rows else {})
        elif versions or name in keeps:
            ((version, rows),) = versions.items()
            assert len(rows) == len(set(rows))
            assert name not in once_whole or rows == list(range(size[version]))
    storage = Storage(config.output)
    assert verify(storage, inspect(storage)) == []


def test_what_a_process_of_an_old_version_still_commits_counts_for_nothing(
    nightly: Job, put: Put, inline: type[InlineSession], tmp_path: Path
) -> None:
    """It lost its lease while it was paused. Even with its file gone since, the file's last version is what counts."""
    config = nightly()
    put("a", 6)
    put("b", 6)
    run_job(config, by("one"))
    output = Path(config.output)
    old = read_commits(Storage(config.output))
    shutil.copytree(output / "_commits", tmp_path / "late")
    put("a", 5, "v2")
    run_job(config, by("two"))
    (tmp_path / "in/a.parquet").unlink()
    late = [commit.unit for commit in old if commit.path.endswith("a.parquet")]
    for unit in late:
        shutil.copy(tmp_path / f"late/{unit}.json", output / f"_commits/{unit}.json")
        (output / f"data/{unit}-0123456789ab.parquet").write_bytes(b"came second")
    run_job(config, NoEngineBackend())
    assert generations(config.output) == everything(texts("two", "a", 5, "v2"), texts("one", "b", 6))


def test_the_sweep_leaves_alone_what_another_job_may_be_about_to_commit(
    nightly: Job, put: Put, inline: type[InlineSession]
) -> None:
    config = nightly()
    put("a", 6)
    run_job(config, by("one"))
    (commit, _) = read_commits(Storage(config.output))
    data = Path(config.output, "data")
    whole = {path.name for path in data.iterdir()}
    unknown = f"{'f' * 32}-000000000-0123456789ab.parquet"
    (data / f"{commit.unit}-0123456789ab.parquet").write_bytes(b"came second: its unit is committed")
    (data / unknown).write_bytes(b"of a file that this job does not know")
    run_job(config, NoEngineBackend())
    assert {path.name for path in data.iterdir()} == {*whole, unknown}


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
    nightly: Job, put: Put, inline: type[InlineSession], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
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
    nightly: Job, put: Put, inline: type[InlineSession], monkeypatch: pytest.MonkeyPatch
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


@pytest.mark.usefixtures("inline")
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


@pytest.mark.usefixtures("inline")
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


@pytest.mark.usefixtures("inline")
def test_a_start_without_incremental_is_told_to_name_it(nightly: Job, put: Put) -> None:
    put("a", 6)
    run_job(nightly(), by("one"))
    with pytest.raises(
        JobError, match=r"input\.incremental true -> null; .*, start it with --incremental to resume it"
    ):
        run_job(nightly(incremental=False), NoEngineBackend())


@pytest.mark.usefixtures("inline")
def test_a_run_that_is_not_incremental_is_left_as_it_is(nightly: Job, put: Put) -> None:
    put("a", 6)
    run_job(nightly(incremental=False), by("one"))
    before = snapshot(nightly().output)
    with pytest.raises(JobError, match=r"belongs to run \w+, which is not incremental: leave --incremental out"):
        run_job(nightly(), NoEngineBackend())
    assert snapshot(nightly().output) == before
    run_job(nightly(fresh=True), by("two"))


@pytest.mark.usefixtures("inline")
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


def test_a_ceiling_is_each_nights_own(nightly: Job, put: Put, inline: type[InlineSession]) -> None:
    """Units take an hour. Sessions here look at no ceiling, so what is checked before they start is all there is."""
    config = nightly(max_gpu_hours=2.0)
    put("a", 12)
    run_job(config, by("one"))
    put("b", 4)
    run_job(config, by("two"))
    assert generations(config.output) == everything(texts("one", "a", 12), texts("two", "b", 4))
    whole = nightly(incremental=False, output=f"{config.output} of a plain run", max_gpu_hours=2.0)
    inline.stop_after = 2
    with pytest.raises(JobStopped, match="told to"):
        run_job(whole, by("one"))
    with pytest.raises(JobStopped, match=r"2 replica-hours of max_gpu_hours 2 are spent, with 8 of 16 rows left"):
        run_job(whole, NoEngineBackend())


@pytest.mark.usefixtures("cluster")
def test_on_ray_a_night_stops_at_its_ceiling_and_the_next_goes_on(nightly: Job, put: Put) -> None:
    put("a", 400)  # more than are done before a busy machine tells of the first commit
    put("b", 3)
    config = nightly(rows_per_unit=4, batch_size=4, max_flops=1.0, keep_columns=["text"])
    backend = EchoBackend(Echo("one: ", seconds_per_batch=0.5))
    with pytest.raises(JobStopped, match=r"with \d+ of 403 rows left: start the job again to go on with as much again"):
        run_job(config, backend)
    first = inspect(Storage(config.output)).totals.rows
    assert 4 <= first < 403
    with pytest.raises(JobStopped, match=f"of {403 - first} rows left"):
        run_job(config, backend)
    assert inspect(Storage(config.output)).totals.rows > first


@pytest.mark.usefixtures("inline")
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


@pytest.mark.usefixtures("inline")
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


def test_a_second_job_ends_well_once_the_other_is_seen_alive_and_says_who_is_at_work(
    nightly: Job, put: Put, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    put("a", 6)
    config = nightly()
    monkeypatch.setattr(run, "prepare_run", None)
    for name, seconds in (("LEASE_S", 60.0), ("RENEW_S", 0.2), ("LOOK_S", 0.2)):
        monkeypatch.setattr(lease, name, seconds)
    flags = ["--input", config.input, "--output", config.output, "--incremental"]
    monkeypatch.setattr(sys, "argv", ["summarize_corpus.py", *flags])
    with Lease(Storage(config.output)):
        job = summarize_corpus.SummarizeCorpus, summarize_corpus.PROGRAM, summarize_corpus.summarize
        assert command_line.start(*job) == 0
    said = capsys.readouterr().err.strip().splitlines()
    assert f"nothing to do: process {os.getpid()} on " in said[-1]
    assert f"is doing output '{config.output}': it was just seen to renew its lease" in said[-1]


@pytest.mark.usefixtures("inline")
def test_the_lease_is_given_up_after_success_and_after_failure(
    nightly: Job, put: Put, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "LEASE_S", 60.0)
    put("a", 6)
    for taken, options in enumerate(({}, {"text_column": "body"}, {"seed": 9}), start=1):
        with pytest.raises(JobError) if options else nullcontext():
            run_job(nightly(**options), by("one"))
        newest = Path(nightly().output, f"_lease/{taken:09d}.json")
        assert json.loads(newest.read_text())["released"] is True


@pytest.mark.usefixtures("inline")
def test_a_job_that_lost_its_lease_with_its_last_unit_takes_nothing_out_and_finishes_nothing(
    nightly: Job, put: Put, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = nightly()
    put("a", 6)
    run_job(config, by("one"))
    put("a", 6, "v2")
    with monkeypatch.context() as patch:
        overtaken_at(InlineSession, "run", config, patch)
        with pytest.raises(JobStopped, match="process 7 on elsewhere has taken over output"):
            run_job(config, by("two"))
    assert len(read_commits(Storage(config.output))) == 2 + 2
    assert not Path(config.output, "_SUCCESS.json").exists()
    run_job(config, NoEngineBackend())
    assert generations(config.output) == texts("two", "a", 6, "v2")


@pytest.mark.usefixtures("inline")
@pytest.mark.parametrize(
    ("step", "fresh"), [("prepare_run", False), ("prepare_run", True), ("claim_output", False), ("read_commits", False)]
)
def test_a_job_that_lost_its_lease_while_it_planned_leaves_its_successors_output_as_it_is(
    nightly: Job, put: Put, monkeypatch: pytest.MonkeyPatch, step: str, fresh: bool
) -> None:
    config = nightly()
    put("a", 6)
    run_job(config, by("one"))
    put("a", 6, "v2")
    before = snapshot(config.output)
    overtaken_at(run, step, config, monkeypatch)
    with pytest.raises(JobStopped, match="process 7 on elsewhere has taken over output"):
        run_job(nightly(fresh=fresh), NoEngineBackend())
    assert snapshot(config.output) == before


@pytest.mark.usefixtures("inline")
def test_a_job_that_loses_its_lease_at_its_end_sweeps_nothing(
    nightly: Job, put: Put, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = nightly()
    put("a", 6)
    run_job(config, by("one"))
    (commit, _) = read_commits(Storage(config.output))
    Path(config.output, f"data/{commit.unit}-0123456789ab.parquet").write_bytes(b"came second")
    before = snapshot(config.output)
    overtaken_at(run, "_check_complete", config, monkeypatch)
    with pytest.raises(JobStopped, match="process 7 on elsewhere has taken over output"):
        run_job(config, NoEngineBackend())
    assert snapshot(config.output) == before


def overtaken_at(owner: Any, step: str, config: JobConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let another job take the lease of an output's second job, and end, while that is at a step of its owner."""
    whole = getattr(owner, step)

    def overtaken(*of: Any, **named: Any) -> Any:
        result = whole(*of, **named)
        holder = Holder("elsewhere", 7, "another", released=True)
        Storage(config.output).write("_lease/000000003.json", holder.to_json())
        return result

    monkeypatch.setattr(owner, step, overtaken)


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_on_ray_a_job_that_lost_its_lease_stops(nightly: Job, put: Put, monkeypatch: pytest.MonkeyPatch) -> None:
    put("a", 400)  # more than are done before a busy machine tells of the first commit
    config = nightly(batch_size=4)
    storage = Storage(config.output)
    receive = run.Session._receive

    def overtaken(self: Any, parcel: Any) -> str:
        storage.write("_lease/000000002.json", Holder("elsewhere", 7, "another", released=True).to_json())
        wait_until(lambda: self._lease.lost != "", "noticing the loss")
        return receive(self, parcel)

    with monkeypatch.context() as patch:
        patch.setattr(lease, "RENEW_S", 0.2)
        patch.setattr(run.Session, "_receive", overtaken)
        with pytest.raises(JobStopped, match="process 7 on elsewhere has taken over output"):
            run_job(config, EchoBackend(Echo("one: ", seconds_per_batch=0.3)))
    assert not Path(config.output, "_SUCCESS.json").exists()
    assert storage.names("_lease")[-1] == "_lease/000000002.json"
    assert 0 < len(storage.names(COMMITS)) < 100


def test_on_object_storage_a_file_is_known_by_its_etag_and_is_not_read_for_it(
    s3: S3Server, nightly: Job, inline: type[InlineSession], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in s3.environment.items():
        monkeypatch.setenv(name, value)
    root = f"{BUCKET}/incremental"

    def upload(name: str, texts: Sequence[str]) -> None:
        sink = pa.BufferOutputStream()
        pq.write_table(pa.table({"text": texts}), sink)
        s3.files.pipe_file(f"{root}/in/{name}.parquet", sink.getvalue().to_pybytes())

    def output() -> list[str]:
        manifest = json.loads(s3.files.cat_file(f"{root}/out/_SUCCESS.json"))
        assert len(s3.files.ls(f"{root}/out/data", refresh=True)) == len(manifest["commits"])
        contents = [s3.files.cat_file(f"{root}/out/{entry['file']}") for entry in manifest["commits"]]
        return sorted(text for c in contents for text in pq.read_table(pa.BufferReader(c))["generation"].to_pylist())

    config = nightly(input=f"s3://{root}/in", output=f"s3://{root}/out", rows_per_unit=1)
    monkeypatch.setattr("pipeline.inputs.work.hashlib.file_digest", None)
    upload("a", ["a 1", "a 2"])
    upload("b", ["b 1", "b 2"])
    run_job(config, by("one"))
    upload("a", ["a 1", "a 2"])  # the same again
    upload("b", ["b 3"])
    upload("c", ["c 1"])
    run_job(config, by("two"))
    assert output() == ["one: a 1", "one: a 2", "two: b 3", "two: c 1"]
    run_job(config, NoEngineBackend())
    storage = Storage(config.output)
    assert verify(storage, inspect(storage)) == []
    assert {file.checksum for file in (read_known_files(storage) or {}).values()} == {None}
