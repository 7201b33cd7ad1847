"""Reading work units: each gets exactly its rows, wherever row groups and decode batches end."""

import pickle
import random
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from fixture_types import WriteParquet
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.errors import JobError
from pipeline.rows import read
from pipeline.rows.read import read_units
from pipeline.rows.unit import WorkUnit
from pipeline.storage.storage import Storage
from pipeline.values import row_groups

LOCAL = Storage(".")


@settings(max_examples=150)
@given(
    groups=st.lists(st.integers(0, 30), min_size=1, max_size=8).filter(any),
    rows_per_unit=st.integers(1, 25),
    batch_rows=st.integers(1, 20),
    data=st.data(),
)
def test_a_unit_reads_exactly_its_rows(
    tmp_path_factory: pytest.TempPathFactory,
    write_parquet: WriteParquet,
    groups: list[int],
    rows_per_unit: int,
    batch_rows: int,
    data: st.DataObject,
) -> None:
    rows = sum(groups)
    path = str(write_parquet(tmp_path_factory.mktemp("read") / "a.parquet", {"row": range(rows)}, groups))
    starts = range(0, rows, rows_per_unit)
    units = [WorkUnit(str(start), path, start, min(rows_per_unit, rows - start)) for start in starts]
    pending = [unit for unit in units if data.draw(st.booleans())] or units[-1:]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(read, "BATCH_ROWS", batch_rows)
        found = list(read_units(LOCAL, pending, ["row"]))
    assert [unit for unit, _ in found] == pending
    for unit, table in found:
        assert table["row"].to_pylist() == list(range(unit.start, unit.start + unit.rows))


def test_what_cannot_be_read_says_so_in_other_processes_too() -> None:
    error = read.Unreadable("s3://in/a.parquet", OSError("page 3 is damaged"), 512)
    there = pickle.loads(pickle.dumps(error))
    assert (str(there), there.end) == (str(error), 512)
    assert "(page 3 is damaged)" in str(there)


def test_only_the_named_columns_that_the_file_has_are_read(tmp_path: Path, write_parquet: WriteParquet) -> None:
    path = str(write_parquet(tmp_path / "a.parquet", {"text": ["x"], "big": ["y"]}))
    ((_, table),) = read_units(LOCAL, [WorkUnit("0", path, 0, 1)], ["text", "absent"])
    assert table.column_names == ["text"]


def test_a_file_that_became_shorter_ends_the_job_by_name(tmp_path: Path, write_parquet: WriteParquet) -> None:
    path = str(write_parquet(tmp_path / "a.parquet", {"text": ["x"] * 5}))
    with pytest.raises(JobError, match=r"a\.parquet' has fewer rows than when the job was planned"):
        list(read_units(LOCAL, [WorkUnit("0", path, 0, 6)], ["text"]))


@pytest.mark.parametrize("damage", ["gone", "truncated"])
def test_a_file_that_became_unreadable_ends_the_job_by_name(
    tmp_path: Path, write_parquet: WriteParquet, damage: str
) -> None:
    path = write_parquet(tmp_path / "a.parquet", {"text": ["x"] * 5})
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(JobError, match=r"a\.parquet' cannot be read"):
        list(read_units(LOCAL, [WorkUnit("0", str(path), 0, 5)], ["text"]))


@pytest.fixture
def large(tmp_path: Path, write_parquet: WriteParquet) -> Path:
    """A row group of 4,000 rows in pages, which do not compress, and are far more than a piece."""
    draw = random.Random(0)
    texts = [draw.randbytes(1500).hex() for _ in range(4000)]
    return write_parquet(tmp_path / "large.parquet", {"text": texts}, [4000])


def test_of_a_large_row_group_no_more_is_fetched_than_its_units_need(
    large: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read, "PIECE_BYTES", 1 << 20)
    monkeypatch.setattr(row_groups, "PIECE_BYTES", 1 << 20)
    fetched, open_path = [], Storage.open_path

    def watched(storage: Storage, path: str, stamp: str | None = None) -> Any:
        stream = open_path(storage, path, stamp)
        monkeypatch.setattr(
            stream, "read", lambda length=-1, _read=stream.read: fetched.append(length) or _read(length)
        )
        return stream

    monkeypatch.setattr(Storage, "open_path", watched)
    texts = pq.read_table(large)["text"].to_pylist()
    for start, most in ((0, 0.5), (1000, 0.8), (3900, 1.1)):
        fetched.clear()
        [(_, table)] = read_units(LOCAL, [WorkUnit("0", str(large), start, 100)], ["text"])
        assert table["text"].to_pylist() == texts[start : start + 100]
        assert sum(fetched) < most * large.stat().st_size


def test_damage_behind_a_units_rows_is_not_its_own(large: Path) -> None:
    content = bytearray(large.read_bytes())
    middle = len(content) // 2
    content[middle : middle + (1 << 21)] = bytes(1 << 21)
    large.write_bytes(content)
    before, behind = WorkUnit("0", str(large), 0, 16), WorkUnit("1", str(large), 3900, 16)
    units = read_units(LOCAL, [before, behind], ["text"])
    assert next(units)[0] == before
    with pytest.raises(JobError, match=r"large\.parquet' cannot be read"):
        next(units)
    assert [unit for unit, _ in read_units(LOCAL, [before], ["text"])] == [before]
