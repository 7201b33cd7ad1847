"""Columns of every Arrow type through a whole job and what follows: report, data set, inspection, the next night."""

import io
from datetime import datetime
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from arrow_values import COLUMNS, ROWS
from engine_double import EchoBackend, NoEngineBackend
from fixture_types import Job, ReadOutput, WriteParquet

from pipeline.dataset.config import DatasetConfig
from pipeline.dataset.generate import generate_dataset
from pipeline.inspection import inspect, verify
from pipeline.run import run_job
from pipeline.storage.storage import Storage
from pipeline.values.row_groups import read_parquet
from pipeline.values.show import shown

TABLE = pa.table({"text": [f"text {row}" for row in range(ROWS)], **COLUMNS})


@pytest.fixture
def source(tmp_path: Path, write_parquet: WriteParquet) -> Path:
    """A file with a column of every type."""
    return write_parquet(tmp_path / "in/a.parquet", TABLE, [3, 1])


def assert_same(found: pa.Table, wanted: pa.Table = TABLE) -> None:
    """Every column bit for bit, but for broken text, which is readable now."""
    for name in COLUMNS:
        ours, theirs = found[name], wanted[name]
        assert ours.type == theirs.type, name
        assert [shown(value) for value in ours] == [shown(value) for value in theirs], name
        if "\ufffd" not in shown(theirs):
            assert ours.combine_chunks().equals(theirs.combine_chunks()), name
        ours.validate(full=True)


@pytest.mark.usefixtures("inline", "source")
def test_all_types_at_once_pass_through_a_job_its_inspection_and_the_next_night(
    job: Job, read_output: ReadOutput, write_parquet: WriteParquet, tmp_path: Path
) -> None:
    config = job(incremental=True, rows_per_unit=2)
    result = run_job(config, EchoBackend())
    assert (result.totals.rows, result.totals.errors) == (ROWS, 0)
    assert_same(read_output(config.output))
    assert verify(Storage(config.output), inspect(Storage(config.output))) == []
    run_job(config, NoEngineBackend())
    write_parquet(tmp_path / "in/b.parquet", TABLE)
    assert run_job(config, EchoBackend()).totals.rows == 2 * ROWS
    assert_same(read_output(config.output), pa.concat_tables([TABLE, TABLE]))


@pytest.mark.usefixtures("inline", "source")
def test_all_types_at_once_are_published_as_a_data_set_of_several_shards(job: Job, tmp_path: Path) -> None:
    options = job().model_dump(exclude_unset=True) | {"output": str(tmp_path / "set"), "rows_per_shard": 2}
    result = generate_dataset(DatasetConfig(**options), EchoBackend())
    assert result.kept == ROWS
    shards = [pq.read_table(tmp_path / "set" / name) for name in result.files]
    assert [shard.num_rows for shard in shards] == [2, 2]
    assert_same(pa.concat_tables(shards))


@pytest.mark.usefixtures("inline")
def test_columns_that_hold_less_than_several_files_together_are_widened(job: Job, tmp_path: Path) -> None:
    """Categories numbered in 8 bits, two row groups of which have more; fields that may not be null, in one file."""
    (tmp_path / "in").mkdir()
    small = pa.dictionary(pa.int8(), pa.string())
    meta = pa.struct([pa.field("id", pa.int64(), nullable=False), pa.field("kind", small)])
    kinds = [[f"kind {group} {row}" for row in range(100)] for group in range(2)]
    with pq.ParquetWriter(
        tmp_path / "in/a.parquet", pa.schema([("text", "string"), ("kind", small), ("meta", meta)])
    ) as file:
        for group in kinds:
            coded = pa.array(group).dictionary_encode().cast(small)
            numbered = pa.StructArray.from_arrays([pa.array(range(100)), coded], fields=list(meta))
            file.write_table(pa.table({"text": group, "kind": coded, "meta": numbered}, file.schema))
    pq.write_table(pa.table({"text": ["later"]}), tmp_path / "in/b.parquet")
    options = job(rows_per_unit=256).model_dump(exclude_unset=True) | {"output": str(tmp_path / "set")}
    result = generate_dataset(DatasetConfig(**options), EchoBackend())
    rows = pa.concat_tables([pq.read_table(tmp_path / "set" / name) for name in result.files]).to_pylist()
    wanted = [(kind, {"id": number, "kind": kind}) for group in kinds for number, kind in enumerate(group)]
    assert [(row["kind"], row["meta"]) for row in rows] == [*wanted, (None, None)]


def test_dates_that_nanoseconds_cannot_count_stay_what_they_are() -> None:
    days = pa.array([datetime(9999, 12, 31), datetime(1, 1, 1), datetime(2026, 2, 28, 1, 2, 3, 4)], pa.timestamp("us"))
    sink = io.BytesIO()
    pq.write_table(pa.table({"day": days}), sink, use_deprecated_int96_timestamps=True)
    assert read_parquet(sink)["day"].combine_chunks().equals(days)


@pytest.mark.parametrize("name", COLUMNS)
@pytest.mark.usefixtures("inline", "source")
def test_a_column_of_any_type_names_the_rows_of_a_report_and_fills_prompts(job: Job, name: str) -> None:
    config = job(id_column=name, prompt=f"{{{name}}}: {{text}}", rows_per_unit=3)
    result = run_job(config, EchoBackend())
    broken = ["\ufffd" in shown(value) for value in COLUMNS[name]]
    assert (result.totals.rows, result.totals.errors) == (ROWS, sum(broken))
    html = Path(result.report).read_text()
    assert f"<th>{name}</th>" in html
    assert html.count("<td>null</td>") >= 1
    assert "is not valid UTF-8" in html or not any(broken)
