"""Stream the rows of work units out of one Parquet file, decoding each row group once."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.errors import JobError, JobStopped, one_line
from pipeline.rows.unit import WorkUnit
from pipeline.storage.storage import Storage
from pipeline.values.row_groups import BATCH_ROWS, open_parquet


@contextmanager
def open_input(storage: Storage, path: str, stamp: str | None) -> Iterator[pq.ParquetFile]:
    """A file whose content is what `stamp` stands for, None for any. Raises ObjectChanged, and what pyarrow does."""
    with storage.open_path(path, stamp) as stream:
        yield open_parquet(stream)


def read_units(
    storage: Storage, units: Sequence[WorkUnit], columns: Sequence[str]
) -> Iterator[tuple[WorkUnit, pa.Table]]:
    """Tables of the given units, in order; each is of the file as it was when the units were planned.

    Args:
        storage: the input.
        units: of one file, by increasing start; gaps between them are skipped.
        columns: those to read; columns that the file lacks are left out.

    Raises:
        ObjectChanged: the file has changed since.
        JobError: it has become unreadable, or has fewer rows than its footer said. StorageGone.
    """
    path, stamp = units[0].path, units[0].stamp
    try:
        with open_input(storage, path, stamp) as file:
            wanted = [name for name in columns if name in file.schema_arrow.names]
            rows = _rows_from(file, units[0].start, units[-1].start + units[-1].rows, wanted)
            for unit, table in _cut(units, rows):
                storage.check_unchanged(path, stamp)
                yield unit, table
    except (JobError, JobStopped):
        raise
    except Exception as error:  # libraries raise much at a damaged file
        said = one_line(error) if isinstance(error, OSError | pa.ArrowException) else repr(error)
        raise JobError(f"input file {path!r} cannot be read ({said}): repair it or take it out") from error


def _rows_from(file: pq.ParquetFile, start: int, end: int, columns: list[str]) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Batches that cover rows [start, end), each with the number of its first row."""
    offset = 0
    for group in range(file.num_row_groups):
        rows = file.metadata.row_group(group).num_rows
        if rows and offset < end and offset + rows > start:
            first = offset
            # One row group at a time: a pre-buffering reader holds all that it was asked for.
            for batch in file.iter_batches(BATCH_ROWS, row_groups=[group], columns=columns):
                yield first, batch.select(columns)  # reading "a" finds "a.b" too
                first += batch.num_rows
        offset += rows


def _cut(
    units: Sequence[WorkUnit], batches: Iterator[tuple[int, pa.RecordBatch]]
) -> Iterator[tuple[WorkUnit, pa.Table]]:
    pending = list(units)
    parts: list[pa.RecordBatch] = []
    for first, batch in batches:
        while pending and pending[0].start < first + batch.num_rows:
            unit = pending[0]
            low = max(unit.start - first, 0)
            parts.append(batch.slice(low, unit.start + unit.rows - first - low))
            if unit.start + unit.rows > first + batch.num_rows:
                break  # it goes on in the next batch
            yield unit, pa.Table.from_batches(parts)
            pending.pop(0)
            parts = []
    if pending:
        raise JobError(f"input file {pending[0].path!r} has fewer rows than when the job was planned: start it anew")
