"""The last stage: a unit's output table in, its commit record out. Imports no engine, so that a task starts at once."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pyarrow as pa

from pipeline.commits.commit import commit_unit
from pipeline.execution.wire import Failure, Parcel, from_bytes
from pipeline.logs import LogFormat, about, set_up_worker
from pipeline.rows.unit import WorkUnit
from pipeline.storage.storage import Storage


def commit(rows: pa.Table, storage: Storage, run: str, log_format: LogFormat) -> Iterator[pa.Table]:
    """Write and commit every unit of a batch to the output, as part of a run; failures pass through."""
    set_up_worker(log_format, run)
    for row in rows.to_pylist():
        parcel = Parcel.from_row(row)
        yield (parcel if parcel.failure else _commit(parcel, storage, run)).to_row()


def _commit(parcel: Parcel, storage: Storage, run: str) -> Parcel:
    assert parcel.table is not None
    assert parcel.cost is not None
    try:
        unit, output = WorkUnit.from_json(parcel.unit), from_bytes(parcel.table)
        cost = json.loads(parcel.cost)
        padding, seconds = cost.pop("flops_padding"), cost.pop("seconds")
        with about(unit=unit.id):
            record = commit_unit(storage, unit, output, padding, seconds, run, cost)
    except Exception as error:
        return Parcel(parcel.unit, failure=Failure.of("commit", error))
    return Parcel(parcel.unit, commit=record.to_json())
