"""How a work unit travels between the stages: as one row of two cells, its table as Arrow bytes.

Ray Data may split or merge blocks of rows as it likes; a unit stays whole. A stage that can't do its part sends a
failure on in the table's place: what is missing at the end of a stream was lost with a process.
"""

import pickle
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

import pyarrow as pa

from engine import ModelError
from pipeline.commits.commit import Commit
from pipeline.errors import JobError, described, one_line
from pipeline.rows.unit import WorkUnit
from pipeline.storage.storage import StorageGone

Stage = Literal["read", "generate", "commit"]


@dataclass(frozen=True, slots=True)
class Failure:
    """A unit that a stage could not do."""

    stage: Stage
    # What a retry may expect: "unit" may work next time, "storage" once the storage is back, "refused" never, and with
    # a "model" that cannot be read nothing works.
    kind: Literal["unit", "storage", "refused", "model"]
    error: str

    @classmethod
    def of(cls, stage: Stage, error: Exception) -> Self:
        if isinstance(error, StorageGone | JobError):
            return cls(stage, "storage" if isinstance(error, StorageGone) else "refused", one_line(error))
        if isinstance(error, ModelError):
            return cls(stage, "model", one_line(error))
        return cls(stage, "unit", described(error))


@dataclass(frozen=True, slots=True)
class Parcel:
    """A unit between the stages, with its table, its commit, or its failure."""

    unit: WorkUnit
    table: bytes | None = None  # not a table: pickled, a slice of one brings along all that it was cut from
    cost: dict[str, Any] | None = None  # what `Totals` holds of an output table beside its rows
    commit: Commit | None = None
    failure: Failure | None = None

    def to_row(self) -> pa.Table:
        # The table beside the rest: pickled with it, there would be one copy more of it at each end.
        cells = {"parcel": pickle.dumps(replace(self, table=None)), "table": self.table}
        return pa.table({name: pa.array([cell], pa.large_binary()) for name, cell in cells.items()})

    @staticmethod
    def from_row(row: dict[str, Any]) -> "Parcel":
        parcel: Parcel = pickle.loads(row["parcel"])
        return replace(parcel, table=row["table"])


def to_bytes(table: pa.Table) -> bytes:
    """A table as an Arrow IPC stream."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()  # type: ignore[no-any-return]


def from_bytes(content: bytes) -> pa.Table:
    """Inverse of `to_bytes`."""
    with pa.ipc.open_stream(content) as reader:
        return reader.read_all()
