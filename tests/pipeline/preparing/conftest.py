"""Nights of an incremental run."""

from pathlib import Path

import pyarrow as pa
import pytest
from fixture_types import Job, WriteParquet

from pipeline.storage import lease
from tests.pipeline.preparing.nights import Move, Put


@pytest.fixture
def put(tmp_path: Path, write_parquet: WriteParquet) -> Put:
    """Writes an input file of so many rows; its texts name file, version and row."""

    def write(name: str, rows: int, version: str = "v1") -> None:
        texts = [f"{name} {version} {row}" for row in range(rows)]
        write_parquet(tmp_path / f"in/{name}.parquet", {"text": pa.array(texts, pa.string())})

    return write


@pytest.fixture
def move(tmp_path: Path) -> Move:
    """Renames an input file."""

    def move(old: str, new: str) -> None:
        to = tmp_path / f"in/{new}.parquet"
        to.parent.mkdir(exist_ok=True)
        (tmp_path / f"in/{old}.parquet").rename(to)

    return move


@pytest.fixture
def nightly_on_ray(job: Job, monkeypatch: pytest.MonkeyPatch) -> Job:
    """An incremental job in units of four rows. What dead jobs leave is taken over at once: here they come in turn."""
    monkeypatch.setattr(lease, "LEASE_S", 0.0)
    return lambda **options: job(**{"incremental": True, "rows_per_unit": 4, "max_new_tokens": 40, **options})


@pytest.fixture
def nightly(nightly_on_ray: Job, inline: object) -> Job:
    """The same, done in this process."""
    return nightly_on_ray
