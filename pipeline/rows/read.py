"""Stream the rows of work units out of one Parquet file, decoding each row group once."""

import sys
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa

from pipeline.errors import JobError, JobStopped, one_line
from pipeline.rows.unit import WorkUnit
from pipeline.storage.storage import Storage
from pipeline.values.row_groups import BATCH_ROWS, PIECE_BYTES, open_parquet


class Unreadable(JobError):
    """Rows of a file cannot be read, whichever unit asks."""

    def __init__(self, path: str, error: Exception, end: int = sys.maxsize) -> None:
        """`end` is behind the last of these rows: no unit that begins before it can be read."""
        said = one_line(error) if isinstance(error, OSError | pa.ArrowException) else repr(error)
        super().__init__(
            f"input file {path!r} cannot be read ({said}): repair it or take it out, and start a run "
            "that is not incremental anew (--fresh)"
        )
        self.end = end
        self._made_of = path, error, end

    def __reduce__(self) -> tuple[Any, ...]:
        return Unreadable, self._made_of  # not of its message, as other errors are


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
        Unreadable: it has become so, from the first unit on that was not yielded.
        JobError: it has fewer rows than its footer said. StorageGone.
    """
    path, stamp = units[0].path, units[0].stamp
    try:
        with storage.open_path(path, stamp) as stream:
            rows = _rows_from(path, stream, units[0].start, units[-1].start + units[-1].rows, columns)
            for unit, table in _cut(units, rows):
                storage.check_unchanged(path, stamp)
                yield unit, table
    except (JobError, JobStopped):
        raise
    except Exception as error:  # libraries raise much at a damaged file
        raise Unreadable(path, error) from error


def _rows_from(
    path: str, stream: Any, start: int, end: int, columns: Sequence[str]
) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Batches that cover rows [start, end) of a file, each with the number of its first row.

    A damaged page costs all rows behind it in its row group: who wants them would have to decode it.
    """
    whole = open_parquet(stream)
    footer, present = whole.metadata, [name for name in columns if name in whole.schema_arrow.names]
    offset = 0
    for number in range(footer.num_row_groups):
        group = footer.row_group(number)
        if group.num_rows and offset < end and offset + group.num_rows > start:
            first = offset
            spared = group.total_byte_size * (1 - (end - offset) / group.num_rows)
            reader = open_parquet(stream, footer) if spared > PIECE_BYTES else whole
            # One row group at a time: a reader of whole ones holds all that it was asked for.
            try:
                for batch in reader.iter_batches(BATCH_ROWS, row_groups=[number], columns=present):
                    yield first, batch.select(present)  # reading "a" finds "a.b" too
                    first += batch.num_rows
            except (JobError, JobStopped):
                raise
            except Exception as error:
                raise Unreadable(path, error, offset + group.num_rows) from error
        offset += group.num_rows


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
        if not pending:
            return  # damage behind it is none of these units'
    raise JobError(f"input file {pending[0].path!r} has fewer rows than when the job was planned: start it anew")
