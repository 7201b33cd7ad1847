"""The first two of the three stages a work unit passes through on Ray Data: read tasks -> replicas -> commit tasks."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow as pa

from engine import BatchStats, Schedule
from pipeline.backend import Backend
from pipeline.config import JobConfig
from pipeline.progress import Board
from pipeline.read import read_units
from pipeline.rows import generate, prepare
from pipeline.storage import Storage
from pipeline.template import PromptTemplate
from pipeline.unit import WorkUnit
from pipeline.wire import COST, SPAN, TABLE, UNIT, from_bytes, to_bytes


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


def span_row(units: list[WorkUnit]) -> dict[str, str]:
    """What a read task is given: neighbouring units of one file."""
    return {SPAN: json.dumps([unit.to_json() for unit in units])}


def read(rows: pa.Table, task: Task) -> Iterator[pa.Table]:
    """Read stage: a span of units in, each unit's prepared table out as soon as it is tokenised."""
    tokenizer = task.backend.tokenizer(task.config)
    fs = Storage(task.config.input).fs
    for span in rows[SPAN].to_pylist():
        units = [WorkUnit.from_json(unit) for unit in json.loads(span)]
        for unit, table in read_units(fs, units, task.read_columns):
            config = task.config
            prepared = prepare(table, task.kept, config.text_column, task.template, tokenizer, task.longest_prompt)
            yield pa.table({UNIT: [unit.to_json()], TABLE: [to_bytes(prepared)]})


class Replica:
    """Generate stage: an actor with one engine."""

    def __init__(self, task: Task, threads: int, board: Board) -> None:
        self._task = task
        self._board = board
        self._sampling = task.config.sampling()
        self._engine = task.backend.engine(task.config, threads)
        board.ready()

    def __call__(self, rows: pa.Table) -> Iterator[pa.Table]:
        for unit_json, content in zip(rows[UNIT].to_pylist(), rows[TABLE].to_pylist(), strict=True):
            unit = WorkUnit.from_json(unit_json)
            start = time.perf_counter()
            padding = 0

            def on_batch(stats: BatchStats, unit_id: str = unit.id) -> None:
                nonlocal padding
                padding += stats.flops_padding
                self._board.batch_done(unit_id, stats.samples, stats.generated_tokens)

            config = self._task.config
            # A row's random stream is named by its place in the input, so it outlives retries and re-planning.
            file = Storage(config.input).relative(unit.path)
            ids = [f"{file}:{unit.start + row}" for row in range(unit.rows)]
            output = generate(
                from_bytes(content),
                ids,
                self._engine,
                self._sampling,
                self._task.schedule,
                config.batch_size,
                on_batch,
            )
            cost = {"flops_padding": padding, "seconds": time.perf_counter() - start}
            yield pa.table({UNIT: [unit_json], TABLE: [to_bytes(output)], COST: [json.dumps(cost)]})
