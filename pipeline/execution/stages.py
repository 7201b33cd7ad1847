"""The three stages a work unit passes through on Ray Data: read tasks -> replicas -> commit tasks."""

import gc
import json
import logging
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache, partial
from typing import NoReturn

import pyarrow as pa

from engine import BatchStats, Generation, ModelError, Schedule, ScheduleError
from pipeline.commits.commit import Commit, commit_unit
from pipeline.config import JobConfig
from pipeline.errors import JobError, JobStopped, last_line
from pipeline.execution.cluster import ReplicaResources
from pipeline.execution.wire import Failure, Parcel, from_bytes, to_bytes
from pipeline.logs import LogFormat, about, set_up_worker
from pipeline.monitoring.board import Board
from pipeline.monitoring.metrics import ReplicaMeter
from pipeline.monitoring.spending import EnergyMeter, Spending
from pipeline.preparing.backend import Backend, as_it_runs
from pipeline.reporting.audit import Auditor
from pipeline.rows.read import Unreadable, read_units
from pipeline.rows.row_generator import DeviceBroken, RowGenerator
from pipeline.rows.rows import generate, prepare
from pipeline.rows.shared_engine import SharedEngine
from pipeline.rows.template import PromptTemplate
from pipeline.rows.unit import WorkUnit
from pipeline.storage.storage import Storage, StorageGone

log = logging.getLogger(__name__)

ASK_EVERY_S = 1.0  # whether the job is stopping
TELL_EVERY_S = 1.0  # how many rows have ended: some do in nearly every pass, and all replicas tell one actor
REFUSALS = (ModelError, ScheduleError, JobError, JobStopped)  # that say how to go on


@dataclass(frozen=True)
class Task:
    """All that the stages need to know; pickled to each of them."""

    config: JobConfig
    backend: Backend
    template: PromptTemplate
    schedule: Schedule
    read_columns: tuple[str, ...]
    kept: pa.Schema
    longest_prompt: int
    run: str  # fingerprint

    def prepared(self, units: list[WorkUnit]) -> Iterator[tuple[WorkUnit, pa.Table]]:
        """Tokenised tables of neighbouring units of one file. Raises JobError, StorageGone."""
        config, tokenizer = self.config, self.backend.tokenizer(self.config)
        for unit, table in read_units(config.input_storage(), units, self.read_columns):
            yield unit, prepare(table, self.kept, config.text_column, self.template, tokenizer, self.longest_prompt)


def span_row(units: list[WorkUnit]) -> dict[str, str]:
    """What a read task is given: neighbouring units of one file."""
    return {"span": json.dumps([asdict(unit) for unit in units])}


def read(rows: pa.Table, task: Task, board: Board) -> Iterator[pa.Table]:
    """Read stage: a span of units in, each unit's prepared table out as soon as it is tokenised."""
    set_up_worker(task.config.log_format, task.run)
    spare_collector()
    asked = -math.inf
    for span in rows["span"].to_pylist():
        units = [WorkUnit(**unit) for unit in json.loads(span)]
        for parcel in _read_span(units, task, board):
            if time.monotonic() - asked >= ASK_EVERY_S:
                if board.stopping():
                    return
                asked = time.monotonic()
            yield parcel.to_row()


def _read_span(units: list[WorkUnit], task: Task, board: Board) -> Iterator[Parcel]:
    """Every unit's table or failure: what breaks a span is the next unit's, or all others' too that cannot be read."""
    left = list(units)
    while left:
        try:
            for unit, table in task.prepared(left):
                yield Parcel(unit, table=to_bytes(table))
                left = left[1:]
        except Exception as error:
            end = error.end if isinstance(error, Unreadable) else left[0].start + 1
            if isinstance(error, StorageGone) or board.stopping():
                end = sys.maxsize
            for unit in left:
                if unit.start < end:
                    yield Parcel(unit, failure=Failure.of("read", error))
            left = [unit for unit in left if unit.start >= end]


class UnitGenerator:
    """Turns units' prepared tables into output tables, on an engine of its own; several threads may each bring one."""

    def __init__(self, task: Task, resources: ReplicaResources, board: Board) -> None:
        config = task.config
        self._board, self._gpus = board, resources.gpus
        self._input = config.input_storage()
        self._meter = ReplicaMeter(task.run)
        self._spending = Spending(EnergyMeter.of_this_process(config.gpus_per_replica).joules)
        board.starting()
        engine = SharedEngine(lambda: task.backend.engine(config, resources.threads))
        tokenizer = task.backend.tokenizer(config)
        # Charged once, with the first unit that is done.
        self._flops_prefix = [engine.share_prefix(task.template.shared_prefix(tokenizer))]
        schedule = as_it_runs(config, task.schedule)
        self._generator = RowGenerator(engine, config.sampling(), schedule, config.batch_size)
        shape, size, fraction = task.backend.shape(config), config.batch_size, config.audit_fraction
        self._auditor = Auditor(engine, tokenizer, shape, config.sampling(), schedule, size, fraction)
        engine.begin(config.sampling(), schedule, config.batch_size)
        self._auditor.begin()
        board.ready()

    def run(self, unit: WorkUnit, prepared: pa.Table) -> Parcel:
        """Raises TooManyRowsFailed, and what the pipeline itself does wrong; ends the process if its device broke."""
        with self._spending.shared() as share:
            output, cost = self._generate(unit, prepared)
        cost |= {"seconds": share.seconds, "gpu_seconds": share.seconds * self._gpus, "joules": share.joules}
        return Parcel(unit, table=to_bytes(output), cost=cost)

    def _generate(self, unit: WorkUnit, prepared: pa.Table) -> tuple[pa.Table, dict[str, float]]:
        """Output table, and what `Totals` holds of it beside; audited."""
        padding, untold, told = 0, BatchStats(), -math.inf

        def tell() -> None:
            nonlocal untold, told
            self._board.batch_done(unit.id, untold.samples, untold.generated_tokens)
            untold, told = BatchStats(), time.monotonic()

        def tell_at_times(_: BatchStats | None = None) -> None:
            """Of rows that have ended, if any: what is told is a sign of life too."""
            if time.monotonic() - told >= TELL_EVERY_S:
                tell()

        def on_batch(stats: BatchStats) -> None:
            nonlocal padding, untold
            padding += stats.flops_padding
            if stats.steps:  # else another unit has been told of the pass that ended some rows of this one
                self._meter.batch_done(stats)
            untold += stats
            tell_at_times()

        # A row's random streams are named by its place in the input, so they outlive retries and re-planning.
        file = self._input.relative(unit.path)
        ids = [f"{file}:{unit.start + row}" for row in range(unit.rows)]
        answers: dict[int, Generation] = {}
        try:
            output = generate(prepared, ids, self._generator, on_batch, answers.__setitem__)
            if untold.samples:
                tell()
            cost = {"flops_padding": padding, **self._auditor.audit(prepared, ids, answers, tell_at_times)}
        except (DeviceBroken, ModelError, ScheduleError) as error:
            _die(unit, error)
        with suppress(IndexError):
            cost["flops_prefix"] = self._flops_prefix.pop()
        return output, cost


def _die(unit: WorkUnit, error: Exception) -> NoReturn:
    """End this process so that Ray replaces it; an exception would leave it taking, and failing, unit after unit.

    If the engine cannot start at all, the one that takes its place says so.
    """
    log.critical("unit %s broke the engine (%s): this replica ends and another takes its place", unit.id, error)
    logging.shutdown()
    os._exit(1)


def refusal(error: Exception) -> Exception | None:
    """What an actor of ours ended itself with, in words that say how to go on; None if something else ended it."""
    cause: BaseException | None = error
    while cause is not None:
        inner = getattr(cause, "cause", None)
        if isinstance(inner, REFUSALS):
            return inner
        cause = inner if isinstance(inner, BaseException) else cause.__cause__
    last = last_line(error)
    for kind in REFUSALS:  # of what ends an actor as it starts, Ray keeps the text alone
        name = f"{kind.__module__}.{kind.__name__}: "
        if last.startswith(name):
            return kind(last.removeprefix(name))
    return None


class Replica:
    """Generate stage: an actor with one engine."""

    def __init__(self, task: Task, resources: ReplicaResources, board: Board) -> None:
        set_up_worker(task.config.log_format, task.run)
        self._board = board
        try:
            self._generator = UnitGenerator(task, resources, board)
        except REFUSALS as error:
            if not board.refuse(error):
                raise
            # Raised, it would be the one sentence in two hundred lines that Ray has for actors that cannot start.
            while True:  # until the session that knows of it ends this process
                time.sleep(60)
        spare_collector()

    def __call__(self, rows: pa.Table) -> Iterator[pa.Table]:
        for row in rows.to_pylist():
            parcel = Parcel.from_row(row)
            if parcel.table is not None:
                unit = parcel.unit
                if not self._board.take(unit.id):
                    continue
                try:
                    with about(unit=unit.id):
                        parcel = self._generator.run(unit, from_bytes(parcel.table))
                except Exception as error:
                    parcel = Parcel(unit, failure=Failure.of("generate", error))
                self._board.unit_done(unit.id)
            yield parcel.to_row()


def commit(rows: pa.Table, storage: Storage, run: str, log_format: LogFormat) -> Iterator[pa.Table]:
    """Commit stage: write and commit every unit of a batch to the output, as part of a run; failures pass through."""
    set_up_worker(log_format, run)
    for row in rows.to_pylist():
        parcel = Parcel.from_row(row)
        if parcel.table is not None:
            parcel = committed(parcel.unit, partial(_commit, parcel.table, parcel, storage, run))
        yield parcel.to_row()


def _commit(table: bytes, parcel: Parcel, storage: Storage, run: str) -> Commit:
    return commit_unit(storage, parcel.unit, from_bytes(table), run, parcel.cost)


def committed(unit: WorkUnit, write: Callable[[], Commit]) -> Parcel:
    """The unit's commit, or why there is none."""
    try:
        with about(unit=unit.id):
            return Parcel(unit, commit=write())
    except Exception as error:
        return Parcel(unit, failure=Failure.of("commit", error))


@cache
def spare_collector() -> None:
    """Take all that this process holds out of collections, once: half a million objects of torch, walked each time."""
    gc.freeze()
