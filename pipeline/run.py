"""Run a job from its configuration to its manifest and report."""

import logging
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

from engine import ModelShape
from pipeline import logs
from pipeline.commits.commit import DATA, SUCCESS_FILE, Commit, Totals, damaged, read_commits, sweep_orphans, total
from pipeline.commits.failed import FAILED, FailedUnit, forget_failures, record_failure, unless_changed
from pipeline.commits.manifest import is_manifest_of, write_success
from pipeline.config import JobConfig
from pipeline.errors import JobError, JobStopped, UnitsFailed, counted, described
from pipeline.execution.cluster import connect
from pipeline.execution.interruption import Interruption
from pipeline.execution.session import Done, Session
from pipeline.execution.stages import Task
from pipeline.inputs.input_record import hold_input
from pipeline.inputs.work import MOST_UNITS, Plan
from pipeline.preparing.backend import Backend, as_it_runs
from pipeline.preparing.incremental import History, work_name
from pipeline.preparing.preparation import Preparation, prepare_run
from pipeline.preparing.run_record import RUN_FILE, Claim, check_incremental, claim_output
from pipeline.reporting.audit import failed_audit
from pipeline.reporting.bill import check_ceiling
from pipeline.reporting.forecast import against_actual, read_forecast
from pipeline.reporting.page import REPORT_FILE
from pipeline.reporting.report import is_reported, write_report
from pipeline.storage.lease import Lease
from pipeline.storage.ownership import Kind, check_place, discard_run, remove
from pipeline.storage.storage import Storage

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RunResult:
    """What a finished run did, over all its sessions."""

    output: str
    report: str  # "" where it could not be written
    rows_resumed: int  # of the output, committed before this session
    totals: Totals
    shape: ModelShape
    seconds: float  # of this session
    generating_seconds: float  # of this session, from its first replica being ready to its last commit


def run_job(config: JobConfig, backend: Backend | None = None) -> RunResult:
    """Generate for every input row, exactly once; resumes what an earlier session of the same run committed.

    Raises:
        JobError, ModelError, ScheduleError: input, model, schedule or output do not fit; before any model is loaded.
        JobStopped: a signal, a storage outage, a stall or a cost ceiling ended it; a rerun resumes.
        NothingToDo: another job is at work on the output of an incremental run.
        UnitsFailed: some units are recorded as failed, all others are committed; a rerun tries them again.
    """
    with leased(config) as lease:
        return run_leased(config, backend, lease)


def leased(config: JobConfig) -> AbstractContextManager[Lease | None]:
    """The lease on the output of an incremental run; other runs need none. Entering it raises NothingToDo.

    Raises JobError, before a lease is written, if the output is not the run's to write to.
    """
    if config.incremental:
        output = config.output_storage().at_first()
        check_place(output, Kind.RUN, config.input_storage())
        if not config.fresh:
            check_incremental(output)
        return Lease(config.output_storage())
    return nullcontext()


def run_leased(config: JobConfig, backend: Backend | None, lease: Lease | None) -> RunResult:
    """`run_job` under a lease that is held for longer than the run itself. Raises as `run_job`."""
    start = time.monotonic()
    job = prepare_run(config, backend)  # under the lease: an older plan might not know what another job has done since
    storage = job.config.output_storage()
    if lease is not None:  # planning, reading and waiting for storage may take longer than a lease lasts
        storage = storage.guarded(lease.check)
    begun = _begin(job, storage)
    unreadable = [record_failure(storage, unit, 1, f"read: {why}") for unit, why in begun.job.plan.unreadable]
    session = _generate(begun, lease) if begun.new.units else Done()
    session.failed += unreadable
    commits = begun.settled(session.commits)
    totals = total(commits)
    _check_ended_well(begun, storage, session, commits, totals)
    _check_complete(begun, commits, storage)
    ours = storage.guarded(lambda: begun.claim.check(storage))
    _write_manifest(begun, ours, commits, totals)
    # The run is finished: what the last manifest lists may go, and whatever becomes of the report changes nothing.
    _sweep(begun, ours, commits)
    there = not begun.new.units and is_reported(storage, commits, begun.job.config)
    there = there or _report(begun, storage, session, commits, totals)
    report = f"{storage.url.rstrip('/')}/{REPORT_FILE}" if there else ""
    seconds, earlier = time.monotonic() - start, totals.rows - total(session.commits).rows
    return RunResult(begun.job.config.output, report, earlier, totals, begun.job.shape, seconds, session.seconds)


@dataclass(frozen=True)
class _Begun:
    """A job that has looked into its output."""

    job: Preparation
    claim: Claim
    history: History | None  # of an incremental run
    commits: list[Commit]  # that stand
    new: Plan  # less the units of these

    @property
    def before(self) -> Totals:
        return total(self.commits)

    @property
    def work(self) -> Plan:
        """What progress, messages and ceilings are about: the whole run, or if incremental what is new."""
        return self.job.plan if self.history is None else self.new

    def settled(self, commits: Iterable[Commit]) -> list[Commit]:
        """All that stand once a session has added some, in the input's order."""
        standing = [*self.commits, *commits]
        if self.history is not None:
            standing = self.history.settle(standing)
        return sorted(standing, key=lambda commit: commit.place)


def _begin(job: Preparation, storage: Storage) -> _Begun:
    if job.config.fresh:
        discard_run(storage)
    claim = claim_output(storage.at_first(), job.description, job.plan.kept)
    logs.name_lines(run=claim.run)
    commits = read_commits(storage, claim.run, keep=True) if claim.resuming else []
    history: History | None = None
    if job.config.incremental:
        history = History(storage, job, job.known if claim.resuming else {})
        commits = history.settle(commits)
        plan = job.plan.excusing(history.is_done)
    else:
        if claim.resuming and job.plan.without(_units(commits)).units and SUCCESS_FILE in storage.entries():
            # Another job of this run may have finished it since: that its manifest stands is not to be undone.
            commits = read_commits(storage, claim.run)
        rows = hold_input(storage, job.plan, begun=bool(commits))
        plan = job.plan.with_done(rows, _units(commits), job.config)
        if taken_out := plan.taken_out:
            files = counted(len(taken_out), "file")
            log.info("%s without a row so far, such as %r, left the input: the run goes on", files, taken_out[0])
    problems = {file.path for file in job.plan.files if file.problem}
    if excused := [file.path for file in plan.files if file.path in problems and not file.problem]:
        log.info("%d files that cannot be read, such as %r, are done: leave them as they are", len(excused), excused[0])
    plan.warn_of_unreadable()
    begun = _Begun(replace(job, plan=plan), claim, history, commits, plan.without(_units(commits)))
    stay = commits if history is None else history.present(commits)
    if begun.new.units and len(stay) + len(begun.new.units) > MOST_UNITS:
        raise JobError(
            f"{storage.url!r} would hold more than {MOST_UNITS:,} work units, the most that a manifest lists: "
            "name another output for what is new, with an input of its own"
        )
    if claim.resuming and begun.new.units:
        storage.at_first().prove_put_if_absent()  # who began the run may have been allowed more than who goes on
    if claim.resuming and (begun.new.units or plan.unreadable):
        remove(storage, Kind.RUN, [SUCCESS_FILE])  # or it would tell readers and schedulers that nothing is left to do
    _say_begun(begun)
    return begun


def _units(commits: Iterable[Commit]) -> set[str]:
    return {commit.unit for commit in commits}


def _say_begun(begun: _Begun) -> None:
    job, plan, rows = begun.job, begun.job.plan, begun.before.rows
    if begun.history is None:
        log.info(
            "run %s: %s in %s of %s, %d rows already committed", job.fingerprint, counted(plan.rows, "row"),
            counted(len(plan.units), "unit"), counted(len(plan.files) - len(plan.taken_out), "file"), rows,
        )  # fmt: skip
    elif begun.new.units:
        files = {unit.path for unit in begun.new.units}
        log.info(
            "run %s: %d of %d files are new or changed: %s in %s to do, %d rows already committed",
            job.fingerprint, len(files), len(plan.files), counted(begun.new.rows, "row"),
            counted(len(begun.new.units), "unit"), rows,
        )  # fmt: skip
    else:
        log.info("run %s: nothing is new: %s; the output holds %d rows", job.fingerprint, plan.all_done, rows)
    if job.schedule.is_full_depth:
        log.info("full depth: nothing is skipped (target_speedup or schedule would)")
        if job.config.audit_fraction:
            log.warning("and so nothing is audited: full depth would be compared with itself")


def _generate(begun: _Begun, lease: Lease | None) -> Done:
    job, plan = begun.job, begun.work
    check_ceiling(job.config, Totals() if job.config.incremental else begun.before, plan.rows)
    task = Task(
        job.config, job.backend.held_to(job.model, begun.claim.began), job.template, job.schedule, plan.read_columns,
        plan.kept, job.longest_prompt, begun.claim.run,
    )  # fmt: skip
    output, source = job.config.output_storage(), job.config.input_storage()
    local = {"output": output.path(RUN_FILE)} if output.is_local else {}
    local |= {"input": begun.new.units[0].path} if source.is_local else {}
    connect(job.config.ray_address, job.config.log_format == "text", local)
    with Interruption() as interruption:
        return Session(task, plan, begun.commits, interruption, lease).run(list(begun.new.units))


def _check_ended_well(begun: _Begun, storage: Storage, session: Done, commits: list[Commit], totals: Totals) -> None:
    """Raises JobStopped for audits that failed, and UnitsFailed, once there is a report, where units did."""
    job = begun.job
    if begun.history is None and (said := failed_audit(job.config, totals, job.plan.rows)):
        # A job that stopped for it may have committed all units by then: starting it again accepts nothing.
        raise JobStopped(said)
    if begun.claim.resuming:
        forget_failures(storage, keep={unit.unit for unit in session.failed})
    if session.failed:
        if begun.history is not None:
            commits = begun.history.present(commits)
        _report(begun, storage, session, commits, total(commits))
        raise UnitsFailed(_say_failed(session.failed, begun.work, job.config))


def _check_complete(begun: _Begun, commits: list[Commit], storage: Storage) -> None:
    """Raises JobError where the commits or their files are not all of the plan, or the output is another run's, and
    JobStopped where the input has changed once more.
    """
    rows = {unit.id: unit.generations for unit in begun.job.plan.units}
    missing = len(rows.keys() - _units(commits))
    if missing:
        raise JobError(f"{missing} of {len(rows)} units are not committed: start the job again to resume it")
    there = set(storage.names(DATA))
    for commit in commits:
        if commit.file not in there:
            why = f"its file {commit.file} is not there"
        elif commit.totals.rows != rows.get(commit.unit, commit.totals.rows):
            why = f"it says {commit.totals.rows} rows of a unit of {rows[commit.unit]}"
        else:
            continue
        begun.claim.check(storage)
        raise damaged(storage, commit, why)
    # What was taken out of the input may have come back to another job of this run.
    if (gone := begun.job.plan.taken_out) and _units(read_commits(storage, begun.claim.run)) - _units(commits):
        raise JobStopped(f"{gone[0]!r} or another file is back in the input: start the job again to resume")


def _sweep(begun: _Begun, storage: Storage, commits: list[Commit]) -> None:
    """Remove data files of ours that no commit names."""
    is_over: Callable[[str], bool] | None = None if begun.history is None else begun.history.is_over
    if begun.job.plan.taken_out:  # what it has begun another job of this run may end
        is_over = lambda _: False  # noqa: E731
    swept = sweep_orphans(storage, commits, is_over)
    if swept:
        log.info(
            "removed %d spare data files, as of attempts that came second or versions that were replaced: every row of "
            "the output is in others", swept,
        )  # fmt: skip
    if begun.history is not None:
        begun.history.forget_replaced()


def _write_manifest(begun: _Begun, storage: Storage, commits: list[Commit], totals: Totals) -> None:
    """Unless it stands and nothing is new."""
    job = begun.job
    if not begun.new.units and is_manifest_of(storage, job.fingerprint, commits):
        return
    held = {"files": len(job.plan.files) - len(job.plan.taken_out), "rows": job.plan.input_rows}
    if begun.history is not None:
        held = begun.history.describe(commits)
    description = {"fingerprint": job.fingerprint, **job.description, "input": job.description["input"] | held}
    write_success(storage, description, commits, totals)


def _report(begun: _Begun, storage: Storage, session: Done, commits: list[Commit], totals: Totals) -> bool:
    """Write the report; whether that went well. Else it is said and no more: it costs nothing, the rows it is of do."""
    job = begun.job
    try:
        forecast = read_forecast(storage, work_name(job, begun.new.units))
        lines = against_actual(forecast, totals if begun.history is None else total(session.commits))
        schedule, ended = as_it_runs(job.config, job.schedule), (session.stats, session.failed)
        write_report(storage, job.config, schedule, job.fingerprint, commits, totals, lines, *ended)
    except JobStopped:  # the storage is gone
        raise
    except Exception as error:
        log.error(
            "the report could not be made (%s); the rows are not affected, and the same job started again tries to "
            "make it once more", described(error), exc_info=not isinstance(error, JobError | OSError),
        )  # fmt: skip
        return False
    return True


def _say_failed(failed: list[FailedUnit], plan: Plan, config: JobConfig) -> str:
    rows, files = sum(unit.generations for unit in failed), sum(not unit.rows for unit in failed)
    first = failed[0]
    how_many = f"{len(failed) - files} of {len(plan.units)} units ({rows:,} rows)"
    which = f"{first.unit}, rows {first.start} to {first.start + first.rows - 1} of {first.path!r} ({first.error})"
    if files:
        how_many += f" and {counted(files, 'whole file')}"
        which = which if first.rows else f"{first.path!r} ({first.error})"
    return (
        f"{how_many} failed, all others are committed; the first is {which}; "
        f"{config.output}/{FAILED}/ lists them: mend what they name and start the job again to retry only those"
        f"{unless_changed(failed, config.incremental)}"
    )
