"""Prompts drawn from a corpus: its parts never meet, whatever the files, and a larger sample only adds to a smaller."""

from collections import Counter
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from engine_double import ByteTokenizer
from fixture_types import WriteParquet

from engine import ModelError, Tokenizer
from pipeline.dataset.config import DatasetConfig
from pipeline.errors import JobError
from pipeline.inputs import work
from pipeline.inputs.sample_prompts import CorpusConfig, Part, neighbours, part_of, sample_prompts
from pipeline.inputs.work import Plan, make_plan
from pipeline.storage.storage import Storage

ROWS = 4000
IDS = [f"package-{number}" for number in range(ROWS)]
TABLE = pa.table({"id": IDS, "text": [f"text of {row_id}" for row_id in IDS]})

Drawn = Callable[..., list[str]]


@pytest.fixture
def drawn(tmp_path: Path, write_parquet: WriteParquet, byte_tokens: ByteTokenizer) -> Drawn:
    """Texts of the prompts drawn from two files."""

    def draw(of: Part, count: int = ROWS, table: pa.Table = TABLE, **options: object) -> list[str]:
        for file in range(2):
            half = table.slice(file * (table.num_rows // 2), table.num_rows // 2)
            write_parquet(
                tmp_path / f"in/{file}.parquet", half, [half.num_rows // 3, half.num_rows - half.num_rows // 3]
            )
        config = CorpusConfig(**{"input": str(tmp_path / "in"), "prompt_format": "raw", "id_column": "id"} | options)
        rows = sample_prompts(config, of, count, byte_tokens, 100, ["text"])
        assert [bytes(tokens).decode() for tokens in rows["_prompt"].to_pylist()] == rows["text"].to_pylist()
        return list(rows["text"].to_pylist())

    return draw


def test_an_eighth_each_is_for_calibration_and_test() -> None:
    parts = Counter(map(part_of, IDS))
    assert 420 < parts["calibrate"] < 580
    assert 420 < parts["test"] < 580


def test_the_parts_are_those_of_earlier_runs() -> None:
    """Figures of different runs are compared: the split must never move."""
    known = {"openssl": "train", "bubblewrap": "train", "apt-utils": "test", "catdoc": "calibrate"}
    assert {row_id: part_of(row_id) for row_id in known} == known


@pytest.mark.parametrize("id_column", ["id", None])
def test_parts_do_not_overlap_and_make_up_the_table(drawn: Drawn, id_column: str | None) -> None:
    parts = [drawn(part, id_column=id_column) for part in ("calibrate", "train", "test")]
    assert sorted(chain(*parts)) == sorted(TABLE["text"].to_pylist()) == sorted(drawn("all", id_column=id_column))


def test_rows_of_the_same_text_are_in_one_part_where_no_id_is_named(drawn: Drawn) -> None:
    texts = [f"text {row % 50}" for row in range(ROWS)]
    table = TABLE.set_column(1, "text", pa.array(texts))
    seen = [set(drawn(part, table=table, id_column=None)) for part in ("calibrate", "train", "test")]
    assert sum(map(len, seen)) == 50
    assert set[str]().union(*seen) == set(texts)


def test_rows_belong_to_their_part_wherever_they_stand(drawn: Drawn) -> None:
    backwards = TABLE.take(list(range(ROWS))[::-1])
    assert sorted(drawn("test", table=backwards)) == sorted(drawn("test"))


def test_a_larger_sample_adds_to_a_smaller_and_another_seed_draws_others(drawn: Drawn) -> None:
    few, more = drawn("test", 50), drawn("test", 80)
    assert (len(few), more[:50]) == (50, few)
    assert drawn("test", 50, seed=1) != few
    assert drawn("all", 50) != TABLE["text"].to_pylist()[:50]


def test_rows_that_cannot_be_read_are_no_reason_to_draw_others(
    tmp_path: Path, write_parquet: WriteParquet, byte_tokens: ByteTokenizer
) -> None:
    """A sample is the same in every process that draws it, or none."""
    write_parquet(tmp_path / "in/0.parquet", {"text": ["near"] * 50, "at": pa.array([1] * 50, pa.timestamp("ns"))})
    far = pa.array([253402300799 * 10**6] * 50, pa.timestamp("us"))  # 9999-12-31, which nanoseconds do not reach
    write_parquet(tmp_path / "in/1.parquet", {"text": ["far"] * 50, "at": far})
    config = CorpusConfig(input=str(tmp_path / "in"), prompt_format="raw")
    with pytest.raises(JobError, match=r"rows of '.*1.parquet' cannot be read \(.*\): take them out"):
        sample_prompts(config, "all", 100, byte_tokens, 100, ["at"])


def test_a_gpu_may_be_named(drawn: Drawn) -> None:
    assert drawn("all", 50, device="cuda:1") == drawn("all", 50)


def test_rows_that_make_no_prompt_are_left_out_and_counted(drawn: Drawn, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "pipeline")
    texts = [None if row % 2 else f"text {row}" for row in range(100)]
    table = pa.table({"id": IDS[:100], "text": pa.array(texts, pa.string())})
    assert len(drawn("all", 60, table=table)) == 50
    assert "50 prompts drawn from all rows of" in caplog.text
    assert "no more than these, 60 were asked for; 50 rows that make no prompt are left out" in caplog.text


def test_a_part_without_rows_is_said(drawn: Drawn) -> None:
    of_train = next(row for row in range(ROWS) if part_of(IDS[row]) == "train")
    none = r"' has no row in the test part \(by a hash of each row's id\): give a larger input, or "
    for asked, way_out in [("test", r"another part \(--part\)"), ("train", "do without what is made from these")]:
        with pytest.raises(JobError, match=none + way_out):
            drawn("test", table=pa.concat_tables([TABLE.slice(of_train, 1)] * 2), part=asked)


def test_rows_none_of_which_makes_a_prompt_say_why(drawn: Drawn) -> None:
    with pytest.raises(
        JobError, match=r"4000 of 4000 rows make no prompt .*; the first one's error: prompt has .* 100"
    ):
        drawn("all", prompt="x" * 100 + "{text}", overlong="reject")


def test_a_model_that_makes_no_prompt_at_all_is_told_before_a_row_is_read(
    tmp_path: Path, write_parquet: WriteParquet, make_checkpoint: Callable[..., Path]
) -> None:
    write_parquet(tmp_path / "in/0.parquet", TABLE.slice(0, 10))
    tokenizer = Tokenizer.load(str(make_checkpoint()))
    with pytest.raises(ModelError, match="no chat template: use raw prompts"):
        sample_prompts(CorpusConfig(input=str(tmp_path / "in")), "all", 5, tokenizer, 100)


def test_rows_of_a_file_without_the_id_column_are_parted_by_their_texts(
    tmp_path: Path, write_parquet: WriteParquet, byte_tokens: ByteTokenizer
) -> None:
    write_parquet(tmp_path / "in/0.parquet", TABLE.slice(0, 2000))
    write_parquet(tmp_path / "in/1.parquet", TABLE.slice(2000).drop_columns(["id"]))
    config = CorpusConfig(input=str(tmp_path / "in"), prompt_format="raw", id_column="id")
    texts = sample_prompts(config, "test", ROWS, byte_tokens, 100, ["text"])["text"].to_pylist()
    keys = [*IDS[:2000], *TABLE["text"].to_pylist()[2000:]]
    assert sorted(texts) == sorted(
        text for key, text in zip(keys, TABLE["text"].to_pylist(), strict=True) if part_of(key) == "test"
    )


def test_rows_whose_id_is_null_are_parted_by_their_texts(drawn: Drawn) -> None:
    """Else all of them would be in one part."""
    ids = pa.array([None if row % 2 else IDS[row] for row in range(ROWS)], pa.string())
    parts: list[Part] = ["calibrate", "train", "test"]
    texts = TABLE["text"].to_pylist()
    for part in parts:
        of_it = [t for t, key in zip(texts, ids.to_pylist(), strict=True) if part_of(t if key is None else key) == part]
        assert sorted(drawn(part, table=TABLE.set_column(0, "id", ids))) == sorted(of_it)


def test_what_lies_close_by_is_read_once(drawn: Drawn, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each draw opens a file and reads it up to the row group that it is in."""
    opened, open_path = [], Storage.open_path

    def counted(storage: Storage, path: str, stamp: str | None = None) -> Any:
        opened.append(path)
        return open_path(storage, path, stamp)

    monkeypatch.setattr(Storage, "open_path", counted)
    assert len(drawn("all", 640)) == 640
    assert len(opened) == 2 + 2  # each of two files for its footer, and for 20 draws


def test_rows_are_drawn_together_whatever_the_number_of_their_samples(
    tmp_path: Path, write_parquet: WriteParquet
) -> None:
    """A read each for single rows would decode their row groups as often."""
    for file in range(2):
        write_parquet(tmp_path / f"in/{file}.parquet", TABLE.slice(file * 2000, 2000))
    options = {"input": str(tmp_path / "in"), "output": "", "temperature": 1.0}

    def runs(plan: Plan) -> list[tuple[str, int, int]]:
        return [(run.path, run.start, run.rows) for run in neighbours(plan, 0)]

    once, four, many = (
        make_plan(config, config.template())
        for config in (DatasetConfig(**options, samples_per_prompt=samples) for samples in (1, 4, 256))
    )
    assert runs(once) == runs(four) == runs(many)
    gone = many.units[100]
    rows = [(path, row) for path, start, count in runs(many.without({gone.id})) for row in range(start, start + count)]
    wanted = {(unit.path, unit.start) for unit in many.units} - {(gone.path, gone.start)}
    assert sorted(rows) == sorted(wanted), "what is no unit's is not drawn"


def test_a_corpus_of_more_rows_than_a_manifest_lists_units_of_is_drawn_from(
    drawn: Drawn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(work, "MOST_UNITS", 10)
    assert sorted(drawn("all")) == sorted(TABLE["text"].to_pylist())
