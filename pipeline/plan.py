"""Plan a job from Parquet footers: which files, which columns, which row ranges are work units."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.config import JobConfig
from pipeline.errors import JobError, one_line
from pipeline.storage import Storage, stamp
from pipeline.template import PromptTemplate
from pipeline.unit import WorkUnit

FOOTER_THREADS = 16
SPAN_ROWS = 8192  # rows one read task covers at least, where a file has them: a row group is decoded only once


@dataclass(frozen=True, slots=True)
class InputFile:
    """What the footer of one input file says."""

    path: str  # for the storage's file system
    identity: str  # changes when the file does
    row_groups: tuple[int, ...]  # rows of each
    schema: pa.Schema

    @property
    def rows(self) -> int:
        return sum(self.row_groups)


@dataclass(frozen=True, slots=True)
class Plan:
    """The files of a job, the columns it reads, and its work units."""

    files: tuple[InputFile, ...]
    read_columns: tuple[str, ...]
    kept: pa.Schema  # columns copied to the output
    units: tuple[WorkUnit, ...]

    @property
    def rows(self) -> int:
        return sum(unit.rows for unit in self.units)

    def spans(self, units: Collection[WorkUnit]) -> Iterator[list[WorkUnit]]:
        """Runs of neighbouring units of one file, each for one read task to stream.

        A run ends at the first row group boundary after SPAN_ROWS rows, so that no row group is decoded by many tasks.
        """
        boundaries = {file.path: _ends(file.row_groups) for file in self.files}
        span: list[WorkUnit] = []
        end = 0
        for unit in units:
            if span and (unit.path != span[0].path or unit.start >= end):
                yield span
                span = []
            if not span:
                wanted = unit.start + SPAN_ROWS
                edges = boundaries[unit.path]
                end = next((edge for edge in edges if edge >= wanted), edges[-1])
            span.append(unit)
        if span:
            yield span


def make_plan(config: JobConfig, template: PromptTemplate) -> Plan:
    """Read the footers and check them against the configuration.

    Raises:
        JobError: no input, an unreadable file, a missing or non-string text column, columns whose types differ.
    """
    files = _read_footers(config.input_storage().at_first())
    types = _column_types(files)
    if config.text_column not in types:
        raise JobError(
            f"the input has no column {config.text_column!r}: name the text column among {', '.join(sorted(types))}"
        )
    for file in files:
        _check_text_column(file, config.text_column)
    template.check_columns(set(types))
    if config.keep_columns is not None:
        keep = list(config.keep_columns)
    else:
        keep = [config.id_column] if config.id_column is not None else list(types)
    if config.id_column is not None and config.id_column not in keep:
        keep.insert(0, config.id_column)
    unknown = [name for name in keep if name not in types]
    if unknown:
        raise JobError(f"the input has no column {unknown[0]!r}: it has {', '.join(sorted(types))}")
    read = dict.fromkeys([*keep, config.text_column, *(template.fields - {"text"})])
    kept = pa.schema([(name, types[name]) for name in keep])
    return Plan(files, tuple(read), kept, tuple(_units(files, config.rows_per_unit, config.limit)))


def _read_footers(storage: Storage) -> tuple[InputFile, ...]:
    paths = _input_paths(storage)
    with ThreadPoolExecutor(FOOTER_THREADS) as pool:
        return tuple(pool.map(lambda path: _read_footer(storage, path), paths))


def _input_paths(storage: Storage) -> list[str]:
    """Parquet files, sorted; those below a name that starts with "_" or "." belong to tools, not to the data."""
    fs, root = storage.fs, storage.root
    try:
        if any(mark in root for mark in "*?["):
            paths = storage.attempt("listing", lambda: fs.glob(root))
        elif storage.attempt("listing", lambda: fs.isfile(root)):
            return [root]
        else:
            found = storage.attempt("listing", lambda: fs.find(root))
            paths = [path for path in found if path.endswith(".parquet")]
    except (OSError, ValueError) as error:
        raise JobError(f"input {storage.url!r} cannot be listed: {error}") from error
    base = root.split("*")[0]
    visible = [path for path in paths if not any(part[:1] in "_." for part in path[len(base) :].split("/") if part)]
    if not visible:
        raise JobError(f"input {storage.url!r} holds no Parquet files: name a .parquet file, its directory or a glob")
    return sorted(visible)


def _read_footer(storage: Storage, path: str) -> InputFile:
    try:
        info = storage.attempt("reading", lambda: storage.fs.info(path))
        with storage.open_path(path) as stream:
            footer = pq.ParquetFile(stream)
            groups = tuple(footer.metadata.row_group(i).num_rows for i in range(footer.num_row_groups))
            schema = footer.schema_arrow
    except (OSError, pa.ArrowException) as error:
        raise JobError(
            f"input file {path!r} cannot be read as Parquet ({one_line(error)}): repair it or take it out"
        ) from error
    return InputFile(path, stamp(info), groups, schema)


def _column_types(files: Sequence[InputFile]) -> dict[str, pa.DataType]:
    """Columns of all files together; a file may lack one, but not have it with another type."""
    types: dict[str, tuple[pa.DataType, str]] = {}
    for file in files:
        for field in file.schema:
            known, where = types.setdefault(field.name, (field.type, file.path))
            # A column that is null throughout is written with type null by many tools.
            if pa.types.is_null(known):
                types[field.name] = (field.type, file.path)
            elif known != field.type and not pa.types.is_null(field.type):
                raise JobError(
                    f"column {field.name!r} is {known} in {where!r} but {field.type} in {file.path!r}: "
                    "make the types agree, or process the files apart"
                )
    return {name: type_ for name, (type_, _) in types.items()}


def _check_text_column(file: InputFile, column: str) -> None:
    if column not in file.schema.names:
        raise JobError(f"input file {file.path!r} has no column {column!r}: it has {', '.join(file.schema.names)}")
    type_: Any = file.schema.field(column).type
    values = type_.value_type if pa.types.is_dictionary(type_) else type_
    tests = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view, pa.types.is_null)
    if not any(test(values) for test in tests):
        raise JobError(f"column {column!r} of {file.path!r} is {type_}, not string: name a text column, or cast it")


def _units(files: Sequence[InputFile], rows_per_unit: int, limit: int | None) -> Iterator[WorkUnit]:
    left = sum(file.rows for file in files) if limit is None else limit
    for number, file in enumerate(files):
        for start in range(0, min(file.rows, left), rows_per_unit):
            rows = min(rows_per_unit, min(file.rows, left) - start)
            yield WorkUnit(f"{number:05d}-{start:09d}", file.path, start, rows)
        left -= min(file.rows, left)


def _ends(row_groups: Sequence[int]) -> list[int]:
    ends, total = [], 0
    for rows in row_groups:
        total += rows
        ends.append(total)
    return ends
