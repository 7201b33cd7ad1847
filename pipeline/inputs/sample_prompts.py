"""Prompts drawn at random from a data set: what forecasts, calibration, training and evaluation look at."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

import pyarrow as pa
from pydantic import Field

from pipeline.config import AnswerConfig, JobConfig, StorageConfig
from pipeline.errors import JobError
from pipeline.inputs.corpus_parts import Part, part_of
from pipeline.inputs.work import Plan, make_plan
from pipeline.rows.read import read_units
from pipeline.rows.rows import ERROR, chosen, prepare
from pipeline.rows.template import PromptTemplate, PromptTokenizer
from pipeline.rows.unit import WorkUnit
from pipeline.values.show import names

RUN_OF_ROWS = 16  # neighbouring rows drawn together: few, as neighbours are often alike, yet one read for all of them
UNITS = 1000  # whose runs are shuffled together

log = logging.getLogger(__name__)

Item = TypeVar("Item")


class CorpusConfig(AnswerConfig, StorageConfig):
    """From which rows prompts are drawn, and how the model answers them."""

    input: str = Field(description="Parquet file, directory or glob: a local path or any fsspec URL such as s3://")
    s3_anonymous_input: bool = Field(False, description="read a public input without credentials")

    @property
    def parted_by(self) -> str:
        """What the parts of the corpus are told from: "id" or "text"."""
        return "text" if self.id_column is None else "id"


def draw_rows(
    config: AnswerConfig,
    plan: Plan,
    read: Callable[[WorkUnit], pa.Table],
    template: PromptTemplate,
    tokenizer: PromptTokenizer,
    longest: int,
) -> Iterator[pa.Table]:
    """Prepared rows (see pipeline.rows.prepare), a few neighbours at a time, in a random order that the seed decides.

    `read` gives the rows of a unit that may be drawn.
    """
    order = _shuffled(plan.units, config.seed)
    for first in range(0, len(order), UNITS):
        runs = [
            replace(unit, start=start, rows=min(RUN_OF_ROWS, unit.start + unit.rows - start))
            for unit in order[first : first + UNITS]
            for start in range(unit.start, unit.start + unit.rows, RUN_OF_ROWS)
        ]
        for run in _shuffled(runs, config.seed):
            yield prepare(read(run), plan.kept, config.text_column, template, tokenizer, longest)


def sample_prompts(
    config: CorpusConfig,
    part: Part,
    count: int,
    tokenizer: PromptTokenizer,
    longest: int,
    keep_columns: Sequence[str] = (),
) -> pa.Table:
    """Prepared rows of a part, drawn at random by the configuration's seed, none with an error.

    Args:
        config: names input, columns and prompt.
        part: of the rows, by their ids, or where no id column is named, or a file lacks it, by their texts.
        count: rows; fewer are returned where the part has no more. A larger count only adds to them.
        tokenizer: the model's.
        longest: prompt, in tokens.
        keep_columns: input columns to keep beside the prompts.

    Raises:
        JobError: the input does not fit the configuration, or no row of the part makes a prompt.
    """
    template = config.template()
    shared = set(JobConfig.model_fields) & set(CorpusConfig.model_fields)
    planned = JobConfig(**config.model_dump(include=shared), output="", keep_columns=list(keep_columns))
    plan = make_plan(planned, template)
    storage = planned.input_storage()

    def read(unit: WorkUnit) -> pa.Table:
        [(_, table)] = read_units(storage, [unit], plan.read_columns)
        if part == "all":
            return table
        has_id = config.id_column in table.column_names  # some files of a corpus may lack it
        keys = names(table[config.id_column if has_id else config.text_column])
        return chosen(table, [part_of(key) == part for key in keys])

    tables: list[pa.Table] = []
    rows = bad = 0
    for prepared in draw_rows(config, plan, read, template, tokenizer, longest):
        good = chosen(prepared, prepared[ERROR].is_null().to_pylist())
        tables.append(good)
        rows += good.num_rows
        bad += prepared.num_rows - good.num_rows
        if rows >= count:
            break
    which = "all rows" if part == "all" else f"the {part} part, told by a hash of each row's {config.parted_by},"
    if not rows:
        raise JobError(f"{which} of {config.input!r} make no prompt: give a larger input, or another part (--part)")
    log.info(
        "%d prompts drawn from %s of %s%s%s", min(rows, count), which, config.input,
        f"; it has no more than these, {count} were asked for" if rows < count else "",
        f"; {bad} rows that make no prompt are left out" if bad else "",
    )  # fmt: skip
    return pa.concat_tables(tables).drop_columns([ERROR]).slice(0, count)


def _shuffled(items: Sequence[Item], seed: int) -> list[Item]:
    order = list(items)
    random.Random(seed).shuffle(order)
    return order
