"""Stream the rows of work units out of one Parquet file, decoding each row group once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.errors import JobError, one_line
from pipeline.storage import Storage
from pipeline.unit import WorkUnit

BATCH_ROWS = 1024


def read_units(
    storage: Storage, units: Sequence[WorkUnit], columns: Sequence[str]
) -> Iterator[tuple[WorkUnit, pa.Table]]:
    """Tables of the given units, in order.

    Args:
        storage: the input.
        units: of one file, by increasing start; gaps between them are skipped.
        columns: those to read; columns that the file lacks are left out.

    Raises:
        JobError: the file has become unreadable, or shorter than planned. StorageGone.
    """
    path = units[0].path
    try:
        with storage.open_path(path) as stream:
            file = pq.ParquetFile(stream, pre_buffer=True)  # one request for columns that lie side by side
            wanted = [name for name in columns if name in file.schema_arrow.names]
            yield from _cut(units, _rows_from(file, units[0].start, units[-1].start + units[-1].rows, wanted))
    except (OSError, pa.ArrowException) as error:
        raise JobError(f"input file {path!r} cannot be read ({one_line(error)}): repair it or take it out") from error


def _rows_from(
    file: pq.ParquetFile, start: int, end: int, columns: Sequence[str]
) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Batches that cover rows [start, end), each with the number of its first row."""
    offset = 0
    for group in range(file.num_row_groups):
        rows = file.metadata.row_group(group).num_rows
        if rows and offset < end and offset + rows > start:
            first = offset
            # One row group at a time: a pre-buffering reader holds all that it was asked for.
            for batch in file.iter_batches(BATCH_ROWS, row_groups=[group], columns=list(columns)):
                yield first, batch
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
