"""The input files of an incremental output as jobs have found them: `_inputs.json`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from pipeline.records import LARGE, Count, Record, RecordDamaged, UnitName
from pipeline.storage import Storage

INPUTS_FILE = "_inputs.json"


@dataclass(frozen=True, slots=True)
class KnownFile:
    """One input file as the last job found it, or as it was when it vanished."""

    stamp: str  # what its file system says of it
    checksum: str | None  # of its content, where the file system has none: the stamp may change without it
    version: UnitName  # of the file, names its units
    rows: Count  # of these units, all samples; of a file that vanished, those that the output holds
    done: UnitName | None = None  # version of which the output holds every row
    replaced: tuple[UnitName, ...] = ()  # versions that no longer count
    partial: bool = False  # it vanished before any version of it was done as a whole


@dataclass(frozen=True, slots=True)
class _Files:
    files: dict[str, KnownFile]


_RECORD: Record[_Files] = Record(_Files, "discard the run with --fresh", LARGE)


def file_version(name: str, identity: str) -> str:
    """Names one version of one file, 16 hexadecimal digits.

    Args:
        name: of the file, relative to the input.
        identity: changes when its content does.
    """
    return hashlib.sha256(f"{name}\0{identity}".encode("utf-8", "surrogatepass")).hexdigest()[:16]


def version_of(unit: str) -> str:
    """The file version that a unit of an incremental run belongs to."""
    return unit.partition("-")[0]


def read_known_files(storage: Storage) -> dict[str, KnownFile]:
    """By name relative to the input; {} if there is no record, or one that is damaged: the commits are what counts."""
    try:
        record = _RECORD.read(storage, INPUTS_FILE)
    except RecordDamaged:
        return {}
    return {} if record is None else record.files


def write_known_files(storage: Storage, files: Mapping[str, KnownFile]) -> None:
    record = {"format": 1, "files": {name: asdict(files[name]) for name in sorted(files)}}
    storage.write(INPUTS_FILE, json.dumps(record, indent=1).encode())
