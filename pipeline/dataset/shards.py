"""Rows as Parquet shards: each written whole under its number, so that writing again replaces the same objects."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
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


def write_shards(storage: Storage, tables: Iterable[pa.Table], rows_per_shard: int) -> list[Shard]:
    """Write the rows of one or more tables, and remove shards of an earlier, longer data set.

    Raises StorageGone, StorageRefused.
    """
    shards = []
    for number, table in enumerate(_cut(tables, rows_per_shard)):
        content, name = to_parquet(table), f"{FOLDER}/{SPLIT}-{number:05d}.parquet"
        storage.write(name, content)
        shards.append(Shard(name, table.num_rows, len(content), checksum(content)))
    written = {shard.file for shard in shards}
    remove(storage, Kind.DATA_SET, [name for name in own(Kind.DATA_SET, storage.names(FOLDER)) if name not in written])
    return shards


def _cut(tables: Iterable[pa.Table], rows: int) -> Iterator[pa.Table]:
    """The same rows in tables of so many, the last of less; at least one: an empty data set has a schema too."""
    parts: list[pa.Table] = []
    held, is_cut = 0, False
    for table in tables:
        while held + table.num_rows >= rows:
            yield pa.concat_tables([*parts, table.slice(0, rows - held)])
            table, parts, held, is_cut = table.slice(rows - held), [], 0, True
        parts.append(table)
        held += table.num_rows
    if held or not is_cut:
        yield pa.concat_tables(parts)
