"""Run a job from its configuration to its manifest and report."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import ray
from ray.data import ActorPoolStrategy, DataContext

from engine import ModelShape
from pipeline.backend import Backend, SkipDecodeBackend
from pipeline.cluster import TASK_CPUS, ReplicaResources, connect, replica_resources
from pipeline.commit import SUCCESS_FILE, Commit, Totals, read_commits, sweep_orphans, write_success
from pipeline.commit_stage import commit
from pipeline.config import JobConfig
from pipeline.errors import JobError
from pipeline.fit import choose_schedule, longest_prompt
from pipeline.plan import Plan, make_plan
from pipeline.progress import Board, ProgressReporter
from pipeline.report import REPORT_FILE, write_report
from pipeline.rows import output_schema
from pipeline.run_record import claim_output, describe_run, fingerprint
from pipeline.stages import Replica, Task, read, span_row
from pipeline.storage import Storage, absolute
from pipeline.template import PromptTemplate
from pipeline.unit import WorkUnit
from pipeline.wire import COMMIT

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
    """
    start = time.monotonic()
    backend = backend or SkipDecodeBackend()
    config = _absolute(config)
    template = PromptTemplate(config.prompt, config.system, config.prompt_format, config.overlong)
    plan = make_plan(config, template)
    output_schema(plan.kept)
    shape = backend.shape(config)
    schedule = choose_schedule(config, shape)
    longest = longest_prompt(config, shape)
    storage = Storage(config.output)
    description = describe_run(config, plan, schedule, backend.identity(config))
    resuming = claim_output(storage, description)
    commits = read_commits(storage) if resuming else []
    before = Totals()
    for done in commits:
        before.add(done.totals)
    log.info(
        "run %s: %d rows in %d units of %d files, %d rows already committed",
        fingerprint(description), plan.rows, len(plan.units), len(plan.files), before.rows,
    )  # fmt: skip
    if schedule.is_full_depth:
        log.info("full depth: nothing is skipped (target_speedup or schedule would)")
    done_units = {done.unit for done in commits}
    pending = [unit for unit in plan.units if unit.id not in done_units]
    generating_seconds = 0.0
    if pending:
        connect(config.ray_address)
        task = Task(config, backend, template, schedule, plan.read_columns, plan.kept, longest)
        new_commits, generating_seconds = _generate(task, plan, pending, before)
        commits += new_commits
    totals = Totals()
    for done in commits:
        totals.add(done.totals)
    if totals.rows != plan.rows:
        raise JobError(f"{totals.rows} of {plan.rows} rows are committed: start the job again to resume it")
    commits.sort(key=lambda done: done.unit)
    swept = sweep_orphans(storage, commits)
    if swept:
        log.info("removed %d data files that no commit names", swept)
    if pending or storage.read(SUCCESS_FILE) is None:
        run = {"fingerprint": fingerprint(description), **description}
        write_report(storage, config, shape, schedule, run["fingerprint"], commits, totals)
        write_success(storage, run, commits, totals)
    report = f"{storage.url.rstrip('/')}/{REPORT_FILE}"
    seconds = time.monotonic() - start
    return RunResult(config.output, report, before.rows, totals, shape, seconds, generating_seconds)


def _absolute(config: JobConfig) -> JobConfig:
    """The same configuration with paths that workers, whose directory is another, understand."""
    paths = {"input": absolute(config.input), "output": absolute(config.output)}
    if Path(config.model).exists():
        paths["model"] = str(Path(config.model).resolve())
    return config.model_copy(update=paths)


def _generate(task: Task, plan: Plan, pending: list[WorkUnit], before: Totals) -> tuple[list[Commit], float]:
    """Pass the pending units through the stages; returns their commits and the seconds since a replica was ready."""
    resources = replica_resources(task.config)
    log.info("%d replicas of %d threads and %g GPUs each", resources.count, resources.threads, resources.gpus)
    board = Board()
    commits = []
    with ProgressReporter(board, plan.rows, before) as progress:
        for record in _stream(task, plan, pending, resources, board):
            done = Commit.from_json(record)
            commits.append(done)
            progress.committed(done)
        return commits, board.read([]).seconds


def _stream(
    task: Task, plan: Plan, pending: list[WorkUnit], resources: ReplicaResources, board: Board
) -> Iterator[bytes]:
    """Commit records, as units are committed."""
    context = DataContext.get_current()
    context.enable_progress_bars = False  # the job has its own
    # A unit is one row. Blocks of one row let neighbouring units go to different replicas.
    context.target_max_block_size = 1
    logging.getLogger("ray.data").setLevel(logging.WARNING)
    logging.getLogger("ray.data._internal.progress").setLevel(logging.ERROR)  # says that its bars are off
    output = task.config.output
    spans = [span_row(units) for units in plan.spans(pending)]
    dataset = (
        ray.data.from_items(spans, override_num_blocks=len(spans))
        .map_batches(read, batch_size=1, batch_format="pyarrow", fn_kwargs={"task": task}, num_cpus=TASK_CPUS)
        .map_batches(
            Replica,
            batch_size=1,
            batch_format="pyarrow",
            compute=ActorPoolStrategy(size=resources.count),
            fn_constructor_kwargs={"task": task, "threads": resources.threads, "board": board},
            num_cpus=resources.cpus,
            num_gpus=resources.gpus or None,
        )
        .map_batches(commit, batch_size=1, batch_format="pyarrow", fn_args=(output,), num_cpus=TASK_CPUS)
    )
    for row in dataset.iter_rows():
        yield row[COMMIT]
