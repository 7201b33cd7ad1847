"""Parquet files with any row groups, and jobs on an engine double."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from engine_double import ByteTokenizer
from fixture_types import Job, ReadOutput, WriteParquet
from inline_session import inline as inline

from engine import Tokenizer
from pipeline.commits.commit import read_commits
from pipeline.config import JobConfig
from pipeline.inputs.work import InputFile
from pipeline.storage.storage import Storage


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """The packaged model's."""
    return Tokenizer.load("smollm2-135m-instruct")


@pytest.fixture(scope="session")
def byte_tokens() -> ByteTokenizer:
    """One token per byte."""
    return ByteTokenizer()


@pytest.fixture(scope="session")
def write_parquet() -> WriteParquet:
    """Write a table with row groups of the given sizes, empty ones included."""

    def write(path: Path, columns: pa.Table | dict[str, Any], groups: Sequence[int] | None = None) -> Path:
        table = columns if isinstance(columns, pa.Table) else pa.table(columns)
        path.parent.mkdir(parents=True, exist_ok=True)
        with pq.ParquetWriter(path, table.schema) as writer:
            start = 0
            for rows in [table.num_rows] if groups is None else groups:
                writer.write_table(table.slice(start, rows))
                start += rows
        return path

    return write


@pytest.fixture(scope="session")
def input_file() -> Callable[..., InputFile]:
    """What the footer of a file would say, without the file."""

    def make(path: str, groups: Sequence[int]) -> InputFile:
        return InputFile(path, "", tuple(groups), pa.schema([("text", pa.string())]))

    return make


@pytest.fixture
def job(tmp_path: Path) -> Job:
    """A job from tmp_path/in to tmp_path/out whose prompts are the bare texts, on one replica."""

    def make(**options: Any) -> JobConfig:
        defaults = {
            "input": str(tmp_path / "in"),
            "output": str(tmp_path / "out"),
            "prompt_format": "raw",
            "rows_per_unit": 10,
            "replicas": 1,
        }
        return JobConfig(**{**defaults, **options})

    return make


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    """What such a job writes to."""
    return Storage(str(tmp_path / "out"))


@pytest.fixture(scope="session")
def read_output() -> ReadOutput:
    """The committed rows of an output, units in order."""

    def read(output: str | Path) -> pa.Table:
        commits = read_commits(Storage(str(output)))
        return pa.concat_tables(pq.read_table(f"{output}/{commit.file}") for commit in commits)

    return read


@pytest.fixture(scope="session")
def strings_of_bytes() -> Callable[[Sequence[bytes | None]], pa.Array]:
    """A string column that holds these bytes, valid UTF-8 or not, as a broken writer would leave it."""

    def make(values: Sequence[bytes | None]) -> pa.Array:
        return pa.Array.from_buffers(pa.string(), len(values), pa.array(values, pa.binary()).buffers())

    return make
