"""Rows as Parquet shards: each written whole under its number, so that writing again replaces the same objects."""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa

from pipeline.commits.commit import checksum
from pipeline.storage.ownership import Kind, own, remove
from pipeline.storage.storage import Storage
from pipeline.values.row_groups import to_parquet

FOLDER, SPLIT = "data", "train"


@dataclass(frozen=True, slots=True)
class Shard:
    file: str  # below the data set's directory
    rows: int
    size: int  # in bytes
    checksum: str


class ShardWriter:
    """Cuts a stream of tables into shards. Use `add` for each table and `close` at the end."""

    def __init__(self, storage: Storage, schema: pa.Schema, rows_per_shard: int) -> None:
        self.shards: list[Shard] = []
        self._storage = storage
        self.schema = schema
        self._rows_per_shard = rows_per_shard
        self._parts: list[pa.Table] = []
        self._rows = 0

    def add(self, table: pa.Table) -> None:
        """Raises StorageGone, StorageRefused."""
        start = 0
        while start < table.num_rows:
            part = table.slice(start, self._rows_per_shard - self._rows)
            self._parts.append(part)
            self._rows += part.num_rows
            start += part.num_rows
            if self._rows == self._rows_per_shard:
                self._flush()

    def close(self) -> list[Shard]:
        """The shards, at least one: an empty data set has a schema too. Removes shards of an earlier, longer one."""
        if self._rows or not self.shards:
            self._flush()
        written = {shard.file for shard in self.shards}
        stale = [name for name in own(Kind.DATA_SET, self._storage.names(FOLDER)) if name not in written]
        remove(self._storage, Kind.DATA_SET, stale)
        return self.shards

    def _flush(self) -> None:
        table = pa.concat_tables([self.schema.empty_table(), *self._parts])
        content = to_parquet(table)
        name = f"{FOLDER}/{SPLIT}-{len(self.shards):05d}.parquet"
        self._storage.write(name, content)
        self.shards.append(Shard(name, table.num_rows, len(content), checksum(content)))
        self._parts, self._rows = [], 0
