"""A random sample of a data set's prompts, for calibration and evaluation."""

from __future__ import annotations

import random
from collections.abc import Callable

import pyarrow as pa

from pipeline.config import AnswerConfig, JobConfig
from pipeline.errors import JobError
from pipeline.plan import make_plan
from pipeline.read import read_units
from pipeline.rows import ERROR, prepare
from pipeline.storage import Storage
from pipeline.template import PromptTemplate, PromptTokenizer

UNIT_ROWS = 32  # neighbouring rows that are drawn together: few, as neighbours are often alike


def sample_prompts(
    config: AnswerConfig,
    input: str,
    tokenizer: PromptTokenizer,
    longest: int,
    count: int,
    keep_columns: list[str] | None = None,
    belongs: Callable[[object], bool] | None = None,
) -> pa.Table:
    """Prepared rows (see pipeline.rows.prepare) drawn at random by the configuration's seed, none with an error.

    Args:
        config: names columns and prompt.
        input: Parquet file, directory or glob.
        tokenizer: the model's.
        longest: prompt, in tokens.
        count: of rows; fewer are returned where the input has no more.
        keep_columns: input columns to keep beside the prompts.
        belongs: whether the row with this id may be drawn; needs an id column.

    Raises:
        JobError: the input does not fit the configuration, or no row makes a prompt.
    """
    if belongs is not None and config.id_column is None:
        raise JobError("a part of the corpus is chosen by id: name the id column with id_column")
    template = PromptTemplate(config.prompt, config.system, config.prompt_format, config.overlong)
    planned = JobConfig(
        **config.model_dump(include=set(AnswerConfig.model_fields)),
        input=input,
        output="",
        keep_columns=keep_columns or [],
        rows_per_unit=UNIT_ROWS,
    )
    plan = make_plan(planned, template)
    units = list(plan.units)
    random.Random(config.seed).shuffle(units)
    fs = Storage(input).fs
    tables: list[pa.Table] = []
    rows = 0
    for unit in units:
        [(_, table)] = read_units(fs, [unit], plan.read_columns)
        if belongs is not None:
            table = table.filter(pa.array(map(belongs, table[config.id_column].to_pylist()), pa.bool_()))
        prepared = prepare(table, plan.kept, config.text_column, template, tokenizer, longest)
        prepared = prepared.filter(pa.compute.is_null(prepared[ERROR]))
        tables.append(prepared)
        rows += prepared.num_rows
        if rows >= count:
            break
    if not rows:
        raise JobError(f"input {input!r} has no row to make a prompt of")
    return pa.concat_tables(tables).drop_columns([ERROR]).slice(0, count)
