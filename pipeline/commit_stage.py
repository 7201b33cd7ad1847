"""The last stage: a unit's output table in, its commit record out. Imports no engine, so that a task starts at once."""

from __future__ import annotations

import json

import pyarrow as pa

from pipeline.commit import commit_unit
from pipeline.storage import Storage
from pipeline.unit import WorkUnit
from pipeline.wire import COMMIT, COST, TABLE, UNIT, from_bytes


def commit(rows: pa.Table, output: str) -> pa.Table:
    """Write and commit every unit of a batch to the output directory."""
    storage = Storage(output)
    records = [
        commit_unit(storage, WorkUnit.from_json(unit), from_bytes(content), **json.loads(cost)).to_json()
        for unit, content, cost in zip(*(rows[name].to_pylist() for name in (UNIT, TABLE, COST)), strict=True)
    ]
    return pa.table({COMMIT: records})
