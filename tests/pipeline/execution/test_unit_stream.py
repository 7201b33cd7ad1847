"""What is done is told of when it is done."""

import time
from pathlib import Path
from typing import Any

import pytest
import ray
from fixture_types import Job

from pipeline.dataset.config import DatasetConfig
from pipeline.execution.stream import UnitStream, units_together
from pipeline.execution.wire import Failure, Parcel
from pipeline.rows.unit import WorkUnit


@pytest.mark.usefixtures("cluster")
def test_a_parcel_is_not_held_back_until_the_next_one_comes(tmp_path: Path) -> None:
    told = tmp_path / "told"
    units = [WorkUnit(f"00000-{start:09d}", "in/a.parquet", start, 1) for start in range(2)]
    (one,), (other,) = (Parcel(unit, failure=Failure("commit", "unit", "full")).to_row().to_pylist() for unit in units)

    def one_by_one(row: dict[str, Any]) -> dict[str, Any]:
        while row == other and not told.exists():
            time.sleep(0.05)
        return row

    stream = UnitStream(ray.data.from_items([one, other], override_num_blocks=2).map(one_by_one), [])
    first = stream.next(120.0)
    assert first is not None, "the second one waits for the first to be told of"
    told.touch()
    second = stream.next(120.0)
    assert second is not None
    assert [first.unit, second.unit] == units
    assert stream.next(120.0) is None
    assert stream.ended


@pytest.mark.parametrize(("samples", "beside"), [(1, 2), (100, 3), (129, 4), (200, 3), (600, 1)])
def test_units_under_way_fill_the_batch_with_as_many_rows_as_they_have(job: Job, samples: int, beside: int) -> None:
    """Of 256 there may be room for, 200 are whole rows of 100 samples; one of 600 is a unit all the same."""
    config = job(rows_per_unit=256, batch_size=512, temperature=1.0).model_dump()
    assert units_together(DatasetConfig(**config, samples_per_prompt=samples)) == 1 + beside
