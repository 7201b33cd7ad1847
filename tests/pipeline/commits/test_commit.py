"""The commit log: first record wins, and nothing exists without one."""

import gzip
import hashlib
import math
from concurrent.futures import ThreadPoolExecutor

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from engine_double import SUMMED, ByteTokenizer, Echo

from engine import Sampling
from pipeline.commits import commit as commit_log
from pipeline.commits.commit import SNAPSHOT_FILE, Commit, Totals, commit_unit, read_commits, sweep_orphans
from pipeline.errors import JobError
from pipeline.rows.row_generator import RowGenerator
from pipeline.rows.rows import generate, prepare
from pipeline.rows.template import PromptTemplate
from pipeline.rows.unit import WorkUnit
from pipeline.storage.storage import Storage

UNIT = WorkUnit("00000-000000000", "in/a.parquet", 0, 5)


@pytest.fixture(scope="module")
def rows() -> pa.Table:
    """Five output rows: one stopped, one cut and at its limit, two errors, one more stopped."""
    table = pa.table({"text": ["short", "longer than that", None, "", "more"]})
    prepared = prepare(table, table.schema, "text", PromptTemplate("{text}", format="raw"), ByteTokenizer(), 12)
    return generate(prepared, ["0", "1", "2", "3", "4"], RowGenerator(Echo(), Sampling(max_new_tokens=6), None, 2))


def test_the_first_commit_wins_and_the_loser_is_told_the_winner(storage: Storage, rows: pa.Table) -> None:
    first = commit_unit(storage, UNIT, rows)
    second = commit_unit(storage, UNIT, rows.slice(0, 2))
    assert second == first
    assert read_commits(storage) == [first]


def test_of_many_attempts_at_once_all_agree_on_one(storage: Storage, rows: pa.Table) -> None:
    with ThreadPoolExecutor(8) as pool:
        commits = list(pool.map(lambda _: commit_unit(storage, UNIT, rows), range(8)))
    assert {commit.attempt for commit in commits} == {read_commits(storage)[0].attempt}


def test_a_commit_says_what_was_written(storage: Storage, rows: pa.Table) -> None:
    commit = commit_unit(storage, UNIT, rows)
    content = storage.read(commit.file)
    assert content is not None
    assert commit.checksum == f"sha256:{hashlib.sha256(content).hexdigest()}"
    assert commit.size == len(content)
    assert (commit.unit, commit.path, commit.start) == (UNIT.id, UNIT.path, UNIT.start)
    assert commit.file == f"data/{UNIT.id}-{commit.attempt}.parquet"
    assert pq.read_table(pa.BufferReader(content)).equals(rows)


def test_totals_are_the_sums_of_the_rows(storage: Storage, rows: pa.Table) -> None:
    totals = commit_unit(storage, UNIT, rows, cost={"flops_padding": 99, "seconds": 2.5}).totals
    records = rows.to_pylist()
    for name in SUMMED:
        assert getattr(totals, name) == sum(record[name] for record in records) > 0
    assert totals.active_layers == sum(r["mean_active_layers"] * r["generated_tokens"] for r in records)
    assert (totals.rows, totals.errors, totals.truncated, totals.stopped) == (5, 2, 1, 2)
    assert (totals.flops_padding, totals.seconds) == (99, 2.5)


def test_sums_beyond_64_bits_are_exact(storage: Storage, rows: pa.Table) -> None:
    name = "flops_prompt"
    many = rows.set_column(rows.column_names.index(name), name, pa.array([2**62] * rows.num_rows))
    assert commit_unit(storage, UNIT, many).totals.flops_prompt == 5 * 2**62
    assert read_commits(storage)[0].totals.flops_prompt == 5 * 2**62


def test_speedups_are_full_depth_over_scheduled() -> None:
    flops = {"flops_prompt": 100, "flops_decode": 200, "flops_decode_full_depth": 400, "flops_full_depth": 550}
    totals = Totals(**flops, active_layers=30.0, generated_tokens=10)
    assert totals.decode_speedup == 2.0
    assert totals.prompt_speedup == 1.5
    assert totals.sample_speedup == pytest.approx(55 / 30)
    assert totals.mean_active_layers == 3.0
    nothing = Totals()
    assert (nothing.decode_speedup, nothing.sample_speedup, nothing.mean_active_layers) == (1.0, 1.0, 0.0)


def test_a_commit_survives_json(storage: Storage) -> None:
    commit = Commit(
        "u", "a", "data/u-a.parquet", "sha256:0", 7, "in/é.parquet", 3, "run", totals=Totals(rows=2, active_layers=1.5)
    )
    storage.write("_commits/u.json", commit.to_json())
    assert read_commits(storage) == [commit]


@pytest.mark.parametrize("cost", [math.nan, math.inf])
def test_a_cost_that_nobody_could_read_back_is_not_committed(storage: Storage, rows: pa.Table, cost: float) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        commit_unit(storage, UNIT, rows, cost={"audit_nll": cost})
    assert read_commits(storage) == []
    assert storage.names("data", "") == []


def test_commits_are_read_in_the_order_of_their_units(storage: Storage, rows: pa.Table) -> None:
    units = [WorkUnit(f"{file:05d}-{start:09d}", "a", start, 5) for file in (1, 0) for start in (5, 0)]
    for unit in units:
        commit_unit(storage, unit, rows)
    assert [commit.unit for commit in read_commits(storage)] == sorted(unit.id for unit in units)


def test_an_output_without_commits_has_none(storage: Storage) -> None:
    assert read_commits(storage) == []


def lost() -> None:
    raise JobError("the output is another's")


def test_the_sweep_removes_what_no_commit_names_and_nothing_else(storage: Storage, rows: pa.Table) -> None:
    kept = commit_unit(storage, UNIT, rows)
    commit_unit(storage, UNIT, rows)  # comes second
    storage.write("data/00007-000000000-00000000dead.parquet", b"died before its commit")
    storage.write("report.html", b"")
    with pytest.raises(JobError, match="another's"):
        sweep_orphans(storage.guarded(lost), [kept])
    assert len(storage.names("data")) == 3, "nothing is removed once the output is another's"
    assert sweep_orphans(storage, [kept]) == 2
    assert storage.names("data") == [kept.file]
    assert storage.read("report.html") == b""
    assert sweep_orphans(storage, [kept]) == 0


@pytest.mark.parametrize("is_listed", [False, True])
def test_a_record_that_is_taken_out_while_others_are_read_is_left_out(
    storage: Storage, rows: pa.Table, monkeypatch: pytest.MonkeyPatch, is_listed: bool
) -> None:
    """As of versions of files that were replaced; one that still is listed is no such."""
    units = [WorkUnit(f"00000-{start:09d}", "a", start, 5) for start in (0, 5)]
    kept, gone = (commit_unit(storage, unit, rows) for unit in units)
    name, read_one = f"_commits/{gone.unit}.json", Storage.read

    def read(self: Storage, wanted: str, limit: int | None = None) -> bytes | None:
        if wanted == name:
            if not is_listed:
                storage.remove([name])
            return None
        return read_one(self, wanted, limit)

    monkeypatch.setattr(Storage, "read", read)
    if is_listed:
        with pytest.raises(JobError, match=rf"^{name} of .* was just seen, yet is not there: who deletes it\?$"):
            read_commits(storage)
    else:
        assert read_commits(storage) == [kept]


@pytest.fixture
def log(storage: Storage, rows: pa.Table, monkeypatch: pytest.MonkeyPatch) -> list[WorkUnit]:
    """Units whose commits have been read, and put into a snapshot."""
    monkeypatch.setattr(commit_log, "SNAPSHOT_EVERY", 3)
    units = [WorkUnit(f"00000-{start:09d}", "a", start, 5) for start in (0, 5, 10)]
    for unit in units:
        commit_unit(storage, unit, rows)
    read_commits(storage)
    assert storage.read(SNAPSHOT_FILE) is None, "who only looks leaves nothing behind"
    read_commits(storage, keep=True)
    assert storage.read(SNAPSHOT_FILE) is not None
    return units


def test_commits_of_a_snapshot_are_not_read_again(
    storage: Storage, rows: pa.Table, log: list[WorkUnit], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = read_commits(storage)
    added = commit_unit(storage, WorkUnit("00001-000000000", "b", 0, 5), rows)
    read: list[str] = []
    read_one = Storage.read
    monkeypatch.setattr(Storage, "read", lambda self, name, limit: (read.append(name), read_one(self, name, limit))[1])
    assert read_commits(storage) == [*before, added]
    assert read == [SNAPSHOT_FILE, "_commits/00001-000000000.json"]


def test_a_snapshot_does_not_outlive_the_records_it_copies(
    storage: Storage, rows: pa.Table, log: list[WorkUnit]
) -> None:
    first, second, third = read_commits(storage)
    storage.remove([f"_commits/{first.unit}.json", f"_commits/{second.unit}.json"])
    again = commit_unit(storage, log[1], rows)  # the unit of the second, by another attempt
    assert read_commits(storage) == [again, third]


NO_JSON, CUT = gzip.compress(b"[", mtime=0), gzip.compress(b"{}", mtime=0)[:-4]


@pytest.mark.parametrize("content", [b"", b"{}", b"\x1f\x8b\x08", NO_JSON, CUT])
def test_a_damaged_snapshot_is_as_good_as_none(storage: Storage, log: list[WorkUnit], content: bytes) -> None:
    before = read_commits(storage)
    storage.write(SNAPSHOT_FILE, content)
    assert read_commits(storage) == before
