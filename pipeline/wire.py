"""How a work unit travels between the stages: as one row, its table as Arrow bytes in one cell.

Ray Data may split or merge blocks of rows as it likes; a unit stays whole.
"""

from __future__ import annotations

import pyarrow as pa

SPAN, UNIT, TABLE, COST, COMMIT = "span", "unit", "table", "cost", "commit"  # column names between the stages


def to_bytes(table: pa.Table) -> bytes:
    """A table as an Arrow IPC stream."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    content: bytes = sink.getvalue().to_pybytes()
    return content


def from_bytes(content: bytes) -> pa.Table:
    """Inverse of `to_bytes`."""
    with pa.ipc.open_stream(content) as reader:
        return reader.read_all()
