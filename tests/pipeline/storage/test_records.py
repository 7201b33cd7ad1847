"""What is read back from an output is as it should be, or said to be damaged in one sentence; it leads nowhere else."""

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from engine_double import EchoBackend
from fixture_types import Job, WriteParquet

from pipeline.commits.commit import Commit, Totals, _read_snapshot, read_commits, write_snapshot
from pipeline.commits.failed import forget_failures, read_failures
from pipeline.commits.manifest import read_manifest
from pipeline.config import JobConfig
from pipeline.errors import JobError
from pipeline.preparing.run_record import read_run
from pipeline.run import run_job
from pipeline.storage.storage import Storage

UNIT = "00000-000000000"
COMMIT = json.loads(
    Commit(UNIT, "a", f"data/{UNIT}-a.parquet", "sha256:0", 1, "in", 0, totals=Totals(rows=1)).to_json()
)
FAILURE = {"unit": UNIT, "path": "in", "start": 0, "rows": 1, "attempts": 3, "error": "no"}


def _commit(**changes: Any) -> bytes:
    return json.dumps(COMMIT | changes).encode()


@pytest.mark.parametrize(
    "content",
    [
        b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 100_000, b'{"a":' * 500 + b"1" + b"}" * 500,
        _commit(file="../victim"), _commit(file="/dev/zero"), _commit(file="data/../../victim.parquet"),
        _commit(file=f"data/{UNIT}-a.parquet\n"), _commit(file="data/other-a.parquet"),
        _commit(unit="../../victim"), _commit(unit="00001-000000000"), _commit(unit=None), _commit(size=-1),
        _commit(start=10**30), _commit(totals=None), _commit(totals={"rows": "x"}),
        _commit(totals={"seconds": float("nan")}), _commit().replace(b'"seconds": 0.0', b'"seconds": 1e999'),
        _commit().replace(b'"rows": 1', b'"rows": ' + b"9" * 5_000), b" " * 2**21, b"[" + b"0," * 10**6 + b"0]",
    ],
)  # fmt: skip
def test_a_damaged_commit_is_one_sentence_with_its_name_and_the_way_out(storage: Storage, content: bytes) -> None:
    name = f"_commits/{UNIT}.json"
    storage.write(name, content)
    with pytest.raises(
        JobError,
        match=rf"^{name} of .* is damaged \(.*\): delete it, and its unit is done again if its input file is there$",
    ):
        read_commits(storage)


@pytest.mark.parametrize("name", ["_run.json", f"_commits/{UNIT}.json", f"_failed/{UNIT}.json", "_SUCCESS.json"])
def test_a_record_that_is_a_link_to_endless_zeros_or_a_pipe_is_not_read(storage: Storage, name: str) -> None:
    path = Path(storage.path(name))
    path.parent.mkdir(parents=True)
    read = {"_run": read_run, "_com": read_commits, "_fai": read_failures, "_SUC": read_manifest}[name[:4]]
    for make in (lambda: path.symlink_to("/dev/zero"), lambda: os.mkfifo(path)):
        make()
        started = time.monotonic()
        with pytest.raises(JobError, match=r"damaged .it is no file"):
            read(storage)
        assert time.monotonic() - started < 5
        path.unlink()


@pytest.mark.usefixtures("credentials")
def test_no_more_of_a_record_is_fetched_than_one_may_hold() -> None:
    storage = Storage("s3://corpus/records")
    storage.write("_run.json", b"")
    with pytest.raises(JobError, match=r"_run\.json of .* is damaged"):
        read_run(storage)
    storage.write("_run.json", b"0123456789")
    assert storage.read("_run.json", 10) == b"0123456789"
    with pytest.raises(JobError, match="more than 9 bytes"):
        storage.read("_run.json", 9)


@pytest.mark.parametrize("unit", ["../../victim", "/etc/victim", "a/b", "other", 7, None])
def test_a_failures_record_leads_to_no_other_file(storage: Storage, tmp_path: Path, unit: object) -> None:
    victim = tmp_path / "victim.json"
    victim.write_text("mine")
    storage.write("_failed/x.json", json.dumps({**FAILURE, "unit": unit}).encode())
    with pytest.raises(JobError, match=r"^_failed/x\.json of .* is damaged .*: delete it, and start the job again"):
        read_failures(storage)
    forget_failures(storage, keep=[])
    assert victim.read_text() == "mine"


def test_a_field_of_a_later_version_is_ignored(storage: Storage) -> None:
    storage.write(f"_failed/{UNIT}.json", json.dumps({**FAILURE, "colour": "red"}).encode())
    (failed,) = read_failures(storage)
    assert failed.error == "no"


@pytest.fixture
def done(job: Job, write_parquet: WriteParquet, tmp_path: Path, inline: object) -> JobConfig:
    """A job that has come to its end."""
    write_parquet(tmp_path / "in/a.parquet", {"text": ["one", "two", "three"]})
    run_job(job(rows_per_unit=2), EchoBackend())
    return job(rows_per_unit=2)


def test_a_manifest_that_is_damaged_or_lacks_a_file_is_written_anew(done: JobConfig) -> None:
    storage = done.output_storage()
    whole = storage.read("_SUCCESS.json") or b""
    lacking = json.loads(whole)
    del lacking["commits"][0]
    for content in (whole[:-9], json.dumps(lacking).encode(), whole.replace(b'"fingerprint": "', b'"fingerprint": "0')):
        storage.write("_SUCCESS.json", content)
        run_job(done, EchoBackend())
        assert storage.read("_SUCCESS.json") == whole


def test_a_commit_without_its_file_or_with_other_rows_ends_the_job_by_name(done: JobConfig) -> None:
    storage = done.output_storage()
    commit = read_commits(storage)[0]
    name = f"_commits/{commit.unit}.json"
    whole = storage.read(name) or b""
    for was, now, why in ((b'"rows": 2', b'"rows": 7', "a unit of 2"), (b".parquet", b"0.parquet", "is not there")):
        storage.write(name, whole.replace(was, now, 1))
        with pytest.raises(JobError, match=rf"^{name} of .* is damaged .*{why}"):
            run_job(done, EchoBackend())
    storage.remove([name])
    assert run_job(done, EchoBackend()).totals.rows == 3


def test_a_snapshot_is_believed_only_as_a_whole(done: JobConfig) -> None:
    storage = done.output_storage()
    commits = read_commits(storage)
    write_snapshot(storage, commits)
    content = bytearray(storage.read("_snapshot.json.gz") or b"")
    content[-6] ^= 1  # of the check sum of what comes before
    storage.write("_snapshot.json.gz", bytes(content))
    assert _read_snapshot(storage, storage.stamps("_commits", ".json")) == {}
    assert read_commits(storage) == commits
