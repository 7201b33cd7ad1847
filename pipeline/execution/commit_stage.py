"""The last stage: a unit's output table in, its commit record out. Imports no engine, so that a task starts at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import pyarrow as pa

from pipeline.commits.commit import Commit, commit_unit
from pipeline.execution.wire import Failure, Parcel, from_bytes
from pipeline.logs import LogFormat, about, set_up_worker
from pipeline.rows.unit import WorkUnit
from pipeline.storage.storage import Storage


def commit(rows: pa.Table, storage: Storage, run: str, log_format: LogFormat) -> Iterator[pa.Table]:
    """Write and commit every unit of a batch to the output, as part of a run; failures pass through."""
    set_up_worker(log_format, run)
    for row in rows.to_pylist():
        parcel = Parcel.from_row(row)
        if parcel.table is not None:
            parcel = committed(parcel.unit, partial(_commit, parcel.table, parcel, storage, run))
        yield parcel.to_row()


def _commit(table: bytes, parcel: Parcel, storage: Storage, run: str) -> Commit:
    return commit_unit(storage, parcel.unit, from_bytes(table), run, parcel.cost)


def committed(unit: WorkUnit, write: Callable[[], Commit]) -> Parcel:
    """The unit's commit, or why there is none."""
    try:
        with about(unit=unit.id):
            return Parcel(unit, commit=write())
    except Exception as error:
        return Parcel(unit, failure=Failure.of("commit", error))
