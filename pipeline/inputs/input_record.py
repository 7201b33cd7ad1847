"""The input files that a run began with, by their stamps, so that it is resumed with no others: `_input/`.

`_input/0.json` names all files. One that could not be read then has no stamp; the job that finds it repaired adds a
record of its own, put only if absent as every other, so that of each file only one content is ever taken; where it is
taken out of the input instead, the run goes on without it.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pipeline.errors import JobError
from pipeline.inputs.work import InputFile, Plan
from pipeline.storage.records import LARGE, Count, Record
from pipeline.storage.storage import Storage

INPUT = "_input"

Held = dict[str, tuple[str | None, Count]]  # stamp and rows, by name relative to the input


@dataclass(frozen=True, slots=True)
class _InputFiles:
    files: Held


_RECORD: Record[_InputFiles] = Record(_InputFiles, "discard the run with --fresh", LARGE)


def hold_input(storage: Storage, plan: Plan, begun: bool) -> dict[str, int | None]:
    """Hold a run to the files it began with, those of this plan if it has only just begun.

    Returns the rows of each file by name, in the order in which they name units; None for one that could never be read.
    Raises JobError, with its name, for a file that has changed, come, or gone since it could be read; StorageGone.
    """
    while True:
        held, records = _read(storage)
        if not records and begun:
            raise JobError(
                f"{INPUT}/0.json of {storage.url!r}, which says of what files this run is, is not there: start anew "
                "with --fresh"
            )
        if records:
            _check(held, plan.files, storage.url)
        unknown = [file for file in plan.files if held.get(file.name, (None, 0))[0] is None]
        new: Held = {file.name: (None, 0) if file.problem else (file.identity, file.rows) for file in unknown}
        known = {name: None if stamp is None else rows for name, (stamp, rows) in (held | new).items()}
        if records and all(file.problem for file in unknown):
            return known
        content = json.dumps({"format": 1, "files": new}).encode()
        if storage.write_if_absent(f"{INPUT}/{records}.json", content):
            return known
        # Another job of this run was first, or this one's answer was lost: what stands is what counts.


def planned_rows(storage: Storage, run: Mapping[str, Any]) -> int:
    """Rows of a run that is not incremental, as far as its files can be read. Raises JobError; StorageGone."""
    held, _ = _read(storage)
    rows, limit = sum(rows for _, rows in held.values()), run["input"].get("limit")
    samples = run.get("sampling", {}).get("samples_per_prompt", 1)
    return (rows if limit is None else min(rows, limit)) * int(samples)


def _read(storage: Storage) -> tuple[Held, int]:
    """All records together, and how many they are. Raises JobError; StorageGone."""
    held: Held = {}
    records = 0
    while not records or any(stamp is None for stamp, _ in held.values()):
        name = f"{INPUT}/{records}.json"
        record = _RECORD.read(storage, name)
        if record is None:
            break
        held |= record.files
        records += 1
    return held, records


def _check(held: Held, files: tuple[InputFile, ...], url: str) -> None:
    there = {file.name: file for file in files}
    changed = [
        name
        for name, (stamp, _) in held.items()
        if name in there and not there[name].problem and stamp is not None and stamp != there[name].identity
    ]
    for names, how in (
        (changed, "has changed"),
        (sorted(name for name, (stamp, _) in held.items() if name not in there and stamp is not None), "is gone"),
        (sorted(there.keys() - held.keys()), "is new"),
    ):
        if names:
            more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
            raise JobError(
                f"input file {names[0]!r} {how}{more} since the run in {url!r} began: put the input back as it was, "
                "name another output (--incremental, where files come and change), or discard the run with --fresh"
            )
