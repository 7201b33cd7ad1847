"""Nights that die anywhere, and jobs that come too late, leave every row in the output once."""

import json
import os
import shutil
import tempfile
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from engine_double import NoEngineBackend
from fixture_types import Job, WriteParquet
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from inline_session import InlineSession

from pipeline import run
from pipeline.commits.commit import read_commits
from pipeline.config import JobConfig
from pipeline.errors import JobStopped
from pipeline.inputs.known_files import INPUTS_FILE
from pipeline.inspection import inspect, verify
from pipeline.preparing import incremental
from pipeline.run import run_job
from pipeline.storage.lease import Lease
from pipeline.storage.storage import Storage
from pipeline.storage.stores import LocalStore
from tests.pipeline.preparing.nights import Move, Put, by, everything, generations, texts


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


@pytest.mark.usefixtures("plain_report")
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
    last, known = (Path(first.output, name).read_text() for name in ("_SUCCESS.json", INPUTS_FILE))
    promised = {entry["file"] for entry in json.loads(last)["commits"]}
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
            found, manifest = inspect(Storage(output)), Path(output, "_SUCCESS.json")
            assert verify(Storage(output), found) == []
            if manifest.exists() and manifest.read_text() == last:
                assert found.finished == (Path(output, INPUTS_FILE).read_text() == known)
            else:
                assert found.finished == manifest.exists()
            # A reader's copy of the last manifest is good until there is another.
            if not found.finished:
                assert promised <= set(Storage(output).names("data"))
            if loses_record:
                Path(output, INPUTS_FILE).unlink()
            run_job(config, by("x"))
        # Without the record nobody knows that no job will commit what was already taken out.
        assert generations(output, leftovers=loses_record) == expected
        shutil.rmtree(output)
        if done:
            break
    assert step > 4 * 5 + 8  # of each of four units there are five, beside those of records and removals


@pytest.mark.usefixtures("plain_report")
def test_what_a_night_left_of_a_file_that_then_vanished_is_swept_by_the_second_one(
    nightly: Job, put: Put, tmp_path: Path
) -> None:
    first = nightly()
    put("same", 2)
    run_job(first, by("x"))
    left = 0
    for step in count():
        put("gone", 6)
        output = str(tmp_path / f"killed at {step}")
        shutil.copytree(first.output, output)
        config = first.model_copy(update={"output": output})
        try:
            with DeathAt(step):
                run_job(config, by("x"))
            break
        except Killed:
            (tmp_path / "in/gone.parquet").unlink()
        run_job(config, NoEngineBackend())
        found = generations(output, leftovers=True)
        left += len(Storage(output).names("data")) - len(read_commits(Storage(output)))
        run_job(config, NoEngineBackend())
        assert generations(output) == found
        shutil.rmtree(output)
    assert left


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
    nightly: Job, put: Put, tmp_path: Path
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


def test_the_sweep_leaves_alone_what_another_job_may_be_about_to_commit(nightly: Job, put: Put) -> None:
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
