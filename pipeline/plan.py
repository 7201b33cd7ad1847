"""Plan a job from Parquet footers: which files, which columns, which row ranges are work units."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Container, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.config import JobConfig
from pipeline.errors import JobError, one_line
from pipeline.input_files import find_input_files
from pipeline.known_files import KnownFile, file_version
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
    name: str = ""  # relative to the input
    checksum: str | None = None  # of the content, in an incremental run where the file system has none
    version: str = ""  # in an incremental run: names its units

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

    def without(self, done: Container[str]) -> Plan:
        """The same plan, less the units of these ids."""
        return replace(self, units=tuple(unit for unit in self.units if unit.id not in done))

    def spans(self, units: Collection[WorkUnit]) -> Iterator[list[WorkUnit]]:
        """Runs of neighbouring units of one file and sample, each for one read task to stream.

        A run ends at the first row group boundary after SPAN_ROWS rows, so that no row group is decoded by many tasks.
        """
        boundaries = {file.path: _ends(file.row_groups) for file in self.files}
        span: list[WorkUnit] = []
        end = 0
        for unit in units:
            other = span and (unit.path, unit.sample) != (span[0].path, span[0].sample)
            if span and (other or unit.start >= end):
                yield span
                span = []
            if not span:
                wanted = unit.start + SPAN_ROWS
                edges = boundaries[unit.path]
                end = next((edge for edge in edges if edge >= wanted), edges[-1])
            span.append(unit)
        if span:
            yield span


def make_plan(config: JobConfig, template: PromptTemplate, known: Mapping[str, KnownFile] | None = None) -> Plan:
    """Read the footers and check them against the configuration.

    Args:
        config: the job.
        template: of its prompts.
        known: the files that an incremental run has met before, None for any other run.

    Raises:
        JobError: no input, an unreadable file, a missing or non-string text column, columns whose types differ.
    """
    files = _read_footers(config.input_storage().at_first(), known)
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
    units = _units(files, config.rows_per_unit, config.limit, config.samples_per_row)
    return Plan(files, tuple(read), kept, tuple(units))


def _read_footers(storage: Storage, known: Mapping[str, KnownFile] | None) -> tuple[InputFile, ...]:
    paths = find_input_files(storage)
    with ThreadPoolExecutor(FOOTER_THREADS) as pool:
        return tuple(pool.map(lambda path: _read_footer(storage, path, known), paths))


def _read_footer(storage: Storage, path: str, known: Mapping[str, KnownFile] | None) -> InputFile:
    name, checksum, version = storage.relative(path), None, ""
    try:
        info = storage.attempt("reading", lambda: storage.fs.info(path))
        with storage.open_path(path) as stream:
            footer = pq.ParquetFile(stream)
            groups = tuple(footer.metadata.row_group(i).num_rows for i in range(footer.num_row_groups))
            schema = footer.schema_arrow
        if known is not None:
            checksum = _checksum(storage, path, info, known.get(name))
            version = file_version(name, checksum or stamp(info))
    except (OSError, pa.ArrowException) as error:
        raise JobError(
            f"input file {path!r} cannot be read as Parquet ({one_line(error)}): repair it or take it out"
        ) from error
    return InputFile(path, stamp(info), groups, schema, name, checksum, version)


def _checksum(storage: Storage, path: str, info: dict[str, Any], known: KnownFile | None) -> str | None:
    """Of a file's content, where its file system has no ETag for it; reads the file only if its stamp is new."""
    if info.get("ETag"):
        return None
    if known is not None and known.checksum is not None and known.stamp == stamp(info):
        return known.checksum
    with storage.open_path(path) as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


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


def _units(files: Sequence[InputFile], rows_per_unit: int, limit: int | None, samples: int = 1) -> Iterator[WorkUnit]:
    left = sum(file.rows for file in files) if limit is None else limit
    for number, file in enumerate(files):
        # New files come between old ones: an incremental run names units by the file itself, not by its place.
        file_name = file.version or f"{number:05d}"
        for sample in range(samples):
            for start in range(0, min(file.rows, left), rows_per_unit):
                rows = min(rows_per_unit, min(file.rows, left) - start)
                name = f"{file_name}-{start:09d}" + (f"-{sample:03d}" if samples > 1 else "")
                yield WorkUnit(name, file.path, start, rows, sample)
        left -= min(file.rows, left)


def _ends(row_groups: Sequence[int]) -> list[int]:
    ends, total = [], 0
    for rows in row_groups:
        total += rows
        ends.append(total)
    return ends
