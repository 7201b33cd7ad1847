"""A million rows pass through a job whose driver only ever sees commit records."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pyarrow as pa
import pytest
from engine_double import EchoBackend
from fixture_types import Job, WriteParquet

from pipeline.commits.commit import read_commits
from pipeline.run import run_job
from pipeline.storage.storage import Storage

MB = 1 << 20
ROW_GROUP = 50_000


@contextmanager
def peak_memory() -> Iterator[list[int]]:
    """Most private memory of this process inside the block, in bytes, as a list of one."""
    peak, done = [0], threading.Event()
    process = psutil.Process()

    def watch() -> None:
        while not done.wait(0.1):
            memory = process.memory_info()
            peak[0] = max(peak[0], memory.rss - memory.shared)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield peak
    finally:
        done.set()
        thread.join()


@pytest.mark.usefixtures("cluster")
@pytest.mark.slow
def test_the_drivers_memory_does_not_grow_with_the_rows(tmp_path: Path, job: Job, write_parquet: WriteParquet) -> None:
    peaks = []
    for rows in (100_000, 1_000_000):
        table = pa.table({"text": pa.array(["x"] * rows)})
        folder = tmp_path / str(rows)
        write_parquet(folder / "in/a.parquet", table, [ROW_GROUP] * (rows // ROW_GROUP))
        del table
        pa.default_memory_pool().release_unused()
        config = job(input=str(folder / "in"), output=str(folder / "out"), rows_per_unit=5_000, batch_size=5_000)
        with peak_memory() as peak:
            assert run_job(config, EchoBackend()).totals.rows == rows
        peaks.append(peak[0])
        commits = read_commits(Storage(config.output))
        assert len(commits) == rows // 5_000
        assert sum(commit.totals.rows for commit in commits) == rows
    small, large = peaks
    assert large - small < 60 * MB
