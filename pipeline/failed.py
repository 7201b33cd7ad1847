"""Units that could not be done: one record each under `_failed/`, until a later session commits them."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import asdict, dataclass

from pipeline.storage import Storage
from pipeline.unit import WorkUnit

FAILED = "_failed"


@dataclass(frozen=True, slots=True)
class FailedUnit:
    """Why a unit has no commit."""

    unit: str
    path: str  # of the input file
    start: int
    rows: int
    attempts: int
    error: str  # the last one


def record_failure(storage: Storage, unit: WorkUnit, attempts: int, error: str) -> FailedUnit:
    """Write a unit's record, over that of an earlier session."""
    failed = FailedUnit(unit.id, unit.path, unit.start, unit.rows, attempts, error)
    storage.write(f"{FAILED}/{unit.id}.json", json.dumps(asdict(failed), indent=1).encode())
    return failed


def read_failures(storage: Storage) -> list[FailedUnit]:
    """All records, by unit."""
    contents = (storage.read(name) for name in storage.names(FAILED, ".json"))
    return [FailedUnit(**json.loads(content)) for content in contents if content is not None]


def forget_failures(storage: Storage, keep: Collection[str]) -> None:
    """Remove the records of all units but those that a session has just given up: the others are committed, or gone."""
    storage.remove([f"{FAILED}/{failed.unit}.json" for failed in read_failures(storage) if failed.unit not in keep])
