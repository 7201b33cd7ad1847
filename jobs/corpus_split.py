"""Which part of a corpus a row belongs to, by its id alone: schedules are fitted on one part and judged on another."""

from __future__ import annotations

import hashlib
from typing import Literal

import pyarrow as pa

from pipeline.values.show import names

Part = Literal["calibrate", "train", "test"]

TEST_SHARE, CALIBRATE_SHARE = 1 / 8, 1 / 8  # of all ids; the rest is for training


def part_of(row_id: str) -> Part:
    """The part of the row with this id: a hash of its text, so that it is the same in every run and every file."""
    place = _place(row_id)
    if place < TEST_SHARE:
        return "test"
    return "calibrate" if place < TEST_SHARE + CALIBRATE_SHARE else "train"


def rows_of_part(table: pa.Table, id_column: str, part: Part, count: int | None = None, seed: int = 0) -> pa.Table:
    """Rows of one part, at most `count` of them, drawn at random by a hash of seed and id.

    Neither the table's order nor its other rows decide which are drawn, and a larger `count` only adds to them.
    """
    ids = names(table[id_column])
    rows = [row for row, row_id in enumerate(ids) if part_of(row_id) == part]
    rows.sort(key=lambda row: _place(f"{seed}\0{ids[row]}"))
    return table.take(pa.array(rows[:count], pa.int64()))


def _place(text: str) -> float:
    """Uniform in [0, 1)."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big") / 2**48
