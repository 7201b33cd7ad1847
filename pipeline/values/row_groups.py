"""Tables to Parquet and back, in row groups small enough that any reader can read them, however large their values."""

import io
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

GROUP_ROWS = 1 << 20
GROUP_BYTES = 1 << 28  # Arrow reads no list of strings back where a row group has 2 GiB of them
BATCH_ROWS = 1024
PIECE_BYTES = 1 << 23  # read at once of a column, by a reader in pieces


def to_parquet(table: pa.Table) -> bytes:
    """The content of a file that holds the table."""
    sink = io.BytesIO()
    rows = max(1, min(GROUP_ROWS, table.num_rows * GROUP_BYTES // max(1, table.nbytes)))
    pq.write_table(table, sink, compression="zstd", row_group_size=rows)
    return sink.getvalue()


def open_parquet(stream: Any, in_pieces_by: pq.FileMetaData | None = None) -> pq.ParquetFile:
    """A reader that fetches a row group's columns whole, or, given the file's footer, in pieces as far as it is read.

    Raises OSError, pa.ArrowException.
    """
    whole = in_pieces_by is None
    return pq.ParquetFile(
        stream,
        metadata=in_pieces_by,
        pre_buffer=whole,  # one request for columns that lie side by side
        buffer_size=0 if whole else PIECE_BYTES,
        page_checksum_verification=True,
        # Nanoseconds end in the year 2262, and what lies beyond would become another date without a word.
        coerce_int96_timestamp_unit="us",
    )


def read_batches(file: pq.ParquetFile, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """Some columns in order of the rows, a row group after the other. Raises OSError, pa.ArrowException."""
    for group in range(file.num_row_groups):
        # A pre-buffering reader holds all that it was asked for.
        yield from file.iter_batches(BATCH_ROWS, [group], list(columns))


def read_parquet(stream: Any) -> pa.Table:
    """All rows of an open file. Raises OSError, pa.ArrowException."""
    file = open_parquet(stream)
    groups = [file.read_row_group(group) for group in range(file.num_row_groups)]
    return pa.concat_tables(groups) if groups else file.schema_arrow.empty_table()
