"""The parts of a corpus do not overlap, and do not depend on the file they come in."""

from __future__ import annotations

from collections import Counter

import pyarrow as pa

from jobs.corpus_split import part_of, rows_of_part

IDS = [f"package-{number}" for number in range(4000)]
TABLE = pa.table({"id": IDS, "text": [f"text of {row_id}" for row_id in IDS]})


def test_an_eighth_each_is_for_calibration_and_test() -> None:
    parts = Counter(map(part_of, IDS))
    assert 420 < parts["calibrate"] < 580
    assert 420 < parts["test"] < 580


def test_the_parts_are_those_of_earlier_runs() -> None:
    """Figures of different runs are compared: the split must never move."""
    known = {"openssl": "train", "bubblewrap": "train", "apt-utils": "test", "catdoc": "calibrate"}
    assert {row_id: part_of(row_id) for row_id in known} == known


def test_parts_do_not_overlap_and_make_up_the_table() -> None:
    parts = pa.concat_tables(rows_of_part(TABLE, "id", part) for part in ("calibrate", "train", "test"))
    assert sorted(parts["id"].to_pylist()) == sorted(IDS)


def test_the_order_of_the_file_does_not_matter_and_more_rows_only_add() -> None:
    few = rows_of_part(TABLE, "id", "test", count=50, seed=1)
    backwards = TABLE.take(list(range(len(IDS)))[::-1])
    assert rows_of_part(backwards, "id", "test", count=50, seed=1) == few
    more = rows_of_part(TABLE, "id", "test", count=80, seed=1)
    assert more.slice(0, 50) == few
    assert rows_of_part(TABLE, "id", "test", count=50, seed=2) != few
