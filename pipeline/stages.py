"""The three stages a work unit passes through on Ray Data: read tasks -> replicas -> commit tasks.

A work unit travels as one row, its table as Arrow bytes in one cell: Ray Data may split or merge blocks of rows as it
likes, a unit stays whole.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import pyarrow as pa

from engine import BatchStats, Schedule
from pipeline.backend import Backend
from pipeline.commit import commit_unit
from pipeline.config import JobConfig
from pipeline.plan import WorkUnit
from pipeline.progress import Board
from pipeline.read import read_units
from pipeline.rows import generate, prepare
from pipeline.storage import Storage
from pipeline.template import PromptTemplate

SPAN, UNIT, TABLE, COST, COMMIT = "span", "unit", "table", "cost", "commit"  # column names between the stages


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
    return {SPAN: json.dumps([asdict(unit) for unit in units])}


def read(rows: pa.Table, task: Task) -> Iterator[pa.Table]:
    """Read stage: a span of units in, each unit's prepared table out as soon as it is tokenised."""
    tokenizer = task.backend.tokenizer(task.config)
    fs = Storage(task.config.input).fs
    for span in rows[SPAN].to_pylist():
        units = [WorkUnit(**unit) for unit in json.loads(span)]
        for unit, table in read_units(fs, units, task.read_columns):
            config = task.config
            prepared = prepare(table, task.kept, config.text_column, task.template, tokenizer, task.longest_prompt)
            yield pa.table({UNIT: [json.dumps(asdict(unit))], TABLE: [_to_bytes(prepared)]})


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
            unit = WorkUnit(**json.loads(unit_json))
            start = time.perf_counter()
            padding = 0

            def on_batch(stats: BatchStats, unit_id: str = unit.id) -> None:
                nonlocal padding
                padding += stats.flops_padding
                self._board.batch_done(unit_id, stats.samples, stats.generated_tokens)

            # A row's random stream is named by its place in the input, so it outlives retries and re-planning.
            ids = [f"{unit.path}:{unit.start + row}" for row in range(unit.rows)]
            config = self._task.config
            output = generate(
                _from_bytes(content),
                ids,
                self._engine,
                self._sampling,
                self._task.schedule,
                config.batch_size,
                on_batch,
            )
            cost = {"flops_padding": padding, "seconds": time.perf_counter() - start}
            yield pa.table({UNIT: [unit_json], TABLE: [_to_bytes(output)], COST: [json.dumps(cost)]})


def commit(rows: pa.Table, task: Task) -> pa.Table:
    """Commit stage: a unit's output table in, its commit record out."""
    storage = Storage(task.config.output)
    records = [
        commit_unit(storage, WorkUnit(**json.loads(unit)), _from_bytes(content), **json.loads(cost)).to_json()
        for unit, content, cost in zip(*(rows[name].to_pylist() for name in (UNIT, TABLE, COST)), strict=True)
    ]
    return pa.table({COMMIT: records})


def _to_bytes(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    content: bytes = sink.getvalue().to_pybytes()
    return content


def _from_bytes(content: bytes) -> Any:
    with pa.ipc.open_stream(content) as reader:
        return reader.read_all()
