"""The input files of an incremental output as jobs have found them: `_inputs.json`."""

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from itertools import chain, zip_longest

from pipeline.commits.commit import Commit, read_commits
from pipeline.redaction import redacted
from pipeline.storage.records import LARGE, Count, Record, UnitName
from pipeline.storage.storage import Storage

log = logging.getLogger(__name__)

INPUTS_FILE = "_inputs.json"
HALF = 16  # digits of a version
FROM_COMMITS, GONE = "", "gone"  # stamps of files that the record has lost, and of such that are not there either


@dataclass(frozen=True, slots=True)
class KnownFile:
    """One input file as the last job found it, or as it was when it vanished."""

    stamp: str  # what its file system says of it
    checksum: str | None  # of its content, where the file system has none: the stamp may change without it
    version: UnitName  # of the file, names its units
    rows: Count  # of these units, all samples; of a file that vanished, those that the output holds
    done: UnitName | None = None  # version of which the output holds every row
    replaced: tuple[UnitName, ...] = ()  # versions that no longer count, of which something may still be there
    partial: bool = False  # it vanished before any version of it was done as a whole

    @property
    def counting(self) -> tuple[str, ...]:
        """Versions of which the output may hold rows that count, the one of which most is done first."""
        # Where commits alone tell of a file, nobody knows which came last, nor which were another's.
        told = self.replaced if self.stamp == FROM_COMMITS else ()
        return tuple(dict.fromkeys([*([self.done] if self.done else []), self.version, *told]))

    @property
    def versions(self) -> tuple[str, ...]:
        """All that are known."""
        return tuple(dict.fromkeys([*self.counting, *self.replaced]))


@dataclass(frozen=True, slots=True)
class _KnownFiles:
    files: dict[str, KnownFile]


_RECORD: Record[_KnownFiles] = Record(_KnownFiles, "discard the run with --fresh", 2 * LARGE)


def name_versions(contents: Mapping[str, str | None], known: Mapping[str, KnownFile]) -> dict[str, str]:
    """What names the present version of each file, and so its units: 32 hexadecimal digits.

    Half of them say what is in it and half under which name it was first met, so that copies are files of their own. A
    version stays with its content: where the output knows a content under a name that has another content now, or is
    gone, the file was renamed or moved, and what is done of it is done.

    `contents` are by name relative to the input, None for a file of which nothing is known but that it is there;
    `known` are the files of the output.
    """
    versions: dict[str, str] = {}
    taken = {version for name, file in known.items() if contents.get(name, "") is None for version in file.versions}
    for name, content in contents.items():
        if content is None or name not in known:
            continue
        half = _half(content)
        same = [version for version in known[name].versions if version not in taken and version[:HALF] == half]
        if same:
            versions[name] = same[0]
            taken.add(same[0])
    free: dict[str, list[str]] = {}
    # Several may have one content: the one of which most is done comes first. What a file held before is nobody's.
    for version in chain(*zip_longest(*(known[name].counting for name in sorted(known)))):
        if version is not None and version not in taken:
            free.setdefault(version[:HALF], []).append(version)
    for name, content in contents.items():
        if name not in versions:
            candidates = [] if content is None else free.get(_half(content), [])
            versions[name] = candidates.pop(0) if candidates else _new_version(name, content or "", taken)
            taken.add(versions[name])
    return versions


def _new_version(name: str, content: str, taken: Container[str]) -> str:
    """Another than those that files have taken, for one may have been met under this name and then renamed."""
    while (version := _half(content) + _half(name)) in taken:
        name += "\0"
    return version


def _half(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:HALF]


def version_of(unit: str) -> str:
    """The file version that a unit of an incremental run belongs to."""
    return unit.partition("-")[0]


def of_present_versions(commits: Iterable[Commit], known: Mapping[str, KnownFile]) -> list[Commit]:
    """Those of the version that each file has now."""
    versions = {file.version for file in known.values()}
    return [commit for commit in commits if version_of(commit.unit) in versions]


def read_known_files(storage: Storage) -> dict[str, KnownFile] | None:
    """By name relative to the input; None if there is no record, or a damaged one. Raises StorageGone."""
    record = _RECORD.sound(storage, INPUTS_FILE)
    return None if record is None else record.files


def recall_files(storage: Storage, input_: Storage) -> dict[str, KnownFile]:
    """As `read_known_files`; without a record, what the commits say. Raises JobError; StorageGone, StorageRefused."""
    known = read_known_files(storage)
    if known is not None:
        return known
    commits = read_commits(storage)
    if commits:
        log.warning(
            "%s of %r is lost or damaged: which files are done is told from the %d commits",
            INPUTS_FILE, storage.url, len(commits),
        )  # fmt: skip
    return with_unknown({}, commits, input_)


def with_unknown(known: Mapping[str, KnownFile], commits: Iterable[Commit], input_: Storage) -> dict[str, KnownFile]:
    """The record with the versions that it lacks and commits are of, because it was lost or is an older one put back.

    Which version of a file came last no commit says. One name has one file: if the record has the name, what it lacks
    is taken for replaced; if not, the version with the most rows counts, unless the file turns out to be of another.
    """
    there = {version for file in known.values() for version in file.versions}
    rows: dict[str, Counter[str]] = {}
    for commit in commits:
        version = version_of(commit.unit)
        if version not in there:
            rows.setdefault(redacted(input_.relative(commit.path)), Counter())[version] += commit.totals.rows
    found = dict(known)
    for name, of in rows.items():
        fullest, *others = (version for version, _ in of.most_common())
        if name in found:
            found[name] = replace(found[name], replaced=(*found[name].replaced, fullest, *others))
        else:  # whether it is whole nobody knows
            found[name] = KnownFile(FROM_COMMITS, None, fullest, of[fullest], fullest, tuple(others), partial=True)
    return found


def write_known_files(storage: Storage, files: Mapping[str, KnownFile]) -> None:
    record = {"format": 1, "files": {name: _told(files[name]) for name in sorted(files)}}
    storage.write(INPUTS_FILE, json.dumps(record).encode())


def _told(file: KnownFile) -> dict[str, object]:
    """Its fields, but those that most files have alike: there may be so many that the record would be too long."""
    values = ((item, getattr(file, item.name)) for item in fields(file))
    return {item.name: value for item, value in values if value != item.default}
