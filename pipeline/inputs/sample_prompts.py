"""Prompts drawn at random from a data set: what forecasts, calibration, training and evaluation look at.

A corpus has three parts: schedules are fitted on one, trained on another, judged on a third.
"""

import hashlib
import logging
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby, islice
from typing import Annotated, Literal, TypeVar

import pyarrow as pa
from pydantic import Field

from engine import Tokenizer
from pipeline.config import AnswerConfig, JobConfig
from pipeline.errors import JobError, one_line
from pipeline.inputs.work import Plan, make_plan
from pipeline.rows.read import read_units
from pipeline.rows.rows import ERROR, chosen, prepare, taken
from pipeline.rows.template import PromptTemplate
from pipeline.rows.unit import WorkUnit
from pipeline.storage.settings import Place, StorageConfig
from pipeline.storage.storage import Storage, StorageRefused
from pipeline.values.show import names

RUN_OF_ROWS = 16  # neighbouring rows drawn together: few, as neighbours are often alike, yet one read for all of them
UNITS = 1000  # whose runs are shuffled together
ROWS_TOGETHER = 1024  # read at once, at most
MOST_REFUSALS = 3  # of runs of a file, before it is given up

log = logging.getLogger(__name__)

Item = TypeVar("Item")
Part = Annotated[
    Literal["calibrate", "train", "test", "all"],
    Field(
        description="of the input's rows, to draw from; a hash of each row's id, or of its text where there is no id "
        "column, says to which one it belongs: test and calibrate are an eighth each, train is the rest"
    ),
]

TEST_SHARE, CALIBRATE_SHARE = 1 / 8, 1 / 8  # of all rows; the rest is for training


def part_of(key: str) -> Part:
    """The part of the row of this id or text: a hash of it, so the same in every run and every file. Never "all"."""
    place = int.from_bytes(hashlib.sha256(key.encode()).digest()[:6], "big") / 2**48  # uniform in [0, 1)
    if place < TEST_SHARE:
        return "test"
    return "calibrate" if place < TEST_SHARE + CALIBRATE_SHARE else "train"


class CorpusConfig(AnswerConfig, StorageConfig):
    """From which rows prompts are drawn, and how the model answers them."""

    input: Place = Field(
        min_length=1, description="Parquet file, directory or glob: a local path or any fsspec URL such as s3://"
    )
    s3_anonymous_input: bool = Field(False, description="read a public input without credentials")
    part: Part = "all"

    @property
    def parted_by(self) -> str:
        """The column that the parts of the corpus are told from: that of ids, or that of texts."""
        return self.id_column or self.text_column


def neighbours(plan: Plan, seed: int) -> Iterator[WorkUnit]:
    """A few neighbouring rows at a time, in a random order that the seed decides."""
    order = _shuffled(_joined(plan.units), seed)
    for first in range(0, len(order), UNITS):
        runs = [
            replace(unit, start=start, rows=min(RUN_OF_ROWS, unit.start + unit.rows - start))
            for unit in order[first : first + UNITS]
            for start in range(unit.start, unit.start + unit.rows, RUN_OF_ROWS)
        ]
        yield from _shuffled(runs, seed)


def _joined(units: Sequence[WorkUnit]) -> list[WorkUnit]:
    """As large as if each row had one sample: runs of rows end with their unit, and short ones take more reads."""
    most = max((unit.generations for unit in units), default=0)
    joined: list[WorkUnit] = []
    for unit in units:
        last = joined[-1] if joined else unit
        follows = (unit.path, unit.start) == (last.path, last.start + last.rows)
        if follows and last.rows + unit.rows <= most:
            joined[-1] = replace(last, rows=last.rows + unit.rows)
        else:
            joined.append(unit)
    return joined


def drawn_rows(
    count: int,
    config: AnswerConfig,
    plan: Plan,
    storage: Storage,
    template: PromptTemplate,
    tokenizer: Tokenizer,
    longest: int,
    among: Callable[[pa.Table], pa.Table] = lambda table: table,
) -> Iterator[tuple[WorkUnit, pa.Table | JobError]]:
    """Neighbours in a random order, by the configuration's seed, prepared (see `pipeline.rows.rows.prepare`).

    Those of each run that `among` gives, or why it cannot be read. As many rows as `count` says are read together, so
    that what lies in one row group is read once. A file that refuses several is given up.

    Raises StorageRefused, JobStopped as reading does.
    """
    together = max(1, min(count, ROWS_TOGETHER) // RUN_OF_ROWS)
    refusals: Counter[str] = Counter()  # by file
    left = neighbours(plan, config.seed)
    while runs := list(islice(left, together)):
        runs = [run for run in runs if refusals[run.path] < MOST_REFUSALS]
        in_order = sorted(runs, key=lambda run: (run.path, run.start))
        read: dict[WorkUnit, pa.Table | JobError] = {}
        for _, of_file in groupby(in_order, key=lambda run: run.path):
            read |= _read(storage, list(of_file), plan.read_columns)
        for run in runs:
            if refusals[run.path] == MOST_REFUSALS:
                continue
            table = read.pop(run)
            if isinstance(table, pa.Table):
                try:
                    table = prepare(among(table), plan.kept, config.text_column, template, tokenizer, longest)
                except pa.ArrowException as error:
                    table = JobError(f"rows of {run.path!r} cannot be read ({one_line(error)}): take them out")
            refusals[run.path] += isinstance(table, JobError)
            yield run, table


def _read(storage: Storage, runs: Sequence[WorkUnit], columns: Sequence[str]) -> dict[WorkUnit, pa.Table | JobError]:
    """Runs of rows of one file, by increasing start; what keeps one of them from being read leaves the others."""
    found: dict[WorkUnit, pa.Table | JobError] = {}
    while left := runs[len(found) :]:
        try:
            for run, table in read_units(storage, left, columns):
                found[run] = taken(table, range(run.rows))  # a copy: slices would keep all that lies around them
        except StorageRefused:
            raise
        except JobError as error:
            found[runs[len(found)]] = error
    return found


def sample_prompts(
    config: CorpusConfig, part: Part, count: int, tokenizer: Tokenizer, longest: int, keep_columns: Sequence[str] = ()
) -> pa.Table:
    """Prepared rows of a part, drawn at random by the configuration's seed, none with an error.

    The part goes by rows' ids, or where no id column is named, or a file or row lacks it, by their texts. Fewer than
    `count` are returned where it has no more; a larger count only adds to them. `longest` is in tokens.

    Raises JobError if the input does not fit the configuration, or no row of the part makes a prompt; ModelError for a
    model that no prompt of the configuration can be rendered for.
    """
    template = config.template()
    template.shared_prefix(tokenizer)  # which raises that before all rows are read for nothing
    shared = set(JobConfig.model_fields) & set(CorpusConfig.model_fields) - {"device"}  # a plan needs none
    planned = JobConfig(**config.model_dump(include=shared), output="", keep_columns=list(keep_columns))
    plan = make_plan(planned, template, for_draws=True)
    plan.warn_of_unreadable()

    def of_part(table: pa.Table) -> pa.Table:
        if part == "all":
            return table
        keys = names(table[config.text_column])
        if config.id_column in table.column_names:  # some files of a corpus may lack it, some rows have none
            keys = names(table[config.id_column], keys)
        return chosen(table, [part_of(key) == part for key in keys])

    tables: list[pa.Table] = []
    rows = bad = 0
    why: str | None = None  # the first of them
    source = planned.input_storage()
    for _, prepared in drawn_rows(count, config, plan, source, template, tokenizer, longest, of_part):
        if isinstance(prepared, JobError):
            raise prepared
        good = chosen(prepared, prepared[ERROR].is_null().to_pylist())
        tables.append(good)
        rows += good.num_rows
        bad += prepared.num_rows - good.num_rows
        if why is None and prepared.num_rows > good.num_rows:
            why = prepared[ERROR].drop_null()[0].as_py()
        if rows >= count:
            break
    which = "all rows" if part == "all" else f"the {part} part (by a hash of each row's {config.parted_by})"
    if not rows:
        if why is not None:
            raise JobError(
                f"{bad} of {bad} rows make no prompt ({which} of {config.input!r}); the first one's error: {why}"
            )
        where = "" if part == "all" else f" in {which}"
        way_out = "or another part (--part)" if part == config.part else "or do without what is made from these"
        raise JobError(f"{config.input!r} has no row{where}: give a larger input, {way_out}")
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
