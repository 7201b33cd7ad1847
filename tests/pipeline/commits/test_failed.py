"""What failed is told in rows of the output, whichever version recorded it."""

import json

from pipeline.commits.failed import FailedUnit, failed_rows, read_failures, record_failure
from pipeline.rows.unit import WorkUnit
from pipeline.storage.storage import Storage

UNIT = WorkUnit("00000-000000002", "in/a.parquet", 2, 3, samples=4)


def test_rows_that_failed_are_counted_with_all_their_samples(storage: Storage) -> None:
    failed = record_failure(storage, UNIT, 3, "no")
    assert read_failures(storage) == [failed]
    assert (failed.start, failed.rows, failed.generations) == (2, 3, 12)
    file = FailedUnit("00001-000000000", "in/b.parquet", 0, 0, 1, "read: no")
    assert failed_rows([failed, file]) == "12 rows in 1 unit and 1 whole file"


def test_a_record_of_an_earlier_version_counts_one_sample_of_each_row(storage: Storage) -> None:
    record_failure(storage, UNIT, 3, "no")
    name = f"_failed/{UNIT.id}.json"
    record = json.loads(storage.read(name) or b"")
    del record["samples"]
    storage.write(name, json.dumps(record).encode())
    assert failed_rows(read_failures(storage)) == "3 rows in 1 unit"
