"""A random sample of a data set's prompts, for calibration and evaluation."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pyarrow as pa
from pydantic import Field

from pipeline.config import AnswerConfig, JobConfig, StorageConfig
from pipeline.errors import JobError
from pipeline.inputs.work import make_plan
from pipeline.rows.read import read_units
from pipeline.rows.rows import ERROR, chosen, prepare
from pipeline.rows.template import PromptTokenizer
from pipeline.rows.unit import WorkUnit
from pipeline.values.show import names

UNIT_ROWS = 32  # neighbouring rows that are drawn together: few, as neighbours are often alike


class SampleConfig(AnswerConfig, StorageConfig):
    """Which prompts are drawn, and how the model answers them."""

    input: str = Field(description="Parquet file, directory or glob: a local path or any fsspec URL such as s3://")
    s3_anonymous_input: bool = Field(False, description="read a public input without credentials")
    prompts: int = Field(500, ge=1, description="prompts to draw, by the seed")


def shuffled(units: Sequence[WorkUnit], seed: int) -> list[WorkUnit]:
    """Work units in a random order that is a function of the seed."""
    order = list(units)
    random.Random(seed).shuffle(order)
    return order


def sample_prompts(
    config: SampleConfig,
    tokenizer: PromptTokenizer,
    longest: int,
    keep_columns: list[str] | None = None,
    belongs: Callable[[str], bool] | None = None,
) -> pa.Table:
    """Prepared rows (see pipeline.rows.prepare) drawn at random by the configuration's seed, none with an error.

    Args:
        config: names input, columns, prompt and how many rows; fewer are returned where the input has no more.
        tokenizer: the model's.
        longest: prompt, in tokens.
        keep_columns: input columns to keep beside the prompts.
        belongs: whether the row with this id may be drawn; needs an id column.

    Raises:
        JobError: the input does not fit the configuration, or no row makes a prompt.
    """
    if belongs is not None and config.id_column is None:
        raise JobError("a part of the corpus is chosen by id: name the id column with id_column")
    template = config.template()
    shared = set(JobConfig.model_fields) & set(SampleConfig.model_fields)
    planned = JobConfig(
        **config.model_dump(include=shared), output="", keep_columns=keep_columns or [], rows_per_unit=UNIT_ROWS
    )
    plan = make_plan(planned, template)
    storage = planned.input_storage()
    tables: list[pa.Table] = []
    rows = 0
    for unit in shuffled(plan.units, config.seed):
        [(_, table)] = read_units(storage, [unit], plan.read_columns)
        if belongs is not None:
            table = chosen(table, [belongs(name) for name in names(table[config.id_column])])
        prepared = prepare(table, plan.kept, config.text_column, template, tokenizer, longest)
        prepared = chosen(prepared, prepared[ERROR].is_null().to_pylist())
        tables.append(prepared)
        rows += prepared.num_rows
        if rows >= config.prompts:
            break
    if not rows:
        raise JobError(f"input {config.input!r} has no row to make a prompt of")
    return pa.concat_tables(tables).drop_columns([ERROR]).slice(0, config.prompts)
