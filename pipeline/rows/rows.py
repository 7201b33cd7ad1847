"""Rows between input and output: input table -> prepared table -> output table. All of it Arrow, order kept."""

from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

import pyarrow as pa

from engine import BatchStats, Generation, Tokenizer
from pipeline.errors import JobError, described
from pipeline.rows.row_generator import RowGenerator
from pipeline.rows.template import PromptTemplate, RowError
from pipeline.values.column_types import holds_text, without_views
from pipeline.values.show import texts
from pipeline.values.utf8 import readable

TOKENS, TRUNCATED, ERROR = "_prompt", "_truncated", "_error"  # columns of a prepared table, beside the kept ones
SAMPLE = "sample"  # column of an output table whose rows have several samples: which one

GENERATED = pa.schema(
    [
        ("generation", pa.string()),
        ("finish_reason", pa.string()),
        ("prompt_tokens", pa.int32()),
        ("prompt_truncated", pa.bool_()),
        ("shared_prefix_tokens", pa.int32()),
        ("generated_tokens", pa.int32()),
        ("flops_prompt", pa.int64()),
        ("flops_decode", pa.int64()),
        ("flops_decode_full_depth", pa.int64()),
        ("flops_full_depth", pa.int64()),
        ("mean_active_layers", pa.float32()),
        ("error", pa.string()),
    ]
)


def output_schema(kept: pa.Schema, reserved: Iterable[str] = ()) -> pa.Schema:
    """Kept input columns, then what was generated. Raises JobError on a name taken twice, or reserved."""
    taken = sorted(set(kept.names) & {*GENERATED.names, TOKENS, TRUNCATED, ERROR, *reserved})
    if taken:
        raise JobError(f"input column {taken[0]!r} has a name that the job needs: leave it out with keep_columns")
    return pa.schema([*kept, *GENERATED])


def prepare(
    table: pa.Table, kept: pa.Schema, text_column: str, template: PromptTemplate, tokenizer: Tokenizer, longest: int
) -> pa.Table:
    """Tokenised prompts of a table's rows beside their kept columns.

    A row that no prompt can be made of has null tokens and its error. Columns that this table lacks are null.
    """
    columns = {name: texts(table[name]) for name in template.fields - {"text"} if name in table.column_names}
    columns["text"] = _text_values(table[text_column])
    doubtful = [name for name, values in columns.items() if any(isinstance(value, Exception) for value in values)]
    tokens: list[list[int] | None] = [None] * table.num_rows
    truncated = [False] * table.num_rows
    errors: list[str | None] = [None] * table.num_rows
    for index in range(table.num_rows):
        row = {name: values[index] for name, values in columns.items()}
        try:
            for name in doubtful:
                _check_text(name, row[name])
            tokens[index], truncated[index] = template.encode(row, tokenizer, longest)
        except Exception as error:  # whatever a tokenizer makes of odd text is that row's affair
            errors[index] = str(error) if isinstance(error, RowError) else described(error)
    prepared = {
        TOKENS: pa.array(tokens, pa.list_(pa.int32())),
        TRUNCATED: pa.array(truncated, pa.bool_()),
        ERROR: pa.array(errors, pa.string()),
    }
    return pa.table({**{field.name: _kept(table, field) for field in kept}, **prepared})


def generate(
    prepared: pa.Table,
    sample_ids: Sequence[str],
    generator: RowGenerator,
    on_batch: Callable[[BatchStats], None] | None = None,
    on_generation: Callable[[int, Generation], None] | None = None,
) -> pa.Table:
    """Output table of a prepared one: kept columns and generations, in the same order, samples of a row side by side.

    `sample_ids` name the prepared rows. `on_generation` is told the place in the output of each good row and all that
    was generated for it: its tokens are in no column.

    Raises DeviceBroken, TooManyRowsFailed; fewer failing rows have their error in the table.
    """
    prompts: list[list[int] | None] = prepared[TOKENS].to_pylist()
    good = {index: tokens for index, tokens in enumerate(prompts) if tokens is not None}
    found = generator.generate(list(good.values()), [sample_ids[index] for index in good], on_batch)
    samples = generator.samples
    sampled = _with_samples(prepared.drop_columns(TOKENS), samples)
    errors: list[str | None] = sampled[ERROR].to_pylist()
    generations: list[Generation | None] = [None] * len(errors)
    places = (samples * index + sample for index in good for sample in range(samples))
    for place, generation in zip(places, found, strict=True):
        if isinstance(generation, str):
            errors[place] = generation
        else:
            generations[place] = generation
            if on_generation is not None:
                on_generation(place, generation)
    kept = sampled.drop_columns([TRUNCATED, ERROR])
    return _output(kept, generations, sampled[TRUNCATED].to_pylist(), errors)


def quarantine(table: pa.Table, kept: pa.Schema, samples: int, error: str) -> pa.Table:
    """Output table of a row that nothing but its error can be said of."""
    # The error is a column that it has for certain: a table of none has no rows.
    row = _with_samples(pa.table({**{field.name: _kept(table, field) for field in kept}, ERROR: [error]}), samples)
    return _output(row.drop_columns(ERROR), [None] * samples, [False] * samples, [error] * samples)


def _with_samples(table: pa.Table, samples: int) -> pa.Table:
    """Each row as often as it has samples, their numbers beside it if there are several."""
    if samples == 1:
        return table
    repeated = taken(table, [row for row in range(table.num_rows) for _ in range(samples)])
    return repeated.append_column(SAMPLE, pa.array([*range(samples)] * table.num_rows, pa.int32()))


def chosen(table: pa.Table, keep: Iterable[bool]) -> pa.Table:
    """The rows of which `keep` says so, whatever their types."""
    return taken(table, [row for row, held in enumerate(keep) if held])


def taken(table: pa.Table, rows: Sequence[int]) -> pa.Table:
    """These rows, some maybe several times, whatever their types."""
    # A slice of views has the bytes of all of them wherever it is written.
    plain = pa.schema([field.with_type(without_views(field.type)) for field in table.schema])
    try:
        return table.cast(plain).take(pa.array(rows, pa.int64())).cast(table.schema)
    except pa.ArrowException:  # of a few types; or one array has no room for so many bytes, which slices share
        return pa.concat_tables([table.slice(0, 0), *(table.slice(row, 1) for row in rows)])


def _output(
    kept: pa.Table, generations: Sequence[Generation | None], truncated: Sequence[bool], errors: Sequence[str | None]
) -> pa.Table:
    """Made by columns: a row at a time takes several times as long."""
    shown = [_NOTHING if generation is None else generation for generation in generations]
    columns: dict[str, Sequence[Any]] = {name: list(map(attrgetter(name), shown)) for name in MEASURED}
    columns |= {"generation": [generation.text for generation in shown], "prompt_truncated": truncated, "error": errors}
    generated = pa.table(columns, schema=GENERATED)
    return pa.table([*kept.columns, *generated.columns], schema=output_schema(kept.schema))


MEASURED = [name for name in GENERATED.names if name not in ("generation", "prompt_truncated", "error")]
_NOTHING: Any = SimpleNamespace(**dict.fromkeys(MEASURED, 0) | {"text": None, "finish_reason": "error"})


def _text_values(column: pa.ChunkedArray) -> list[str | Exception | None]:
    """Texts to read, and none of what only looks like them."""
    if holds_text(column.type):
        return texts(column)
    return [RowError(f"text is {column.type}, not a string") if value.is_valid else None for value in column]


def _check_text(name: str, value: object) -> None:
    """Raises RowError for what `texts` makes of a value that has no text."""
    if isinstance(value, UnicodeDecodeError):
        byte = value.object[value.start]
        raise RowError(f"{name} is not valid UTF-8 (byte 0x{byte:02x} at {value.start})")
    if isinstance(value, RowError):
        raise value
    if isinstance(value, Exception):
        raise RowError(f"{name} has no text ({described(value)})")


def _kept(table: pa.Table, field: pa.Field) -> pa.ChunkedArray | pa.Array:
    """A column to copy to the output, as it is but for invalid UTF-8."""
    if field.name not in table.column_names or pa.types.is_null(table[field.name].type):
        return pa.nulls(table.num_rows, field.type)
    column = table[field.name]
    return readable(column if column.type == field.type else column.cast(field.type))
