"""`_SUCCESS.json`, written and read back: what a finished run is, and the files that a reader should read."""

import json
from collections.abc import Iterable
from dataclasses import asdict
from typing import Annotated, Any

from pydantic import Field

from pipeline.commits.commit import SUCCESS_FILE, Commit, Totals
from pipeline.storage.records import LARGE, Count, DataFile, Fingerprint, OpenRecord, Record, UnitName
from pipeline.storage.storage import Storage


class _Listed(OpenRecord):
    unit: UnitName
    file: DataFile
    rows: Count
    checksum: str


class _Manifest(OpenRecord):
    fingerprint: Fingerprint
    model: Annotated[list[Any], Field(min_length=1)]
    sampling: dict[str, Any]
    version: str
    totals: dict[str, Any]
    commits: list[_Listed]


_RECORD: Record[dict[str, Any]] = Record(
    _Manifest, "delete it, and start the job again: it is written anew from the commits", LARGE
)


def write_success(storage: Storage, run: dict[str, Any], commits: Iterable[Commit], totals: Totals) -> None:
    """The manifest: present once every unit is committed. Lists the files a reader should read."""
    manifest = {"format": 1, **run, "totals": asdict(totals), "commits": _listed(commits)}
    storage.write(SUCCESS_FILE, json.dumps(manifest, indent=1).encode())


def _listed(commits: Iterable[Commit]) -> list[dict[str, Any]]:
    """Commits as a manifest lists them."""
    return [{"unit": c.unit, "file": c.file, "rows": c.totals.rows, "checksum": c.checksum} for c in commits]


def read_manifest(storage: Storage) -> dict[str, Any] | None:
    """None if the run is not finished. Raises RecordDamaged; StorageGone, StorageRefused."""
    return _RECORD.read(storage, SUCCESS_FILE)


def is_manifest_of(storage: Storage, run: str, commits: Iterable[Commit]) -> bool:
    """Whether a sound manifest lists just these commits of this run. Raises StorageGone, StorageRefused."""
    manifest = _RECORD.sound(storage, SUCCESS_FILE)
    return manifest is not None and manifest["fingerprint"] == run and manifest["commits"] == _listed(commits)
