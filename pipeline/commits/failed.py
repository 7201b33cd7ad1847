"""Units that could not be done: one record each under `_failed/`, until a later session commits them."""

import json
from collections.abc import Collection
from dataclasses import asdict, dataclass

from pipeline.errors import counted
from pipeline.redaction import redacted
from pipeline.rows.unit import WorkUnit
from pipeline.storage.ownership import Kind, own, remove
from pipeline.storage.records import Count, Record, UnitName
from pipeline.storage.storage import Storage

FAILED = "_failed"


@dataclass(frozen=True, slots=True)
class FailedUnit:
    """Why a unit has no commit."""

    unit: UnitName
    path: str  # of the input file
    start: Count
    rows: Count  # of the input
    attempts: Count
    error: str  # the last one
    samples: Count = 1  # of each row

    @property
    def generations(self) -> int:
        """Rows that its output lacks."""
        return self.rows * self.samples


_RECORD: Record[FailedUnit] = Record(FailedUnit, "delete it, and start the job again to try its unit once more")


def record_failure(storage: Storage, unit: WorkUnit, attempts: int, error: str) -> FailedUnit:
    """Write a unit's record, over that of an earlier session."""
    path, error = redacted(unit.path), redacted(error)
    failed = FailedUnit(unit.id, path, unit.start, unit.rows, attempts, error, unit.samples)
    storage.write(f"{FAILED}/{unit.id}.json", json.dumps(asdict(failed), indent=1).encode())
    return failed


def read_failures(storage: Storage) -> list[FailedUnit]:
    """All records, by unit. Raises RecordDamaged."""
    found = ((name, _RECORD.read(storage, name)) for name in storage.names(FAILED, ".json"))
    failures = {name: failed for name, failed in found if failed is not None}
    for name, failed in failures.items():
        if name != f"{FAILED}/{failed.unit}.json":
            raise _RECORD.damaged(storage, name, f"it is of unit {failed.unit}")
    return list(failures.values())


def failed_rows(failed: Collection[FailedUnit]) -> str:
    """How many the output lacks, in words: of a file that cannot be read nobody knows how many rows it has."""
    units = [unit.generations for unit in failed if unit.rows]
    files = len(failed) - len(units)
    said = [f"{counted(sum(units), 'row')} in {counted(len(units), 'unit')}"] if units else []
    said += [counted(files, "whole file")] if files else []
    return " and ".join(said) or "no rows"


def unless_changed(failed: Collection[FailedUnit], incremental: bool) -> str:
    """What to add to the advice to start the job again: a run that is not incremental refuses another content of a file
    that it could read once.
    """
    if incremental or not any(unit.error.startswith("read: ") for unit in failed):
        return ""
    return (
        "; where that changes a file that could be read when the run began, begin anew instead, with --fresh or into "
        "another output"
    )


def forget_failures(storage: Storage, keep: Collection[str]) -> None:
    """Remove the records of all units but those that a session has just given up: the others are committed, or gone."""
    kept = {f"{FAILED}/{unit}.json" for unit in keep}
    remove(storage, Kind.RUN, [name for name in own(Kind.RUN, storage.names(FAILED)) if name not in kept])
