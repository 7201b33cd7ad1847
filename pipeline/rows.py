"""Rows between input and output: input table -> prepared table -> output table. All of it Arrow, order kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa

from engine import BatchStats
from pipeline.errors import JobError, one_line
from pipeline.row_generator import RowGenerator
from pipeline.template import PromptTemplate, PromptTokenizer, RowError

TOKENS, TRUNCATED, ERROR = "_prompt", "_truncated", "_error"  # columns of a prepared table, beside the kept ones

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
        ("flops_full_depth", pa.int64()),
        ("mean_active_layers", pa.float32()),
        ("error", pa.string()),
    ]
)


def output_schema(kept: pa.Schema) -> pa.Schema:
    """Kept input columns, then what was generated. Raises JobError on a name taken twice."""
    taken = sorted(set(kept.names) & {*GENERATED.names, TOKENS, TRUNCATED, ERROR})
    if taken:
        raise JobError(f"input column {taken[0]!r} has a name that the job needs: leave it out with keep_columns")
    return pa.schema([*kept, *GENERATED])


def prepare(
    table: pa.Table,
    kept: pa.Schema,
    text_column: str,
    template: PromptTemplate,
    tokenizer: PromptTokenizer,
    longest: int,
) -> pa.Table:
    """Tokenised prompts of a table's rows beside their kept columns.

    A row that no prompt can be made of has null tokens and its error. Columns that this table lacks are null.
    """
    columns = {
        name: _python_values(table[text_column if name == "text" else name])
        for name in template.fields
        if name == "text" or name in table.column_names
    }
    tokens: list[list[int] | None] = []
    truncated: list[bool] = []
    errors: list[str | None] = []
    for index in range(table.num_rows):
        row = {name: values[index] for name, values in columns.items()}
        try:
            for name, value in row.items():
                if isinstance(value, UnicodeDecodeError):
                    byte = value.object[value.start]
                    raise RowError(f"{name} is not valid UTF-8 (byte 0x{byte:02x} at {value.start})")
            prompt = template.encode(row, tokenizer, longest)
        except Exception as error:  # whatever a tokenizer makes of odd text is that row's affair
            tokens.append(None)
            truncated.append(False)
            errors.append(str(error) if isinstance(error, RowError) else f"{type(error).__name__}: {one_line(error)}")
        else:
            tokens.append(prompt.tokens)
            truncated.append(prompt.truncated)
            errors.append(None)
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
) -> pa.Table:
    """Output table of a prepared one: kept columns and generations, rows in the same order.

    Raises DeviceBroken, TooManyRowsFailed; fewer failing rows have their error in the table.
    """
    prompts: list[list[int] | None] = prepared[TOKENS].to_pylist()
    good = [index for index, tokens in enumerate(prompts) if tokens is not None]
    records: list[dict[str, Any]] = [
        {"finish_reason": "error", "prompt_truncated": truncated, "error": error, **_ZEROS}
        for truncated, error in zip(prepared[TRUNCATED].to_pylist(), prepared[ERROR].to_pylist(), strict=True)
    ]
    generations = generator.generate(
        [prompts[index] or [] for index in good], [sample_ids[index] for index in good], on_batch
    )
    for index, generation in zip(good, generations, strict=True):
        if isinstance(generation, str):
            records[index]["error"] = generation
            continue
        records[index].update(
            generation=generation.text,
            finish_reason=generation.finish_reason,
            prompt_tokens=generation.prompt_tokens,
            shared_prefix_tokens=generation.shared_prefix_tokens,
            generated_tokens=generation.generated_tokens,
            flops_prompt=generation.flops_prompt,
            flops_decode=generation.flops_decode,
            flops_full_depth=generation.flops_full_depth,
            mean_active_layers=generation.mean_active_layers,
        )
    return _output(prepared.drop_columns([TOKENS, TRUNCATED, ERROR]), records)


def quarantine(table: pa.Table, kept: pa.Schema, errors: Sequence[str]) -> pa.Table:
    """Output table of rows that nothing but their errors can be said of."""
    records = [{"finish_reason": "error", "prompt_truncated": False, "error": error, **_ZEROS} for error in errors]
    return _output(pa.table({field.name: _kept(table, field) for field in kept}), records)


def _output(kept: pa.Table, records: list[dict[str, Any]]) -> pa.Table:
    generated = pa.Table.from_pylist(records, schema=GENERATED)
    return pa.table([*kept.columns, *generated.columns], schema=output_schema(kept.schema))


_ZEROS = {field.name: 0 for field in GENERATED if pa.types.is_integer(field.type)} | {"mean_active_layers": 0.0}


def _python_values(column: pa.ChunkedArray) -> list[Any]:
    """Values of a column; a string that is not valid UTF-8 comes as its UnicodeDecodeError."""
    column = column.cast(_value_type(column.type))
    if not _is_string(column.type):
        return list(column.to_pylist())
    return [_decoded(value) for value in column.cast(pa.large_binary()).to_pylist()]


def _decoded(value: bytes | None) -> str | UnicodeDecodeError | None:
    try:
        return None if value is None else value.decode()
    except UnicodeDecodeError as error:
        return error


def _kept(table: pa.Table, field: pa.Field) -> pa.ChunkedArray | pa.Array:
    """A column to copy to the output; invalid UTF-8 becomes replacement characters, lest readers fail."""
    if field.name not in table.column_names:
        return pa.nulls(table.num_rows, field.type)
    column, type_ = table[field.name].cast(field.type), _value_type(field.type)
    if _is_string(type_):
        try:
            column.validate(full=True)
        except pa.ArrowInvalid:
            values = column.cast(type_).cast(pa.large_binary()).to_pylist()
            return pa.array([None if v is None else v.decode(errors="replace") for v in values], type_).cast(field.type)
    return column


def _value_type(type_: pa.DataType) -> pa.DataType:
    """The type itself, or that of a dictionary's values."""
    return type_.value_type if pa.types.is_dictionary(type_) else type_


def _is_string(type_: pa.DataType) -> bool:
    return bool(pa.types.is_string(type_) or pa.types.is_large_string(type_) or pa.types.is_string_view(type_))
