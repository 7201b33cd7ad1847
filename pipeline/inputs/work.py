"""Plan a job from Parquet footers: which files, which columns, which row ranges are work units."""

import hashlib
import logging
import math
import stat
import time
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import accumulate, islice
from typing import Any, Self

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.config import JobConfig
from pipeline.errors import JobError, JobStopped, one_line
from pipeline.inputs.input_files import ENDINGS, find_input_files
from pipeline.inputs.known_files import KnownFile, name_versions
from pipeline.redaction import redacted
from pipeline.rows.template import PromptTemplate
from pipeline.rows.unit import WorkUnit, rows_of_whole_unit
from pipeline.storage.storage import Storage
from pipeline.storage.stores import is_of_content, stamp
from pipeline.values.column_types import common_type, holds_text, is_text, open_type
from pipeline.values.row_groups import open_parquet

log = logging.getLogger(__name__)

FOOTER_THREADS = 16
SAY_EVERY_S = 10.0  # how many footers are read
LARGE_FILE = 1 << 30  # bytes, that take a while to read
MOST_UNITS = 500_000  # whose commits a manifest can list within what is read back
MOST_ROWS_PER_BYTE = 8  # of a file, before its count of them is checked
HASHED_BYTES = 1 << 24  # of a file at a time
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
    problem: str = ""  # why it can't be processed, a sentence; then it has no rows
    misfit: bool = False  # that its columns do not fit is the problem
    taken_out: bool = False  # of the input, before any row of it was done: it keeps its place in the plan

    @property
    def rows(self) -> int:
        return sum(self.row_groups)

    @property
    def content(self) -> str | None:
        """Alike for files of the same content, as far as the file system lets one tell; None if nothing is known."""
        if self.problem:
            return None
        return self.checksum or (self.identity if is_of_content(self.identity) else f"{self.name}\0{self.identity}")


@dataclass(frozen=True, slots=True)
class Plan:
    """The files of a job, the columns it reads, and its work units."""

    files: tuple[InputFile, ...]
    read_columns: tuple[str, ...]
    kept: pa.Schema  # columns copied to the output
    units: tuple[WorkUnit, ...]

    @property
    def unreadable(self) -> tuple[tuple[WorkUnit, str], ...]:
        """The first unit of each file that can't be processed, as if it had no rows, and why it can't be."""
        return tuple((_unit(place, file, 0, 0), file.problem) for place, file in enumerate(self.files) if file.problem)

    @property
    def taken_out(self) -> list[str]:
        """Names of files that left the input before any row of them was done."""
        return [file.name for file in self.files if file.taken_out]

    def warn_of_unreadable(self) -> None:
        for _, problem in self.unreadable:
            log.warning("%s; all other files are processed", problem)

    @property
    def rows(self) -> int:
        """Of the output: one for each sample."""
        return sum(unit.generations for unit in self.units)

    @property
    def input_rows(self) -> int:
        """Rows that its units are of, however many samples each has."""
        return sum(unit.rows for unit in self.units)

    @property
    def all_done(self) -> str:
        """That no file has anything left to do, in words."""
        unreadable = sum(bool(file.problem) for file in self.files)
        done = f"all {len(self.files) - unreadable} files {'that can be read ' if unreadable else ''}are done"
        return f"{done}, {unreadable} cannot be read" if unreadable else done

    def without(self, done: Container[str]) -> Self:
        """The same plan, less the units of these ids."""
        return replace(self, units=tuple(unit for unit in self.units if unit.id not in done))

    def excusing(self, is_done: Callable[[InputFile], bool]) -> Self:
        """The same plan, where it is no problem of a file that is done that it can't be read any more."""
        files = (replace(file, problem="") if file.problem and is_done(file) else file for file in self.files)
        return replace(self, files=tuple(files))

    def with_done(self, rows: Mapping[str, int | None], done: Container[str], config: JobConfig) -> Self:
        """The same plan, where files that can't be read any more, but of which all units are done, are as they were,
        and those that never could be read and were taken out keep their places, by which units are named.

        `rows` are those of each file when it could be read, by name, of all that the run began with, in their order;
        `done` are ids of units.
        """
        there = {file.name: file for file in self.files}
        taken_out = [InputFile(name, "", (), pa.schema([]), name, taken_out=True) for name in rows if name not in there]
        there |= {file.name: file for file in taken_out}
        begun = tuple(there[name] for name in rows)
        whole = tuple(
            replace(file, problem="", row_groups=(count,))
            if file.problem and not file.misfit and (count := rows[file.name]) is not None
            else file
            for file in begun
        )
        if whole == self.files:
            return self
        units = tuple(_units(whole, config.rows_per_unit, config.limit, config.sampling().samples_per_prompt))
        undone = {unit.path for unit in units if unit.id not in done}
        files = tuple(was if was.path in undone else now for was, now in zip(begun, whole, strict=True))
        unreadable = {file.path for file in files if file.problem}
        return replace(self, files=files, units=tuple(unit for unit in units if unit.path not in unreadable))

    def spans(
        self, units: Collection[WorkUnit], longest: Callable[[str], int] = lambda _: MOST_UNITS
    ) -> Iterator[list[WorkUnit]]:
        """Runs of neighbouring units of one file, each for one read task to stream.

        A run ends at the first row group boundary after SPAN_ROWS rows, so that no row group is decoded by many tasks;
        or earlier, if a unit has to be in a run of so many units at the most, told its id.
        """
        boundaries = {file.path: list(accumulate(file.row_groups)) for file in self.files}
        span: list[WorkUnit] = []
        end, most = 0, MOST_UNITS
        for unit in units:
            most = min(most, longest(unit.id))
            if span and (unit.path != span[0].path or unit.start >= end or len(span) >= most):
                yield span
                span, most = [], longest(unit.id)
            if not span:
                wanted = unit.start + SPAN_ROWS
                edges = boundaries[unit.path]
                end = next((edge for edge in edges if edge >= wanted), edges[-1])
            span.append(unit)
        if span:
            yield span


def make_plan(
    config: JobConfig,
    template: PromptTemplate,
    known: Mapping[str, KnownFile] | None = None,
    begun: pa.Schema | None = None,
    for_draws: bool = False,
) -> Plan:
    """Read the footers and check them against the configuration.

    A file that cannot be read, or whose columns do not fit, is part of the plan with its problem and without rows.
    `known` are the files that an incremental run has met before, None for any other run; `begun` are the columns that
    the run has kept so far: it has them whatever files are there. A plan for draws alone has larger units where there
    would be too many.

    Raises JobError: no input, none that can be read, columns that no file has, whose types differ, more units than a
    manifest lists; StorageGone.
    """
    files = _read_footers(config.input_storage().at_first(), known)
    if config.text_column not in _columns(files):
        there = ", ".join(sorted(_columns(files)))
        raise JobError(f"the input has no column {config.text_column!r}: name the text column among {there}")
    needed = {config.text_column, config.id_column, *(config.keep_columns or []), *(template.fields - {"text"})}
    everything = config.keep_columns is None and config.id_column is None  # of the columns is kept
    files = tuple(_checked(file, config.text_column, None if everything else needed) for file in files)
    _check_some_readable(files)
    begun = pa.schema([]) if begun is None else begun
    columns = list(dict.fromkeys([*begun.names, *_columns(files)]))
    template.check_columns(set(columns))
    keep = columns if everything else _named_columns(config, columns)
    met = {version for file in (known or {}).values() for version in file.versions}  # an earlier run has warned of
    _warn_of_empty(
        [file for file in files if not file.problem and file.version not in met],
        filter(None, [*(template.fields - {"text"}), config.id_column]),
    )
    read = dict.fromkeys([*keep, config.text_column, *(template.fields - {"text"})])
    into_prompts = {config.text_column, *template.fields}
    without = dict.fromkeys(read, "" if for_draws else ", or leave the column out with keep_columns")
    without |= {config.id_column: ", or leave --id-column out"} | dict.fromkeys(into_prompts, "")
    types = {name: _column_type(files, name, begun, without[name]) for name in read}
    kept = pa.schema([(name, types[name]) for name in keep])
    files = _within_limit(files, config.limit)
    rows_per_unit = config.rows_per_unit
    if for_draws:  # each file's last unit may be a small one
        most = max(1, MOST_UNITS - len(files))
        rows_per_unit = max(rows_per_unit, math.ceil(sum(file.rows for file in files) / most))
    samples = config.sampling().samples_per_prompt
    units = tuple(islice(_units(files, rows_per_unit, config.limit, samples), MOST_UNITS + 1))
    if len(units) > MOST_UNITS:
        raise JobError(
            f"the input makes more than {MOST_UNITS:,} work units of {rows_per_unit} rows, the most that a manifest "
            f"lists: raise rows_per_unit{', with an output of its own' if config.incremental else ''}"
        )
    return Plan(files, tuple(read), kept, units)


def _named_columns(config: JobConfig, columns: Sequence[str]) -> list[str]:
    """Those that the output is to have of these of the input. Raises JobError for one that is not among them."""
    keep = list(dict.fromkeys(config.keep_columns or []))
    if config.id_column is not None and config.id_column not in keep:
        keep.insert(0, config.id_column)
    unknown = [name for name in keep if name not in columns]
    if unknown:
        option = "id_column" if unknown[0] == config.id_column else "keep_columns"
        raise JobError(
            f"the input has no column {unknown[0]!r}, which {option} names: it has {', '.join(sorted(columns))}"
        )
    return keep


def _warn_of_empty(files: Sequence[InputFile], names: Iterable[str]) -> None:
    """Say which of these columns some files lack."""
    for name in dict.fromkeys(names):
        if lacking := [redacted(file.path) for file in files if name not in file.schema.names]:
            log.warning(
                "%d input files, such as %r, have no column %r: it is empty there", len(lacking), lacking[0], name
            )


def input_columns(storage: Storage) -> dict[str, pa.DataType]:
    """The columns of all files of an input, each as the last one has it.

    Raises JobError: no input, none that can be read; StorageGone.
    """
    return {field.name: field.type for file in _read_footers(storage.at_first(), None) for field in file.schema}


def _read_footers(storage: Storage, known: Mapping[str, KnownFile] | None) -> tuple[InputFile, ...]:
    paths = find_input_files(storage)
    found: list[InputFile] = []
    schemas: dict[pa.Schema, pa.Schema] = {}
    said = time.monotonic()
    with ThreadPoolExecutor(FOOTER_THREADS) as pool:
        for file in pool.map(lambda path: _read_footer(storage, path, known, schemas), paths):
            found.append(file)
            if time.monotonic() - said >= SAY_EVERY_S:
                said = time.monotonic()
                log.info("looked into %d of %d input files", len(found), len(paths))
    files = tuple(found)
    _check_some_readable(files)
    by_name: dict[str, str] = {}
    for file in files:
        if (other := by_name.setdefault(file.name, file.path)) != file.path:
            raise JobError(
                f"input files {redacted(other)!r} and {redacted(file.path)!r} are one and the same to all records of a "
                f"run, {file.name!r}: rename one of them"
            )
    if known is None:
        return files
    versions = name_versions({file.name: file.content for file in files}, known)
    return tuple(replace(file, version=versions[file.name]) for file in files)


def _read_footer(
    storage: Storage, path: str, known: Mapping[str, KnownFile] | None, schemas: dict[pa.Schema, pa.Schema]
) -> InputFile:
    """`schemas` are those met so far, which files share: 100,000 with one each would take a gigabyte."""
    name, checksum, identity = redacted(storage.relative(path)), None, ""
    try:
        info = storage.info(path)
        identity = stamp(info)
        if info["type"] not in ("file", "other") or (storage.is_local and not stat.S_ISREG(info["mode"])):
            raise OSError(f"it is no file but a {info['type'].replace('other', 'device, pipe or socket')}")
        with storage.open_path(path, identity) as stream:
            footer = open_parquet(stream)
            groups, schema = _row_groups(footer, info["size"]), footer.schema_arrow.remove_metadata()
            schema = schemas.setdefault(schema, schema)
        if known is not None:
            checksum = _checksum(storage, path, info, known.get(name))
    except JobStopped:
        raise
    except Exception as error:  # libraries raise much at a damaged footer
        said = one_line(error) if isinstance(error, OSError | pa.ArrowException | JobError) else repr(error)
        way_out = "repair it or take it out"
        if isinstance(error, pa.ArrowInvalid) and not path.lower().endswith(ENDINGS):
            way_out = "only Parquet is read, so convert it, or repair or take it out"
            if path.lower().endswith(".jsonl"):
                way_out += " (generate_dataset.py answers OpenAI batch files with --input-format openai-batch)"
        problem = f"input file {redacted(path)!r} cannot be read as Parquet ({said}): {way_out}"
        return InputFile(path, identity, (), pa.schema([]), name, problem=problem)
    return InputFile(path, identity, groups, schema, name, checksum)


def _row_groups(file: pq.ParquetFile, size: int) -> tuple[int, ...]:
    """Rows of each, of a file of so many bytes. Raises OSError for counts that cannot be, and what pyarrow does.

    It does not ask the footer about columns: where their statistics are damaged, that would end the process.
    """
    footer = file.metadata
    rows = tuple(footer.row_group(group).num_rows for group in range(footer.num_row_groups))
    if min(rows, default=0) < 0 or sum(rows) != footer.num_rows:
        raise OSError(f"its row groups have {sum(rows)} rows, the file {footer.num_rows}")
    for group, claimed in enumerate(rows):
        if claimed > MOST_ROWS_PER_BYTE * size:  # a lie, or a text over and over: more units than there is memory for
            names = file.schema_arrow.names[:1]
            found = sum(batch.num_rows for batch in file.iter_batches(2**16, row_groups=[group], columns=names))
            if found != claimed:
                raise OSError(f"a row group claims {claimed} rows and has {found}")
    return rows


def _checksum(storage: Storage, path: str, info: dict[str, Any], known: KnownFile | None) -> str | None:
    """Of a file's content, where its file system has no ETag for it; reads the file only if its stamp is new."""
    if info.get("ETag"):
        return None
    if known is not None and known.checksum is not None and known.stamp == stamp(info):
        return known.checksum
    if info["size"] >= LARGE_FILE:
        log.info("reading all of %r (%.1f GB), by which it is known again", path, info["size"] / 1e9)
    with storage.open_path(path, stamp(info)) as stream:
        digest = hashlib.sha256()
        while piece := stream.read(HASHED_BYTES):  # each may be a request of its own
            digest.update(piece)
        return digest.hexdigest()


def _columns(files: Sequence[InputFile]) -> list[str]:
    """Names of the columns of all files together."""
    return list(dict.fromkeys(name for file in files for name in file.schema.names))


def _checked(file: InputFile, text_column: str, needed: Container[str | None] | None) -> InputFile:
    """The file itself, or if its columns do not fit the job, with that for its problem and no rows.

    `needed` are the columns that the job reads, None for all.
    """
    if file.problem:
        return file
    names = file.schema.names
    twice = [name for name in names if (needed is None or name in needed) and names.count(name) > 1]
    if text_column not in names:
        problem = f"input file {file.path!r} has no column {text_column!r}: it has {', '.join(names)}"
    elif twice:
        problem = f"input file {file.path!r} has column {twice[0]!r} twice: rename one"
    elif not holds_text(type_ := file.schema.field(text_column).type):
        problem = f"column {text_column!r} of {file.path!r} is {type_}, not string: name a text column, or cast it"
    else:
        return file
    return replace(file, problem=problem, misfit=True, row_groups=(), schema=pa.schema([]))


def _check_some_readable(files: Sequence[InputFile]) -> None:
    """Raises JobError if there is no file that can be processed."""
    problems = [file.problem for file in files if file.problem]
    if len(problems) == len(files):
        others = f" (and {len(files) - 1} more files have problems, no other is left)" if len(files) > 1 else ""
        raise JobError(problems[0] + others)


def _column_type(files: Sequence[InputFile], column: str, begun: pa.Schema, without: str) -> pa.DataType:
    """A column's type in all files together, and in what is done already; a file may lack it, but not have it with a
    type that does not fit. `without` says how the job does without the column, if it can.
    """
    found: pa.DataType | None = begun.field(column).type if column in begun.names else None
    where = ""
    for file in files:
        if column not in file.schema.names:
            continue
        type_ = open_type(file.schema.field(column).type)
        common = type_ if found is None else common_type(found, type_)
        if found is not None and column in begun.names and is_text(found) and is_text(type_):
            common = found  # what is written keeps its type
        if column in begun.names and common != found:
            raise JobError(
                f"column {column!r} is {found} in the output but {type_} in {file.path!r}: make the types agree, name "
                "another output, or discard the run that is there with --fresh"
            )
        if common is None:
            raise JobError(
                f"column {column!r} is {found} in {where!r} but {type_} in {file.path!r}: make the types agree, or "
                f"process the files apart{without}"
            )
        if common != found:
            found, where = common, file.path
    return found


def _within_limit(files: Sequence[InputFile], limit: int | None) -> tuple[InputFile, ...]:
    """The files that hold the first rows. Raises JobError if one of them cannot be read: how many has it?"""
    if limit is None:
        return tuple(files)
    taken = []
    for file in files:
        if limit <= 0:
            break
        if file.problem:
            raise JobError(f"{file.problem}; limit counts rows through this file, and cannot without it")
        taken.append(file)
        limit -= file.rows
    return tuple(taken)


def _units(files: Sequence[InputFile], rows_per_unit: int, limit: int | None, samples: int = 1) -> Iterator[WorkUnit]:
    left = sum(file.rows for file in files) if limit is None else limit
    together = rows_of_whole_unit(rows_per_unit, samples)
    for number, file in enumerate(files):
        taken = min(file.rows, left)
        for start in range(0, taken, together):
            yield _unit(number, file, start, min(together, taken - start), samples)
        left -= taken


def _unit(number: int, file: InputFile, start: int, rows: int, samples: int = 1) -> WorkUnit:
    # New files come between old ones: an incremental run names units by the file itself, not by its place.
    return WorkUnit(f"{file.version or f'{number:05d}'}-{start:09d}", file.path, start, rows, samples, file.identity)
