"""What stands in an output: how far its run is, what it has cost, what failed, and whether it is as committed."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.commits.commit import COMMITS, SUCCESS_FILE, Commit, Totals, checksum, read_commits, total
from pipeline.commits.failed import FailedUnit, read_failures, unless_changed
from pipeline.commits.manifest import read_manifest
from pipeline.errors import JobError
from pipeline.inputs.input_record import planned_rows
from pipeline.inputs.known_files import of_present_versions, read_known_files, version_of
from pipeline.preparing.run_record import claim_name, read_run, started_again
from pipeline.storage.storage import Storage
from pipeline.storage.stores import Unfit

VERIFY_THREADS = 8


@dataclass(frozen=True, slots=True)
class Inspection:
    """An output as its records tell it."""

    output: str
    run: dict[str, Any]  # the run's record
    rows: int  # of the whole run's output
    commits: list[Commit]
    failed: list[FailedUnit]
    manifest: dict[str, Any] | None
    # Of an incremental run:
    replaced: list[Commit]  # of old versions of changed files, which go once the new ones are done
    partial: set[str]  # versions of files that vanished from the input half done

    @property
    def totals(self) -> Totals:
        """Of what is committed."""
        return total(self.commits)

    @property
    def finished(self) -> bool:
        """Whether its manifest is of all that is to be done: a nightly job may have ended early, before it removed that
        of the night before.
        """
        if self.manifest is None or not self.run["input"].get("incremental"):
            return self.manifest is not None
        return len(self.manifest["commits"]) > len(self.commits) + len(self.replaced) or self.totals.rows >= self.rows

    @property
    def lacks_only_failed(self) -> bool:
        """Whether some units failed, and all others are done."""
        return bool(self.failed) and self.totals.rows + sum(unit.generations for unit in self.failed) >= self.rows

    @property
    def state(self) -> str:
        if self.finished:
            return "done"
        if self.failed:
            return "incomplete: some units failed" if self.lacks_only_failed else "unfinished, and some units failed"
        if not self.rows:
            return "unfinished: no row is planned yet"
        return "unfinished" if self.totals.rows < self.rows else "unfinished: only the manifest is missing"

    @property
    def advice(self) -> str:
        """How to go on."""
        if self.finished:
            return f"read the files that {self.output}/{SUCCESS_FILE} lists"
        if self.lacks_only_failed:
            anew = unless_changed(self.failed, bool(self.run["input"].get("incremental")))
            return f"mend what the failed units name and {started_again(self.run)}: it tries only those{anew}"
        tried = ", and tries the failed units once more" if self.failed else ""
        return f"{started_again(self.run)}: it resumes and repeats nothing that is committed{tried}"


def inspect(storage: Storage) -> Inspection:
    """Read an output's records. Raises JobError if it holds no run; StorageGone, StorageRefused."""
    storage = storage.at_first()
    run = read_run(storage)
    if run is None:
        raise JobError(f"{storage.url!r} holds no run: name the output of a job")
    commits = read_commits(storage, claim_name(run))
    done = {commit.unit for commit in commits}
    # A whole file's failure, which has no rows, stands under the id of its first unit.
    failed = [unit for unit in read_failures(storage) if unit.unit not in done or not unit.rows]
    manifest = read_manifest(storage)
    replaced: list[Commit] = []
    known = read_known_files(storage) or {}
    if known:  # the run is incremental, and its record is not lost
        everything, commits = commits, of_present_versions(commits, known)
        present = {commit.unit for commit in commits}
        replaced = [commit for commit in everything if commit.unit not in present]
    partial = {file.version for file in known.values() if file.partial}
    if run["input"].get("incremental"):
        rows = sum(file.rows for file in known.values()) if known else total(commits).rows
    else:
        rows = planned_rows(storage, run)
    return Inspection(storage.url.rstrip("/"), run, rows, commits, failed, manifest, replaced, partial)


def verify(storage: Storage, inspection: Inspection) -> list[str]:
    """Every way in which the output is not as its records say, a sentence each.

    Reads all data files: checksums and row counts against the commits, the commits against the manifest, and the
    committed row ranges against the input's rows.
    """
    everything = [*inspection.commits, *inspection.replaced]
    with ThreadPoolExecutor(VERIFY_THREADS) as pool:
        checked = zip(everything, pool.map(lambda c: _check_file(storage, c), everything), strict=True)
        found = [f"{damage} (its commit is {COMMITS}/{commit.unit}.json)" for commit, damage in checked if damage]
    found += _check_ranges(inspection)
    if inspection.manifest is not None:
        found += _check_manifest(inspection, inspection.manifest)
    return found


def _check_file(storage: Storage, commit: Commit) -> str | None:
    try:
        content = storage.read(commit.file, commit.size)
    except Unfit as error:
        return f"{commit.file} has changed: {error}, its commit says {commit.size:,}"
    if content is None:
        return f"{commit.file} is missing"
    if checksum(content) != commit.checksum:
        return f"{commit.file} has changed: {len(content):,} bytes with another checksum than that of its commit"
    rows = pq.ParquetFile(pa.BufferReader(content)).metadata.num_rows
    if rows != commit.totals.rows:
        return f"{commit.file} holds {rows} rows, its commit says {commit.totals.rows}"
    return None


def _check_ranges(inspection: Inspection) -> Iterator[str]:
    """Rows that two units cover; in a finished run also those that none does."""

    def file(commit: Commit) -> tuple[str, ...]:
        # Not its path: a nightly run may have met two files of one name, and one file under two. In runs of an earlier
        # version each sample of rows has units of its own, whose names end with it.
        return version_of(commit.unit), *commit.unit.split("-")[2:]

    finished = inspection.finished
    all_samples = inspection.run["sampling"].get("samples_per_prompt", 1)
    commits = sorted(inspection.commits, key=lambda commit: (file(commit), commit.start))
    for (version, *sample), parts in groupby(commits, file):
        samples = 1 if sample else all_samples
        end = 0
        for commit in parts:
            if commit.start < end:
                yield f"rows {commit.start} to {end - 1} of {commit.path!r} are there twice"
            elif commit.start > end and finished and version not in inspection.partial:
                yield f"rows {end} to {commit.start - 1} of {commit.path!r} are missing"
            end = commit.start + commit.totals.rows // samples
    rows = inspection.totals.rows
    if finished and rows != inspection.rows:
        each = f" of {all_samples} samples" if all_samples > 1 else ""
        yield f"the input has {inspection.rows // all_samples:,} rows{each}, the output {rows:,}"


def _check_manifest(inspection: Inspection, manifest: dict[str, Any]) -> Iterator[str]:
    listed = {entry["file"]: entry["checksum"] for entry in manifest["commits"]}
    committed = {commit.file: commit.checksum for commit in [*inspection.commits, *inspection.replaced]}
    if manifest["fingerprint"] != inspection.run["fingerprint"]:
        yield f"{SUCCESS_FILE} is that of run {manifest['fingerprint']}, not of {inspection.run['fingerprint']}"
    for file in sorted(listed.keys() ^ committed.keys()):
        yield f"{file} is {'listed in the manifest but not committed' if file in listed else 'not in the manifest'}"
    for file in sorted(listed.keys() & committed.keys()):
        if listed[file] != committed[file]:
            yield f"{file} has another checksum in the manifest than in its commit"
