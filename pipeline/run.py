"""Run a job from its configuration to its manifest and report."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

from engine import ModelShape
from pipeline.backend import Backend
from pipeline.ceiling import check_ceiling
from pipeline.cluster import connect
from pipeline.commit import SUCCESS_FILE, Commit, Totals, read_commits, sweep_orphans, total, write_success
from pipeline.config import JobConfig
from pipeline.errors import JobError, UnitsFailed
from pipeline.failed import FAILED, FailedUnit, forget_failures
from pipeline.interruption import Interruption
from pipeline.plan import Plan
from pipeline.preparation import Preparation, prepare_run
from pipeline.report import REPORT_FILE, write_report
from pipeline.run_record import claim_output, discard_run
from pipeline.session import Done, Session
from pipeline.stages import Task
from pipeline.unit import WorkUnit

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RunResult:
    """What a finished run did, over all its sessions."""

    output: str
    report: str
    rows_resumed: int  # committed before this session
    totals: Totals
    shape: ModelShape
    seconds: float  # of this session
    generating_seconds: float  # of this session, from its first replica being ready to its last commit


def run_job(config: JobConfig, backend: Backend | None = None) -> RunResult:
    """Generate for every input row, exactly once; resumes what an earlier session of the same run committed.

    Raises:
        JobError, ModelError, ScheduleError: input, model, schedule or output do not fit; before any model is loaded.
        JobStopped: a signal, a storage outage, a stall or a cost ceiling ended it; a rerun resumes.
        UnitsFailed: some units are recorded as failed, all others are committed; a rerun tries them again.
    """
    start = time.monotonic()
    job = prepare_run(config, backend)
    config, plan, shape, schedule, run = job.config, job.plan, job.shape, job.schedule, job.fingerprint
    storage = config.output_storage()
    if config.fresh:
        discard_run(storage)
    claim = claim_output(storage.at_first(), job.description)
    commits = read_commits(storage, claim.run) if claim.resuming else []
    before = total(commits)
    log.info(
        "run %s: %d rows in %d units of %d files, %d rows already committed",
        run, plan.rows, len(plan.units), len(plan.files), before.rows,
    )  # fmt: skip
    if schedule.is_full_depth:
        log.info("full depth: nothing is skipped (target_speedup or schedule would)")
    done_units = {commit.unit for commit in commits}
    pending = [unit for unit in plan.units if unit.id not in done_units]
    session = Done()
    if pending:
        session = _generate(job, claim.run, pending, commits)
        commits = commits + session.commits
    commits.sort(key=lambda commit: commit.unit)
    totals = total(commits)
    if claim.resuming:
        forget_failures(storage, (commit.unit for commit in commits))
    report = f"{storage.url.rstrip('/')}/{REPORT_FILE}"
    if session.failed:
        write_report(storage, config, shape, schedule, run, commits, totals)
        raise UnitsFailed(_say_failed(session.failed, plan, config.output))
    if totals.rows != plan.rows:
        raise JobError(f"{totals.rows} of {plan.rows} rows are committed: start the job again to resume it")
    claim.check(storage)
    swept = sweep_orphans(storage, commits)
    if swept:
        log.info("removed %d data files that no commit names", swept)
    if pending or storage.read(SUCCESS_FILE) is None:
        write_report(storage, config, shape, schedule, run, commits, totals)
        write_success(storage, {"fingerprint": run, **job.description}, commits, totals)
    seconds = time.monotonic() - start
    return RunResult(config.output, report, before.rows, totals, shape, seconds, session.seconds)


def _generate(job: Preparation, run: str, pending: list[WorkUnit], before: list[Commit]) -> Done:
    plan = job.plan
    check_ceiling(job.config, total(before), plan.rows)
    task = Task(
        job.config, job.backend, job.template, job.schedule, plan.read_columns, plan.kept, job.longest_prompt, run
    )
    connect(job.config.ray_address)
    # After connecting, for Ray sets handlers of its own.
    with Interruption() as interruption:
        return Session(task, plan, before, interruption).run(pending)


def _say_failed(failed: list[FailedUnit], plan: Plan, output: str) -> str:
    rows = sum(unit.rows for unit in failed)
    first = failed[0]
    return (
        f"{len(failed)} of {len(plan.units)} units ({rows:,} rows) failed, all others are committed; the first is "
        f"{first.unit}, rows {first.start} to {first.start + first.rows - 1} of {first.path!r} ({first.error}); "
        f"{output}/{FAILED}/ lists them: mend what they name and start the job again to retry only those"
    )
