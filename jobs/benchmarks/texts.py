"""The texts that a benchmark reads, and its prompts of them: each row counts, so none may be bad."""

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from engine import Tokenizer
from pipeline.errors import JobError, one_line
from pipeline.rows.template import PromptTemplate, RowError


def read_columns(files: Sequence[Path | str], columns: Sequence[str]) -> pa.Table:
    """Of all files, one after the other. Raises JobError for one that cannot be read, or lacks a column."""
    tables = []
    for file in files:
        try:
            if absent := set(columns) - set(pq.read_schema(file).names):
                raise JobError(f"input {str(file)!r} has no column {min(absent)!r}: name another by its option")
            tables.append(pq.read_table(file, columns=[*columns]))
        except (OSError, pa.ArrowException) as error:
            raise JobError(f"input {str(file)!r} cannot be read ({one_line(error)}): name a Parquet file") from error
    try:
        return pa.concat_tables(tables)
    except pa.ArrowException as error:
        raise JobError(f"the input's files do not fit together ({one_line(error)}): name one of them") from error


def encoded(texts: Sequence[object], template: PromptTemplate, tokenizer: Tokenizer, longest: int) -> list[list[int]]:
    """Their prompts' tokens. Raises JobError for a text that none can be made of, and a template of other columns."""
    if others := sorted(template.fields - {"text"}):
        raise JobError(f"the prompt names column {others[0]!r}: a benchmark's prompts are made of {{text}} alone")
    prompts = []
    for row, text in enumerate(texts):
        try:
            prompts.append(template.encode({"text": text}, tokenizer, longest).tokens)
        except RowError as error:
            raise JobError(f"row {row} of the input makes no prompt ({error}): leave it out") from error
    return prompts
