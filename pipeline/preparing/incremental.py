"""An incremental run: what is new in its input, and what a changed file's new version replaces in its output."""

import hashlib
import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from pipeline.commits.commit import COMMITS, SUCCESS_FILE, Commit, read_commits
from pipeline.errors import NothingToDo
from pipeline.inputs.known_files import (
    GONE,
    KnownFile,
    of_present_versions,
    version_of,
    with_unknown,
    write_known_files,
)
from pipeline.inputs.work import InputFile
from pipeline.preparing.preparation import Preparation
from pipeline.preparing.run_record import claim_name, read_run
from pipeline.rows.unit import WorkUnit
from pipeline.storage.ownership import Kind, remove
from pipeline.storage.storage import Storage

log = logging.getLogger(__name__)


class History:
    """What an output holds of each input file, over all jobs that have written to it."""

    def __init__(self, storage: Storage, job: Preparation, known: Mapping[str, KnownFile]) -> None:
        """`storage` is guarded by the output's lease, `known` is the output's record."""
        self._storage = storage
        self._input, self._samples = job.config.input_storage(), job.config.sampling().samples_per_prompt
        self._files = [file for file in job.plan.files if not file.problem]
        self._unreadable = {file.name for file in job.plan.files if file.problem}
        self._rows: Counter[str] = Counter()  # of the output, by version, of the files that are there
        for unit in job.plan.units:
            self._rows[version_of(unit.id)] += unit.generations
        self._known = dict(known)
        self._committed: Counter[str] = Counter()  # rows, by version
        self._replaced: set[str] = set()
        # Versions that are some file's now, whatever it was called when they were done.
        self._held = {file.version for file in self._files}
        self._left = {file.version for file in known.values() if file.partial}  # half done, by jobs before this one

    def settle(self, commits: Sequence[Commit]) -> list[Commit]:
        """Record what these commits, all there are, have done, and retire those of versions that were replaced.

        A file's old version counts until every unit of the new one is committed. Dying anywhere in here is harmless:
        the next job comes to the same result. Returns the commits that stay. Raises JobStopped, before anything is
        written, if the output has become another job's; StorageGone, StorageRefused.
        """
        self._committed = _rows_by_version(commits)
        known = with_unknown(self._known, commits, self._input)
        # Of a file that can't be read nothing new is known: what there is of it stays.
        there = {name: file for name, file in known.items() if name in self._unreadable}
        gone = {name: known[name] for name in known.keys() - there.keys() - {file.name for file in self._files}}
        renamed = {version: name for name, file in gone.items() for version in file.counting if version in self._held}
        for file in self._files:
            # A renamed file brings along what was known of it.
            before = [known[name] for name in (renamed.get(file.version), file.name) if name in known]
            there[file.name] = self._found(file, before)
        for name in sorted(gone.keys() - set(renamed.values())):
            there[name] = self._vanished(name, gone[name])
        if there != self._known:
            if renamed:
                now = {file.version: file.name for file in self._files}
                version, name = min(renamed.items(), key=lambda item: item[1])
                log.info("%d input files were renamed, such as %r, which is %r now", len(renamed), name, now[version])
            self._known = there
            write_known_files(self._storage, self._known)
        self._replaced = {version for file in self._known.values() for version in file.replaced}
        stale = [commit for commit in commits if self.is_replaced(commit.unit)]
        if stale:
            log.info("%d units are of versions of files that were replaced since: taken out", len(stale))
            # The manifest lists them; their data is swept at the end.
            remove(self._storage, Kind.RUN, [SUCCESS_FILE])
            remove(self._storage, Kind.RUN, [f"{COMMITS}/{commit.unit}.json" for commit in stale])
        return [commit for commit in commits if not self.is_replaced(commit.unit)]

    def forget_replaced(self) -> None:
        """Once neither commits nor data of replaced versions are there: else every night would add to the record."""
        if self._replaced:
            self._known = {name: replace(file, replaced=()) for name, file in self._known.items()}
            write_known_files(self._storage, self._known)

    def is_done(self, file: InputFile) -> bool:
        """Whether all of a file is committed that, as far as its stamp tells, is as it was."""
        return _is_done(file, self._known.get(file.name), self._committed)

    def present(self, commits: Iterable[Commit]) -> list[Commit]:
        """Those of each file's present version: an old one stays beside it until it is whole."""
        return of_present_versions(commits, self._known)

    def describe(self, commits: Sequence[Commit]) -> dict[str, int]:
        """For the manifest: of how much input these commits, those that stay, are the output."""
        files = len({version_of(commit.unit) for commit in commits})
        return {"files": files, "rows": sum(commit.totals.rows for commit in commits) // self._samples}

    def is_replaced(self, unit: str) -> bool:
        """Whether a unit belongs to a version of a file that no longer counts, so that it is not committed for good."""
        return version_of(unit) in self._replaced

    def is_over(self, unit: str) -> bool:
        """Whether no other job will commit a unit for good: one of a replaced version, or of a file that had vanished
        half done when this job began.

        Of a unit that is unknown that cannot be said: a job that took over the lease might be doing it.
        """
        return self.is_replaced(unit) or version_of(unit) in self._left

    def _found(self, file: InputFile, before: Sequence[KnownFile]) -> KnownFile:
        """`before` is what was known of it, and of a file in whose place it has come."""
        rows, committed = self._rows[file.version], self._committed
        if committed[file.version] == rows:
            done: str | None = file.version
        else:
            wholes = (_done(known, committed) for known in before)
            done = next((version for version in wholes if version and version not in self._held), None)
        past = self._past(before, done)
        return KnownFile(file.identity, file.checksum, file.version, rows, done, past)

    def _vanished(self, name: str, before: KnownFile) -> KnownFile:
        """A file that is gone from the input keeps its output: its last version that is whole, else what there is."""
        committed = self._committed
        done = _done(before, committed)
        version, partial = done or before.version, before.partial or done is None
        if version == before.version and not partial and committed[version] < before.rows:
            partial = True  # its output was damaged since, and nothing can make it anew
            log.warning(
                "input file %r is gone, and of its %d rows the output has %d: put it back to have the others again",
                name, before.rows, committed[version],
            )  # fmt: skip
        if done is None:
            log.warning(
                "input file %r vanished when %d of its %d rows were done: these stay",
                name, committed[version], before.rows,
            )  # fmt: skip
        past = self._past([before], version)
        return replace(
            before,
            stamp=before.stamp if before.stamp and version == before.version else GONE,  # that version's
            version=version,
            rows=committed[version],
            done=version,
            replaced=past,
            partial=partial,
        )

    def _past(self, before: Sequence[KnownFile], counting: str | None) -> tuple[str, ...]:
        """The versions that no longer count."""
        versions = {version for known in before for version in known.versions}
        return tuple(sorted(versions - self._held - {counting}))


def _done(file: KnownFile, committed: Mapping[str, int]) -> str | None:
    return file.version if committed[file.version] == file.rows else file.done


def _is_done(file: InputFile, known: KnownFile | None, committed: Mapping[str, int]) -> bool:
    if known is None or not file.identity or known.stamp != file.identity or known.partial:
        return False
    return committed[known.version] == known.rows


def _rows_by_version(commits: Iterable[Commit]) -> Counter[str]:
    rows: Counter[str] = Counter()
    for commit in commits:
        rows[version_of(commit.unit)] += commit.totals.rows
    return rows


def only_new(job: Preparation) -> Preparation:
    """The same job over nothing but the units that are not committed. Raises NothingToDo if all are; JobError."""
    storage = job.config.output_storage()
    record = None if job.config.fresh else read_run(storage)
    commits = []
    if record is not None and record["fingerprint"] == job.fingerprint:
        commits = read_commits(storage, claim_name(record))
    committed, known = _rows_by_version(commits), job.known if commits else {}
    plan = job.plan.excusing(lambda file: _is_done(file, known.get(file.name), committed))
    plan = plan.without({commit.unit for commit in commits})
    plan.warn_of_unreadable()
    if not plan.units:
        raise NothingToDo(f"nothing is new in {job.config.input!r}: {plan.all_done}")
    return replace(job, plan=plan)


def work_name(job: Preparation, units: Iterable[WorkUnit]) -> str:
    """What a plan of this job is named by: the run, and if incremental also the units that are new."""
    if not job.config.incremental:
        return job.fingerprint
    digest = hashlib.sha256("\n".join(sorted(unit.id for unit in units)).encode()).hexdigest()
    return f"{job.fingerprint}-{digest[:16]}"
