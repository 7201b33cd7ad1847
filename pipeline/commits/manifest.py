"""`_SUCCESS.json` read back: what a finished run is, and the files that a reader should read."""

from collections.abc import Iterable
from typing import Annotated, Any

from pydantic import Field

from pipeline.commits.commit import SUCCESS_FILE, Commit, listed
from pipeline.storage.records import LARGE, Count, DataFile, Fingerprint, OpenRecord, Record, RecordDamaged, UnitName
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


def read_manifest(storage: Storage) -> dict[str, Any] | None:
    """None if the run is not finished. Raises RecordDamaged; StorageGone, StorageRefused."""
    return _RECORD.read(storage, SUCCESS_FILE)


def is_manifest_of(storage: Storage, run: str, commits: Iterable[Commit]) -> bool:
    """Whether a sound manifest lists just these commits of this run. Raises StorageGone, StorageRefused."""
    try:
        manifest = read_manifest(storage)
    except RecordDamaged:
        return False
    return manifest is not None and manifest["fingerprint"] == run and manifest["commits"] == listed(commits)
