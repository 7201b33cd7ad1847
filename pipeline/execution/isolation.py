"""Finds the rows that kill their process by bisecting their unit, and delivers the unit's other rows."""

import logging
import re
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pyarrow as pa
import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, OutOfMemoryError, RayError, RayTaskError

from pipeline.commits.commit import commit_unit
from pipeline.errors import one_line
from pipeline.execution.cluster import TASK_CPUS, ReplicaResources
from pipeline.execution.stages import Task, UnitGenerator, committed, refusal
from pipeline.execution.wire import Failure, Parcel, from_bytes
from pipeline.logs import set_up_worker
from pipeline.monitoring.board import Board
from pipeline.rows.read import read_units
from pipeline.rows.row_generator import TooManyRowsFailed
from pipeline.rows.rows import quarantine
from pipeline.rows.unit import WorkUnit

log = logging.getLogger(__name__)

LONE_DEATHS = 2  # of processes with nothing but one row in them: no coincidence
MOST_DEATHS = 40  # for one unit; one killer among 256 rows takes 10
MOST_SPLITS = 16  # for one unit, of ranges in which more rows raise than a corpus has; 120 side by side take 11
POLL_S = 1.0


class TooManyDeaths(RuntimeError):
    """The unit kills more processes than its rows explain."""


class _Cell:
    """An actor that reads, generates, and may die."""

    def __init__(self, task: Task, resources: ReplicaResources, board: Board) -> None:
        set_up_worker(task.config.log_format, task.run)
        self._task = task
        self._generator = UnitGenerator(task, resources, board)

    def run(self, unit: WorkUnit) -> tuple[None, Parcel]:
        """Two objects: the first tells the driver that it went well, the second stays out of the driver."""
        ((_, prepared),) = self._task.prepared([unit])
        return None, self._generator.run(unit, prepared)


class Isolation:
    """Does single units in actors of their own, one after the other; who ends well serves the next unit too."""

    def __init__(self, task: Task, resources: ReplicaResources, board: Board, on_wait: Callable[[], None]) -> None:
        """`on_wait` is called every second or so; what it raises ends the isolation."""
        self._task = task
        self._resources = resources
        self._options = {"num_cpus": resources.cpus, "num_gpus": resources.gpus, "max_restarts": 0}
        self._board = board
        self._on_wait = on_wait
        self._cell: Any = None

    def run(self, unit: WorkUnit) -> Parcel:
        """The unit's commit, or its failure. Rows that kill their process alone have that as their error.

        Raises what `refusal` finds if a process cannot start its engine.
        """
        try:
            parts, killers = self._bisect(unit)
            assemble = ray.remote(num_cpus=TASK_CPUS, max_retries=1)(_assemble)
            answer = assemble.remote(self._task, unit, sorted(killers.items()), *parts)
            self._wait(answer)
            return ray.get(answer)  # type: ignore[no-any-return]
        except RayTaskError as error:
            self.close()  # what it says may be of the process, not of the unit
            cause = error.cause if isinstance(error.cause, Exception) else error
            return Parcel(unit, failure=Failure.of("generate", cause))
        except (TooManyDeaths, RayError) as error:
            self.close()
            return Parcel(unit, failure=Failure("generate", "unit", one_line(error)))

    def _bisect(self, unit: WorkUnit) -> tuple[list[Any], dict[int, str]]:
        """References to the parcels of ranges that live, and the rows that don't with their errors."""
        parts: list[Any] = []
        killers: dict[int, str] = {}
        lone: Counter[int] = Counter()  # deaths by row, of processes that had only it
        deaths = splits = 0
        ranges = _halves(unit)  # of rows still to do; as a whole the unit has killed before
        while ranges:
            part = ranges.pop()
            fate, parcel = self._begin(part)
            try:
                self._wait(fate)
                ray.get(fate)
                parts.append(parcel)
                continue
            except RayTaskError as error:
                with suppress(RayError):
                    ray.get(parcel)  # the same error, of which Ray would write a page if nobody looked
                # So many rows of a range may raise where the unit has others: narrowed down, each has its own error.
                splits += 1
                if not isinstance(error.cause, TooManyRowsFailed) or part.rows == 1 or splits > MOST_SPLITS:
                    raise
                ranges += _halves(part)
                continue
            except (ActorDiedError, ActorUnavailableError, OutOfMemoryError) as error:
                if (told := refusal(error)) is not None:
                    raise told from None  # by an engine that does not start, whatever the rows
                death = _detail(error)
            self.close()
            self._board.read([unit.id])  # rows of ranges that lived too: too few on show are better than some twice
            deaths += 1
            if deaths > MOST_DEATHS:
                raise TooManyDeaths(f"unit {unit.id} has killed {deaths} processes, the last with {death}")
            where, end = {"unit": unit.id}, part.start + part.rows - 1
            log.warning("a process died with rows %d to %d: %s", part.start, end, death, extra=where)
            lone[part.start] += part.rows == 1
            if lone[part.start] < LONE_DEATHS:
                ranges += _halves(part)
            else:
                killers[part.start] = f"its process died {LONE_DEATHS} times with this row alone ({death})"
        return parts, killers

    def _begin(self, part: WorkUnit) -> tuple[Any, Any]:
        if self._cell is None:
            self._cell = ray.remote(_Cell).options(**self._options).remote(self._task, self._resources, self._board)
        fate, parcel = self._cell.run.options(num_returns=2).remote(part)
        return fate, parcel

    def _wait(self, reference: Any) -> None:
        while not ray.wait([reference], timeout=POLL_S, fetch_local=False)[0]:
            self._on_wait()

    def close(self) -> None:
        """End its actor."""
        if self._cell is not None:
            ray.kill(self._cell)
            self._cell = None


def _halves(unit: WorkUnit) -> list[WorkUnit]:
    """The later half first: ranges are taken from the end. A single row is its own half."""
    if unit.rows == 1:
        return [unit]
    middle = unit.rows // 2
    return [replace(unit, start=unit.start + middle, rows=unit.rows - middle), replace(unit, rows=middle)]


def _assemble(task: Task, unit: WorkUnit, killers: Sequence[tuple[int, str]], *parts: Parcel) -> Parcel:
    """Commit a unit whose ranges were done apart."""
    set_up_worker(task.config.log_format, task.run)
    tables: dict[int, pa.Table] = {}
    cost = Counter[str]()
    for part in parts:
        assert part.table is not None
        tables[part.unit.start] = from_bytes(part.table)
        cost.update(part.cost or {})
    for row, error in killers:
        single = [replace(unit, start=row, rows=1)]
        ((_, table),) = read_units(task.config.input_storage(), single, task.kept.names or task.read_columns)
        tables[row] = quarantine(table, task.kept, unit.samples, error)
    output = pa.concat_tables(tables[start] for start in sorted(tables))
    assert output.num_rows == unit.generations
    return committed(unit, lambda: commit_unit(task.config.output_storage(), unit, output, task.run, cost))


def _detail(error: Exception) -> str:
    """The part of Ray's page-long message that says how the process ended."""
    found = re.search(r"Worker exit type: (\w+) Worker exit detail: (.*?\. ?.*?\.)", one_line(error))
    return f"{found[1]}: {found[2]}" if found else one_line(error)[:200]
