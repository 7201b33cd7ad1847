"""An output holds rows of one content of each input file, whatever happens to the files between and during its jobs."""

import json
import logging
import os
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from engine_double import Echo, EchoBackend
from fixture_types import Job, WriteParquet
from inline_session import InlineSession, run_until
from servers import BUCKET

from pipeline.commits.failed import read_failures
from pipeline.config import JobConfig
from pipeline.errors import JobError, JobStopped, UnitsFailed
from pipeline.forecaster import forecast_run
from pipeline.inputs import work as inputs
from pipeline.inputs.work import make_plan
from pipeline.inspection import inspect, verify
from pipeline.rows.read import read_units
from pipeline.rows.template import PromptTemplate
from pipeline.rows.unit import WorkUnit
from pipeline.run import run_job
from pipeline.storage.storage import Storage

Put = Callable[..., None]

ROWS = 8


@pytest.fixture(params=["local", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A fresh directory, on a disk and on a real S3 server."""
    if request.param == "local":
        return str(tmp_path / "in")
    request.getfixturevalue("credentials")
    return f"s3://{BUCKET}/{uuid.uuid4().hex}"


@pytest.fixture
def put(place: str) -> Put:
    """Puts an input file whose texts name file, version and row."""

    def write(name: str, version: str = "old", rows: int = ROWS, **columns: Sequence[Any]) -> None:
        table = pa.table({"text": pa.array([f"{name} {version} {row}" for row in range(rows)], pa.string()), **columns})
        sink = pa.BufferOutputStream()
        pq.write_table(table, sink, row_group_size=4)
        Storage(place).write(f"{name}.parquet", sink.getvalue().to_pybytes())

    return write


@pytest.fixture
def work(job: Job, place: str, inline: object) -> Job:
    """A job in units of two rows, without Ray."""
    return lambda **options: job(**{"input": place, "rows_per_unit": 2, "max_new_tokens": 40, **options})


@pytest.fixture
def echo() -> EchoBackend:
    return EchoBackend(Echo("said: "))


def committed(config: JobConfig) -> list[str]:
    """Texts in the output, sorted; what its records say of it holds."""
    storage = Storage(config.output)
    found = inspect(storage)
    assert verify(storage, found) == []
    tables = [pq.read_table(f"{config.output}/{commit.file}") for commit in found.commits]
    return sorted(text for table in tables for text in table["text"].to_pylist())


def archive(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """From now on a file is listed as ever, and refused."""
    opened = Storage.open_path

    def refuse(self: Storage, path: str, stamp: str | None = None) -> Any:
        if path.endswith(name):
            raise PermissionError("InvalidObjectState")
        return opened(self, path, stamp)

    monkeypatch.setattr(Storage, "open_path", refuse)


def texts(name: str, version: str = "old", rows: int = ROWS) -> list[str]:
    return [f"{name} {version} {row}" for row in range(rows)]


def test_a_file_replaced_while_it_is_read_fails_its_units_by_name_and_is_never_mixed(
    work: Job, put: Put, place: str, echo: EchoBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in "abc":
        put(name)
    config = work(unit_attempts=1)
    begun = InlineSession.begin_unit

    def replace(session: InlineSession, unit: Any) -> None:
        begun(session, unit)
        if unit.id == "00001-000000002":  # after the first unit of b, while its file is open
            put("b", "new", ROWS)

    monkeypatch.setattr(InlineSession, "begin_unit", replace)
    with pytest.raises(UnitsFailed, match=r"b\.parquet' has changed since the job was planned") as failed:
        run_job(config, echo)
    assert "\n" not in str(failed.value)
    done = committed(config)
    assert set(done) <= {*texts("a"), *texts("b"), *texts("c")}
    assert set(done) >= {*texts("a"), *texts("c")}
    assert len(done) < 3 * ROWS
    assert {unit.path.rsplit("/")[-1] for unit in read_failures(Storage(config.output))} == {"b.parquet"}
    with pytest.raises(JobError, match=r"input file 'b\.parquet' has changed since the run"):
        run_job(config, echo)
    assert committed(config) == done


def test_a_file_that_alone_has_a_column_may_be_unreadable_where_a_run_goes_on(
    work: Job, write_parquet: WriteParquet, tmp_path: Path, echo: EchoBackend
) -> None:
    for name, column in (("a", {}), ("b", {"lang": ["en"]})):
        write_parquet(tmp_path / f"columns/{name}.parquet", {"text": [name], **column})
    config = work(input=str(tmp_path / "columns"), output=str(tmp_path / "columns-out"))
    run_until(config, echo, units=1)
    whole = (tmp_path / "columns/b.parquet").read_bytes()
    (tmp_path / "columns/b.parquet").write_bytes(b"")
    with pytest.raises(UnitsFailed, match=r"b\.parquet' cannot be read as Parquet"):
        run_job(config, echo)
    (tmp_path / "columns/b.parquet").write_bytes(whole)
    with pytest.raises(JobError, match="has changed since the run"):  # by its time
        run_job(config, echo)


def test_a_file_changed_between_two_starts_is_named_and_the_run_refused(work: Job, put: Put, echo: EchoBackend) -> None:
    for name in "abc":
        put(name)
    config = work()
    run_until(config, echo, units=5)
    done = committed(config)
    put("b", "new")
    with pytest.raises(JobError, match=r"input file 'b\.parquet' has changed since the run"):
        run_job(config, echo)
    assert committed(config) == done


def test_a_file_that_came_or_went_between_two_starts_is_named(
    work: Job, put: Put, echo: EchoBackend, place: str
) -> None:
    put("a")
    put("b")
    config = work()
    run_job(config, echo)
    assert run_job(config, echo).rows_resumed == 2 * ROWS
    put("c")
    with pytest.raises(JobError, match=r"input file 'c\.parquet' is new since"):
        run_job(config, echo)
    storage = Storage(place)
    storage.fs.rm([f"{storage.root}/b.parquet", f"{storage.root}/c.parquet"])
    with pytest.raises(JobError, match=r"input file 'b\.parquet' is gone since"):
        run_job(config, echo)
    assert run_job(work(fresh=True), echo).totals.rows == ROWS


def test_a_file_that_never_could_be_read_may_be_taken_out_and_later_be_put_in_whole(
    work: Job, put: Put, place: str, echo: EchoBackend, caplog: pytest.LogCaptureFixture
) -> None:
    """The first one, by whose place the units of the others are named."""
    caplog.set_level(logging.INFO)
    for name in "bc":
        put(name)
    storage, config = Storage(place), work()
    storage.write("a.parquet", b"half a file")
    run_until(config, echo, units=5)
    storage.remove(["a.parquet"])
    assert run_job(config, echo).totals.rows == 2 * ROWS
    assert "1 file without a row so far, such as 'a.parquet', left the input: the run goes on" in caplog.messages
    assert committed(config) == [*texts("b"), *texts("c")]
    assert not read_failures(Storage(config.output))
    put("a")
    assert run_job(config, echo).rows_resumed == 2 * ROWS
    assert committed(config) == [*texts("a"), *texts("b"), *texts("c")]
    storage.remove(["a.parquet"])
    with pytest.raises(JobError, match=r"input file 'a\.parquet' is gone since"):
        run_job(config, echo)


def test_a_file_that_comes_back_while_a_job_goes_on_without_it_is_not_lost(
    work: Job, put: Put, place: str, echo: EchoBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    put("b")
    storage, config = Storage(place), work()
    storage.write("a.parquet", b"half a file")
    run_until(config, echo, units=1)
    storage.remove(["a.parquet"])

    def another(session: InlineSession, unit: WorkUnit) -> None:
        monkeypatch.setattr(InlineSession, "begin_unit", lambda *_: None)
        put("a")
        assert run_job(config, echo).totals.rows == 2 * ROWS

    monkeypatch.setattr(InlineSession, "begin_unit", another)
    with pytest.raises(JobStopped, match=r"'a\.parquet' or another file is back in the input"):
        run_job(config, echo)
    assert committed(config) == [*texts("a"), *texts("b")]
    assert run_job(config, echo).rows_resumed == 2 * ROWS


def test_no_manifest_stands_once_a_file_is_back_that_still_cannot_be_read(
    work: Job, put: Put, place: str, echo: EchoBackend
) -> None:
    put("b")
    storage, config = Storage(place), work()
    for is_there in (True, False, True):
        if is_there:
            storage.write("a.parquet", b"half a file")
            with pytest.raises(UnitsFailed):
                run_job(config, echo)
        else:
            storage.remove(["a.parquet"])
            run_job(config, echo)
            manifest = json.loads(Storage(config.output).read("_SUCCESS.json") or b"")
            assert manifest["input"]["files"] == 1
        assert ("_SUCCESS.json" in Storage(config.output).entries()) == (not is_there)


def test_one_half_uploaded_file_fails_alone_and_is_done_once_it_is_whole(
    work: Job, put: Put, place: str, echo: EchoBackend
) -> None:
    for name in "abc":
        put(name)
    whole = Storage(place).read("b.parquet")
    assert whole is not None
    Storage(place).write("b.parquet", whole[:300])
    config = work()
    for _ in range(2):
        with pytest.raises(UnitsFailed, match=r"0 of \d+ units \(0 rows\) and 1 whole file failed.*b\.parquet"):
            run_job(config, echo)
        assert committed(config) == [*texts("a"), *texts("c")]
        (failed,) = read_failures(Storage(config.output))
        assert failed.path.endswith("b.parquet")
        assert "cannot be read as Parquet" in failed.error
    assert not Path(config.output, "_SUCCESS.json").exists()
    put("b", "repaired")
    assert run_job(config, echo).totals.rows == 3 * ROWS
    assert committed(config) == [*texts("a"), *texts("b", "repaired"), *texts("c")]
    assert read_failures(Storage(config.output)) == []
    # The repaired file is part of the run now as any other.
    put("b", "again")
    with pytest.raises(JobError, match=r"'b\.parquet' has changed"):
        run_job(config, echo)


def test_a_file_that_is_all_done_may_become_unreadable_where_a_run_goes_on(
    work: Job, put: Put, place: str, echo: EchoBackend, caplog: pytest.LogCaptureFixture
) -> None:
    put("a")
    put("b")
    config = work()
    run_until(config, echo, units=ROWS // 2)  # all of a's
    Storage(place).write("a.parquet", b"PAR1 half")
    with caplog.at_level(logging.INFO):
        result = run_job(config, echo)
    assert "a.parquet', are done: leave them as they are" in caplog.text
    assert "repair" not in caplog.text
    assert (result.rows_resumed, result.totals.rows) == (ROWS, 2 * ROWS)
    assert committed(config) == [*texts("a"), *texts("b")]
    assert read_failures(Storage(config.output)) == []
    manifest = json.loads(Path(config.output, "_SUCCESS.json").read_text())
    assert manifest["input"]["rows"] == manifest["totals"]["rows"] == 2 * ROWS


def test_a_file_of_which_a_unit_is_missing_may_not(work: Job, put: Put, place: str, echo: EchoBackend) -> None:
    put("a")
    put("b")
    config = work()
    run_until(config, echo, units=ROWS // 2 - 1)
    Storage(place).write("a.parquet", b"PAR1 half")
    with pytest.raises(UnitsFailed, match=r"1 whole file failed.*a\.parquet"):
        run_job(config, echo)
    assert committed(config) == [*texts("a", rows=ROWS - 2), *texts("b")]


def test_a_file_that_is_all_done_may_not_become_another_whose_columns_do_not_fit(
    work: Job, put: Put, place: str, echo: EchoBackend
) -> None:
    put("a")
    put("b")
    config = work(keep_columns=[])
    run_until(config, echo, units=ROWS // 2)
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"body": ["another"]}), sink)
    Storage(place).write("a.parquet", sink.getvalue().to_pybytes())
    with pytest.raises(UnitsFailed, match=r"1 whole file failed.*a\.parquet.*no column 'text'"):
        run_job(config, echo)


def test_at_night_a_file_that_came_back_half_done_is_not_taken_for_done(
    work: Job, put: Put, place: str, echo: EchoBackend, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if place.startswith("s3:"):
        pytest.skip("an object that is written again is another")
    put("a")
    put("b")
    config = work(incremental=True)
    run_job(config, echo)
    put("b", "new")
    run_until(config, echo, units=1)
    away = Path(place, "b.parquet").rename(tmp_path / "b.parquet")
    run_job(config, echo)
    assert committed(config) == [*texts("a"), *texts("b")]
    away.rename(Path(place, "b.parquet"))
    archive(monkeypatch, "b.parquet")
    with pytest.raises(UnitsFailed, match="1 whole file failed"):
        run_job(config, echo)


def test_at_night_a_file_that_is_done_and_as_it_was_need_not_be_readable(
    work: Job, put: Put, place: str, echo: EchoBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    put("a")
    put("b")
    config = work(incremental=True)
    run_job(config, echo)
    archive(monkeypatch, "b.parquet")
    for night in range(2):
        put(f"c{night}")
        run_job(config, echo)
        assert Path(config.output, "_SUCCESS.json").exists()
        assert read_failures(Storage(config.output)) == []
    assert committed(config) == [*texts("a"), *texts("b"), *texts("c0"), *texts("c1")]
    lost = next(commit for commit in inspect(Storage(config.output)).commits if commit.path.endswith("b.parquet"))
    Path(config.output, f"_commits/{lost.unit}.json").unlink()
    with pytest.raises(UnitsFailed, match="1 whole file failed"):
        run_job(config, echo)


def test_at_night_a_half_uploaded_file_waits_and_the_old_rows_of_a_damaged_one_stay(
    work: Job, put: Put, place: str, echo: EchoBackend
) -> None:
    put("a")
    put("b")
    config = work(incremental=True)
    run_job(config, echo)
    Storage(place).write("b.parquet", b"PAR1 half")
    with pytest.raises(UnitsFailed, match="1 whole file failed"):
        run_job(config, echo)
    assert Storage(config.output).read("_SUCCESS.json") is None  # of the night before
    put("c")
    Storage(place).write("d.parquet", b"PAR1 half")
    for _ in range(2):
        with pytest.raises(UnitsFailed, match="2 whole files failed"):
            run_job(config, echo)
        assert committed(config) == [*texts("a"), *texts("b"), *texts("c")]
    put("b", "new")
    put("d", rows=3)
    run_job(config, echo)
    assert committed(config) == [*texts("a"), *texts("b", "new"), *texts("c"), *texts("d", rows=3)]
    assert read_failures(Storage(config.output)) == []


def test_at_night_a_file_replaced_while_it_is_read_is_done_the_next_night(
    work: Job, put: Put, echo: EchoBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    put("a")
    put("b")
    config = work(incremental=True, unit_attempts=1)
    begun = InlineSession.begin_unit
    seen: list[str] = []

    def replace(session: InlineSession, unit: Any) -> None:
        begun(session, unit)
        seen.append(unit.path[-9:])
        if seen.count("b.parquet") == 2:
            put("b", "new")

    monkeypatch.setattr(InlineSession, "begin_unit", replace)
    with pytest.raises(UnitsFailed, match=r"b\.parquet' has changed"):
        run_job(config, echo)
    monkeypatch.setattr(InlineSession, "begin_unit", begun)
    run_job(config, echo)
    assert committed(config) == [*texts("a"), *texts("b", "new")]


def test_a_plan_is_made_of_the_files_that_can_be_read_and_says_which_cannot_and_which_are_left_out(
    work: Job, put: Put, place: str, echo: EchoBackend, caplog: pytest.LogCaptureFixture
) -> None:
    put("a")
    put(".hidden")
    put("_tools/own")
    for name in ("b.PARQUET", "empty.parquet", "notes.txt"):
        Storage(place).write(name, b"PAR1 half" * (name != "empty.parquet"))
    with caplog.at_level(logging.INFO):
        assert forecast_run(work(), echo).rows == ROWS
    for file in ("b.PARQUET", "empty.parquet"):
        assert f"{file}' cannot be read as Parquet" in caplog.text
    assert '2 names that begin with "_" or "."' in caplog.text
    assert "1 files that do not end in .parquet, .parq or .pq (such as" in caplog.text


@pytest.mark.parametrize("incremental", [False, True])
def test_who_mends_a_damaged_page_is_told_beforehand_whether_the_job_can_go_on(
    work: Job, put: Put, place: str, echo: EchoBackend, incremental: bool
) -> None:
    put("a")
    put("b")
    whole = Storage(place).read("b.parquet") or b""
    Storage(place).write("b.parquet", whole[:4] + bytes(60) + whole[64:])
    config = work(incremental=incremental)
    changed = "; where that changes a file that could be read when the run began, begin anew instead, with --fresh or "
    anew = "" if incremental else f"{changed}into another output"
    with pytest.raises(UnitsFailed) as ended:
        run_job(config, echo)
    assert str(ended.value).endswith(f"mend what they name and start the job again to retry only those{anew}")
    assert inspect(Storage(config.output)).advice.endswith(f"start the same job again: it tries only those{anew}")
    put("b")
    if not incremental:
        with pytest.raises(JobError, match=r"'b\.parquet' has changed since the run"):
            run_job(config, echo)
        config = work(fresh=True)
    run_job(config, echo)
    assert committed(config) == [*texts("a"), *texts("b")]


@pytest.mark.parametrize("when", ["after the plan", "half read"])
def test_a_file_that_vanishes_during_the_run_fails_its_own_units_by_name(
    work: Job, put: Put, place: str, echo: EchoBackend, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    for name in "abc":
        put(name)
    config = work()
    storage = Storage(place)
    begun = InlineSession.begin_unit

    def vanish(session: InlineSession, unit: Any) -> None:
        begun(session, unit)
        if unit.id == ("00000-000000000" if when == "after the plan" else "00001-000000002"):
            storage.fs.rm_file(f"{storage.root}/b.parquet")

    monkeypatch.setattr(InlineSession, "begin_unit", vanish)
    with pytest.raises(UnitsFailed, match=r"b\.parquet"):
        run_job(config, echo)
    assert {*texts("a"), *texts("c")} <= set(committed(config)) < {*texts("a"), *texts("b"), *texts("c")}
    assert {unit.path.rsplit("/")[-1] for unit in read_failures(Storage(config.output))} == {"b.parquet"}


@pytest.mark.usefixtures("inline")
@pytest.mark.parametrize("incremental", [False, True])
def test_what_is_no_readable_file_fails_alone(tmp_path: Path, job: Job, echo: EchoBackend, incremental: bool) -> None:
    (tmp_path / "in").mkdir()
    pq.write_table(pa.table({"text": ["yes"]}), tmp_path / "in/a.parquet")
    os.mkfifo(tmp_path / "in/fifo.parquet")  # which would be waited for
    os.symlink("nowhere", tmp_path / "in/dangling.parquet")
    os.symlink("round.parquet", tmp_path / "in/round.parquet")
    os.symlink("a.parquet", tmp_path / "in/twice.parquet")
    (tmp_path / "in/empty.parquet").touch()
    config = job(incremental=incremental)
    with pytest.raises(UnitsFailed, match="4 whole files failed"):
        run_job(config, echo)
    assert committed(config) == ["yes"]
    failed = [unit.path.rsplit("/")[-1] for unit in read_failures(Storage(config.output))]
    assert sorted(failed) == ["dangling.parquet", "empty.parquet", "fifo.parquet", "round.parquet"]


def test_a_file_without_permission_fails_alone(write_parquet: WriteParquet) -> None:
    root = os.geteuid() == 0
    with TemporaryDirectory() as folder:  # no parent of which is closed to other users
        for name in "ab":
            write_parquet(Path(folder, f"{name}.parquet"), {"text": ["x"]}).chmod(0o644)
        Path(folder).chmod(0o755)
        Path(folder, "b.parquet").chmod(0)
        if root:
            os.seteuid(65534)  # one to whom permissions apply
        try:
            plan = make_plan(JobConfig(input=folder, output=""), PromptTemplate("{text}"))
        finally:
            if root:
                os.seteuid(0)
    assert [bool(file.problem) for file in plan.files] == [False, True]
    assert "b.parquet' cannot be read as Parquet" in plan.files[1].problem
    assert "Permission denied" in plan.files[1].problem


def test_columns_whose_types_differ_are_cast_and_the_output_has_one_schema(
    work: Job, put: Put, echo: EchoBackend
) -> None:
    put("a", n=pa.array(range(ROWS), pa.int32()), s=pa.array(["x"] * ROWS, pa.string()), v=pa.nulls(ROWS))
    put("b", n=pa.array(range(ROWS), pa.int64()), s=pa.array(["y"] * ROWS, pa.large_string()), v=["z"] * ROWS)
    put("c", s=pa.array(["q"] * ROWS).dictionary_encode(), at=pa.array([1] * ROWS, pa.timestamp("ms")))
    put("d", at=pa.array([1] * ROWS, pa.timestamp("us")), l=pa.array([["1"]] * ROWS, pa.list_(pa.large_string())))
    put("e", l=pa.array([["2"]] * ROWS), rows=ROWS)
    config = work()
    run_job(config, echo)
    schemas = {pq.read_schema(path) for path in Path(config.output, "data").iterdir()}
    assert len({tuple(zip(schema.names, map(str, schema.types), strict=True)) for schema in schemas}) == 1
    assert committed(config) == [text for name in "abcde" for text in texts(name)]


@pytest.mark.usefixtures("inline")
def test_names_with_dots_nested_columns_and_columns_twice_do_no_harm(
    tmp_path: Path, job: Job, echo: EchoBackend
) -> None:
    table = pa.table(
        {"a": [{"b": 1, "text": "no"}], "a.b": ["dotted"], "text": ["yes"], "text.more": ["other"], "zero": [None]}
    )
    twice = pa.table([*table.columns, pa.array([1]), pa.array([2])], [*table.column_names, "x", "x"])
    (tmp_path / "in").mkdir()
    pq.write_table(table, tmp_path / "in/a.parquet")
    pq.write_table(table.slice(0, 0), tmp_path / "in/none.parquet")
    pq.write_table(twice, tmp_path / "in/twice.parquet")
    config = job(keep_columns=["a.b", "text"])
    run_job(config, echo)
    rows = [pq.read_table(path).to_pylist()[0] for path in Path(config.output, "data").iterdir()]
    assert [(row["a.b"], row["text"]) for row in rows] == [("dotted", "yes")] * 2


def test_two_files_that_records_would_take_for_one_are_refused(
    tmp_path: Path, job: Job, write_parquet: WriteParquet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stores have names with two slashes in a row, where disks have none."""
    path = str(write_parquet(tmp_path / "in/a.parquet", {"text": ["x"]}))
    monkeypatch.setattr(inputs, "find_input_files", lambda _: [path, path.replace("/a.parquet", "//a.parquet")])
    with pytest.raises(JobError, match=r"in/a.parquet' and .*in//a.parquet' are one and the same .* rename one"):
        make_plan(job(), PromptTemplate("{text}"))


@pytest.mark.usefixtures("inline")
def test_a_lost_or_damaged_record_of_the_input_is_said(tmp_path: Path, job: Job, echo: EchoBackend) -> None:
    (tmp_path / "in").mkdir()
    pq.write_table(pa.table({"text": ["x"] * 5}), tmp_path / "in/a.parquet")
    run_job(job(), echo)
    record = tmp_path / "out/_input/0.json"
    assert json.loads(record.read_text())["files"].keys() == {"a.parquet"}
    for damage in (b"", b"[]", b'{"files": {"a": 1}}', b'{"files": {"a": [1, "x"]}}'):
        record.write_bytes(damage)
        with pytest.raises(JobError, match=r"_input/0\.json of .* is damaged"):
            run_job(job(), echo)
    record.unlink()
    with pytest.raises(JobError, match=r"_input/0\.json of .* is not there"):
        run_job(job(), echo)


def test_a_file_rewritten_in_place_while_it_is_read_is_noticed(tmp_path: Path, write_parquet: WriteParquet) -> None:
    path = write_parquet(tmp_path / "in/a.parquet", {"text": ["old"] * 8}, [4, 4])
    config = JobConfig(input=str(tmp_path / "in"), output="", rows_per_unit=2)
    plan = make_plan(config, PromptTemplate("{text}"))
    units = read_units(config.input_storage(), plan.units, ["text"])
    assert next(units)[1]["text"].to_pylist() == ["old"] * 2
    other = write_parquet(tmp_path / "b.parquet", {"text": ["new"] * 8}, [4, 4]).read_bytes()
    with path.open("r+b") as stream:
        stream.write(other)
    with pytest.raises(JobError, match=r"a\.parquet' has changed"):
        next(units)
