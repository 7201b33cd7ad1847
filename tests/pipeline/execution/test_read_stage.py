"""What a damaged page, or a row that no column holds, costs the units that are read with it."""

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pyarrow as pa
import pytest
from engine_double import LAYERS, EchoBackend
from fixture_types import Job, WriteParquet

from engine import Schedule
from pipeline.config import JobConfig
from pipeline.execution.stages import Task, read, span_row
from pipeline.execution.wire import Parcel
from pipeline.rows.template import PromptTemplate
from pipeline.rows.unit import WorkUnit
from pipeline.storage.storage import Storage


def parcels(
    config: JobConfig, path: Path, rows: int, rows_per_unit: int, kept: pa.Schema | None = None
) -> list[Parcel]:
    """Of all units of a file, read as one span."""
    starts = range(0, rows, rows_per_unit)
    units = [WorkUnit(f"00000-{start:09d}", str(path), start, min(rows_per_unit, rows - start)) for start in starts]
    template, kept = PromptTemplate("{text}", format="raw"), kept or pa.schema([])
    columns = ("text", *kept.names)
    task = Task(config, EchoBackend(), template, Schedule.full_depth(LAYERS), columns, kept, 5000, "run")
    span, board = pa.Table.from_pylist([span_row(units)]), SimpleNamespace(stopping=lambda: False)
    return [Parcel.from_row(row) for table in read(span, task, cast(Any, board)) for row in table.to_pylist()]


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files that were opened, each time."""
    found, open_path = [], Storage.open_path

    def watched(storage: Storage, path: str, stamp: str | None = None) -> Any:
        found.append(path)
        return open_path(storage, path, stamp)

    monkeypatch.setattr(Storage, "open_path", watched)
    return found


def test_behind_a_damaged_page_a_row_group_is_not_read_again_for_every_unit(
    tmp_path: Path, job: Job, write_parquet: WriteParquet, opened: list[str]
) -> None:
    draw = random.Random(0)
    texts = [draw.randbytes(700).hex() for _ in range(6000)]
    path = write_parquet(tmp_path / "in/a.parquet", {"text": texts}, [3000, 3000])
    content = bytearray(path.read_bytes())
    quarter = len(content) // 4
    content[quarter : quarter + (1 << 19)] = bytes(1 << 19)  # in the middle of the first of two
    path.write_bytes(content)
    found = parcels(job(), path, 6000, 20)
    assert sorted(parcel.unit.start for parcel in found) == list(range(0, 6000, 20))
    failed = [parcel for parcel in found if parcel.failure is not None]
    starts = [parcel.unit.start for parcel in failed]
    assert 0 < starts[0] < 1600
    assert starts == list(range(starts[0], 3000, 20))
    assert all("cannot be read" in parcel.failure.error for parcel in failed if parcel.failure is not None)
    assert len(opened) == 2


def test_a_value_that_its_column_does_not_hold_costs_its_own_unit_alone(
    tmp_path: Path, job: Job, write_parquet: WriteParquet, opened: list[str]
) -> None:
    values = pa.array([10**13 if row in (7, 23) else row for row in range(40)], pa.timestamp("s"))
    path = write_parquet(tmp_path / "in/a.parquet", {"text": ["x"] * 40, "when": values})
    found = parcels(job(), path, 40, 4, pa.schema([("when", pa.timestamp("ns"))]))
    assert [parcel.unit.start for parcel in found if parcel.failure is not None] == [4, 20]
    assert [parcel.unit.start for parcel in found] == list(range(0, 40, 4))
    assert len(opened) == 3
