"""Incremental runs: only what is new is done, and a changed file's rows are replaced."""

import json
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from engine_double import NoEngineBackend
from fixture_types import Job
from inline_session import run_until
from servers import BUCKET, S3Server

from jobs import inspect_run
from pipeline import run
from pipeline.commits.commit import read_commits
from pipeline.errors import JobError, NothingToDo
from pipeline.inputs.known_files import INPUTS_FILE, read_known_files
from pipeline.inspection import inspect, verify
from pipeline.run import run_job
from pipeline.storage.storage import Storage
from pipeline.storage.stores import stamp
from tests.pipeline.preparing.nights import Move, Put, by, everything, generations, in_order, snapshot, texts


@pytest.mark.usefixtures("cluster")
def test_on_ray_a_night_does_new_and_changed_files_and_no_others(nightly_on_ray: Job, put: Put) -> None:
    config = nightly_on_ray()
    put("a", 6)
    put("c", 9)
    run_job(config, by("one"))
    put("b", 5)
    put("c", 7, "v2")
    result = run_job(config, by("two"))
    expected = everything(texts("one", "a", 6), texts("two", "b", 5), texts("two", "c", 7, "v2"))
    assert generations(config.output) == expected
    assert (result.rows_resumed, result.totals.rows) == (6, 18), (
        "of c, whose rows are others now, none is an earlier one"
    )


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
    nightly: Job, put: Put, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    put("a", 6)
    run_job(nightly(), by("one"))
    before = snapshot(nightly().output)
    monkeypatch.setattr(run, "connect", None)
    caplog.set_level("INFO", "pipeline")
    assert run_job(nightly(), NoEngineBackend()).totals.rows == 6
    assert "nothing is new: all 1 files are done; the output holds 6 rows" in caplog.text
    assert snapshot(nightly().output) == before


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


def test_a_file_that_changes_every_night_leaves_no_trace_of_what_it_was(nightly: Job, put: Put) -> None:
    config = nightly()
    for night in range(5):
        put("a", 6, f"v{night}")
        run_job(config, by("one"))
    assert generations(config.output) == texts("one", "a", 6, "v4")
    known = read_known_files(Storage(config.output))
    assert known is not None
    assert len(known["a.parquet"].versions) == 1


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
    nightly: Job, put: Put, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = nightly()
    put("a", 6)
    put("b", 9)
    run_job(config, by("one"))
    put("b", 10, "v2")
    run_until(config, by("two"), units=2)
    assert not Path(config.output, "_SUCCESS.json").exists()
    found = inspect(Storage(config.output))
    assert (found.state, found.rows, found.totals.rows) == ("unfinished", 16, 14)
    assert sum(commit.totals.rows for commit in found.replaced) == 9
    assert verify(Storage(config.output), found) == []
    monkeypatch.setattr(sys, "argv", ["inspect_run.py", config.output, "--verify"])
    assert inspect_run.main() == 4
    assert "14 of 16 rows in 4 units" in " ".join(capsys.readouterr().out.split())

    run_job(config, by("three"))
    expected = everything(texts("one", "a", 6), texts("two", "b", 10, "v2")[:8], texts("three", "b", 10, "v2")[8:])
    assert generations(config.output) == expected


def test_a_file_that_vanishes_half_done_in_its_new_version_keeps_its_old_rows(
    nightly: Job, put: Put, tmp_path: Path
) -> None:
    config = nightly()
    put("a", 6)
    put("b", 9)
    run_job(config, by("one"))
    for version in ("v2", "v3"):  # of the second nothing is left once there is a third
        put("b", 10, version)
        run_until(config, by(version), units=1)
    assert len(read_commits(Storage(config.output))) == 2 + 3 + 1
    (tmp_path / "in/b.parquet").unlink()
    run_job(config, NoEngineBackend())
    assert generations(config.output) == everything(texts("one", "a", 6), texts("one", "b", 9))


def test_a_file_that_vanishes_half_done_for_the_first_time_keeps_what_is_done(
    nightly: Job, put: Put, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = nightly()
    put("a", 10)
    put("b", 2)
    run_until(config, by("one"), units=2)
    first, _ = read_commits(Storage(config.output))
    Path(config.output, f"_commits/{first.unit}.json").unlink()  # as if the second unit had been the faster one
    away = (tmp_path / "in/a.parquet").rename(tmp_path / "a.parquet")
    run_job(config, by("two"))
    assert "'a.parquet' vanished when 4 of its 10 rows were done" in caplog.text
    Path(config.output, first.file).unlink()  # its attempt might be another job's
    assert generations(config.output) == everything(texts("one", "a", 8)[4:], texts("two", "b", 2))
    away.rename(tmp_path / "in/a.parquet")
    run_job(config, by("three"))
    a = [*texts("three", "a", 4), *texts("one", "a", 8)[4:], *texts("three", "a", 10)[8:]]
    whole = everything(a, texts("two", "b", 2))
    assert generations(config.output) == whole


def test_a_file_that_changes_back_is_done_again(nightly: Job, put: Put) -> None:
    config = nightly()
    for night, version in (("one", "v1"), ("two", "v2"), ("three", "v1")):
        put("a", 6, version)
        run_job(config, by(night))
        assert generations(config.output) == texts(night, "a", 6, version)
    put("a", 0)
    run_job(config, NoEngineBackend())
    assert generations(config.output) == []


@pytest.mark.usefixtures("credentials")
def test_on_object_storage_a_file_is_known_by_its_etag_and_is_not_read_for_it(
    s3: S3Server, nightly: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_a_file_that_was_moved_over_another_replaces_its_rows(nightly: Job, put: Put, move: Move) -> None:
    config = nightly()
    put("a", 6)
    put("b", 9)
    run_job(config, by("one"))
    move("a", "b")
    run_job(config, NoEngineBackend())
    assert generations(config.output) == texts("one", "a", 6)


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


def test_a_file_that_is_renamed_half_done_is_finished_under_its_new_name(nightly: Job, put: Put, move: Move) -> None:
    config = nightly()
    put("b", 5)
    run_job(config, by("one"))
    put("b", 10, "v2")
    run_until(config, by("two"), units=1)
    move("b", "c")
    run_until(config, by("three"), units=1)
    assert len(read_commits(Storage(config.output))) == 2 + 2
    found = inspect(Storage(config.output))
    assert (found.rows, found.totals.rows, sum(commit.totals.rows for commit in found.replaced)) == (10, 8, 5)
    run_job(config, by("four"))
    b = texts("x", "b", 10, "v2")
    nights = ["two"] * 4 + ["three"] * 4 + ["four"] * 2
    assert generations(config.output) == sorted(row.replace("x", night) for row, night in zip(b, nights, strict=True))


LOSSES = ("lost", "cut short", "nonsense")


def lose_record(output: str, how: str) -> None:
    path = Path(output, INPUTS_FILE)
    if how == "lost":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-9] if how == "cut short" else b'{"format": 1, "files": {"a.parquet": 7}}')


@pytest.mark.parametrize("loss", LOSSES)
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
    nightly: Job, put: Put, tmp_path: Path, gone: bool
) -> None:
    config = nightly()
    put("a", 6)
    put("b", 9)
    run_job(config, by("one"))
    put("b", 10, "v2")
    run_until(config, by("two"), units=1)
    lose_record(config.output, "lost")
    if gone:
        (tmp_path / "in/b.parquet").unlink()
        run_job(config, NoEngineBackend())
        b = texts("one", "b", 9)
    else:
        run_job(config, by("three"))
        b = texts("two", "b", 10, "v2")[:4] + texts("three", "b", 10, "v2")[4:]
    assert generations(config.output) == everything(texts("one", "a", 6), b)


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
