"""How a work unit travels between the stages: as one row, its table as Arrow bytes in one cell.

Ray Data may split or merge blocks of rows as it likes; a unit stays whole. A stage that can't do its part sends a
failure on in the table's place: errors come back as rows, so that a stream ends only when all its units are accounted
for, and what is missing at its end was lost with a process.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Literal

import pyarrow as pa

from pipeline.errors import JobError, one_line
from pipeline.storage.storage import StorageGone

SPAN = "span"  # what a read task is given

_COLUMNS = pa.schema(
    [
        ("unit", pa.string()),
        ("table", pa.large_binary()),  # more than 2 GiB, if a user likes
        ("cost", pa.string()),
        ("commit", pa.binary()),
        ("failure", pa.string()),
    ]
)


@dataclass(frozen=True, slots=True)
class Failure:
    """A unit that a stage could not do."""

    stage: Literal["read", "generate", "commit"]
    # What a retry may expect: "unit" may work next time, "storage" once the storage is back, "refused" never.
    kind: Literal["unit", "storage", "refused"]
    error: str

    @classmethod
    def of(cls, stage: Literal["read", "generate", "commit"], error: Exception) -> Failure:
        if isinstance(error, StorageGone):
            return cls(stage, "storage", one_line(error))
        if isinstance(error, JobError):
            return cls(stage, "refused", one_line(error))
        return cls(stage, "unit", f"{type(error).__name__}: {one_line(error)}")


@dataclass(frozen=True, slots=True)
class Parcel:
    """One row between the stages: a unit with its table, its commit, or its failure."""

    unit: str  # a WorkUnit as JSON
    table: bytes | None = None
    cost: str | None = None
    commit: bytes | None = None
    failure: Failure | None = None

    def to_row(self) -> pa.Table:
        row = {
            "unit": self.unit,
            "table": self.table,
            "cost": self.cost,
            "commit": self.commit,
            "failure": json.dumps(asdict(self.failure)) if self.failure else None,
        }
        return pa.Table.from_pylist([row], schema=_COLUMNS)

    @classmethod
    def from_row(cls, row: dict[str, object]) -> Parcel:
        parcel: dict[str, object] = {name: row[name] for name in _COLUMNS.names}
        failure = row["failure"]
        parcel["failure"] = Failure(**json.loads(failure)) if isinstance(failure, str) else None
        return cls(**parcel)  # type: ignore[arg-type]


def to_bytes(table: pa.Table) -> bytes:
    """A table as an Arrow IPC stream."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    content: bytes = sink.getvalue().to_pybytes()
    return content


def from_bytes(content: bytes) -> pa.Table:
    """Inverse of `to_bytes`."""
    with pa.ipc.open_stream(content) as reader:
        return reader.read_all()
