"""The plan: work units from footers, and what ends a job before it starts."""

import os
import re
from collections.abc import Callable
from itertools import accumulate, pairwise
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fixture_types import Job, WriteParquet
from hypothesis import given
from hypothesis import strategies as st

from pipeline.config import JobConfig
from pipeline.errors import JobError
from pipeline.execution.attempts import Attempts
from pipeline.inputs import work as plan
from pipeline.inputs.work import InputFile, Plan, make_plan
from pipeline.rows.template import PromptTemplate

MakeFile = Callable[..., InputFile]

TEMPLATE = PromptTemplate("{text}")
row_groups = st.lists(st.integers(0, 40), max_size=6)


def planned(files: list[InputFile], rows_per_unit: int, limit: int | None = None) -> Plan:
    return Plan(tuple(files), ("text",), pa.schema([]), tuple(plan._units(files, rows_per_unit, limit)))


@given(
    groups=st.lists(row_groups, min_size=1, max_size=4),
    rows_per_unit=st.integers(1, 50),
    limit=st.none() | st.integers(1, 200),
)
def test_units_cover_the_first_rows_exactly_once_and_in_order(
    input_file: MakeFile, groups: list[list[int]], rows_per_unit: int, limit: int | None
) -> None:
    files = [input_file(f"{number}.parquet", sizes) for number, sizes in enumerate(groups)]
    units = planned(files, rows_per_unit, limit).units
    covered = [(unit.path, unit.start + row) for unit in units for row in range(unit.rows)]
    assert covered == [(file.path, row) for file in files for row in range(file.rows)][:limit]
    assert all(1 <= unit.rows <= rows_per_unit for unit in units)
    ids = [unit.id for unit in units]
    assert ids == sorted(set(ids))


@given(
    groups=st.lists(row_groups, min_size=1, max_size=3),
    rows_per_unit=st.integers(1, 20),
    span_rows=st.integers(1, 80),
    data=st.data(),
)
def test_spans_cover_the_pending_units_and_end_at_row_groups(
    input_file: MakeFile, groups: list[list[int]], rows_per_unit: int, span_rows: int, data: st.DataObject
) -> None:
    files = [input_file(f"{number}.parquet", sizes) for number, sizes in enumerate(groups)]
    whole = planned(files, rows_per_unit)
    pending = [unit for unit in whole.units if data.draw(st.booleans())]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "SPAN_ROWS", span_rows)
        spans = list(whole.spans(pending))
    assert [unit for span in spans for unit in span] == pending
    edges = {file.path: list(accumulate(file.row_groups)) for file in files}
    for span, following in pairwise(spans):
        assert len({unit.path for unit in span}) == 1
        if following[0].path != span[0].path:
            continue
        # The next task starts in a row group of its own; at most its first unit hangs over the edge.
        assert any(span[-1].start < edge <= following[0].start for edge in edges[span[0].path])
        assert following[0].start - span[0].start >= span_rows


def test_a_file_of_one_row_group_is_read_by_one_task(input_file: MakeFile) -> None:
    whole = planned([input_file("big.parquet", [100_000])], 256)
    assert len(list(whole.spans(whole.units))) == 1


def test_of_what_was_lost_before_less_is_read_together(input_file: MakeFile) -> None:
    whole = planned([input_file("big.parquet", [256 * 200])], 256)
    attempts = [Attempts(losses=times) for times in (0, 1, 2)]
    lost = [2 if place in (70, 71) else 1 if 50 <= place < 130 else 0 for place in range(len(whole.units))]
    times = {unit.id: count for unit, count in zip(whole.units, lost, strict=True)}
    spans = list(whole.spans(whole.units, lambda unit: attempts[times[unit]].longest_span))
    assert [unit for span in spans for unit in span] == list(whole.units)
    for span in spans:
        assert all(len(span) <= attempts[times[unit.id]].longest_span for unit in span)
    assert len(spans) < 12


def test_files_of_one_kind_share_what_says_how(tmp_path: Path, job: Job, write_parquet: WriteParquet) -> None:
    for number in range(3):
        table = pa.table({"text": ["x"]}).replace_schema_metadata({"pandas": f"of file {number}"})
        (tmp_path / "in").mkdir(exist_ok=True)
        pq.write_table(table, tmp_path / f"in/{number}.parquet")
    files = make_plan(job(), TEMPLATE).files
    assert len(files) == 3
    assert len({id(file.schema) for file in files}) == 1


@pytest.mark.parametrize(("samples", "together"), [(1, 4), (2, 2), (3, 1), (4, 1), (9, 1)])
def test_a_unit_has_all_samples_of_its_rows_and_no_more_generations_than_asked(
    input_file: MakeFile, samples: int, together: int
) -> None:
    files = [input_file("a", [5, 5]), input_file("b", [3])]
    units = tuple(plan._units(files, 4, 12, samples))
    whole = Plan(tuple(files), ("text",), pa.schema([]), units)
    assert (whole.rows, whole.input_rows) == (12 * samples, 12)
    assert len({unit.id for unit in units}) == len(units)
    rows = [(unit.path, unit.start + row) for unit in units for row in range(unit.rows)]
    assert rows == [("a", row) for row in range(10)] + [("b", 0), ("b", 1)]
    assert max(unit.rows for unit in units) == together
    for span in whole.spans(units):
        assert len({unit.path for unit in span}) == 1
        assert [unit.start for unit in span] == sorted(unit.start for unit in span)


def test_empty_files_and_row_groups_have_no_units(tmp_path: Path, job: Job, write_parquet: WriteParquet) -> None:
    empty = pa.table({"text": pa.array([], pa.string())})
    write_parquet(tmp_path / "in/a.parquet", empty, [])
    write_parquet(tmp_path / "in/b.parquet", {"text": ["x", "y"]}, [0, 1, 0, 1, 0])
    write_parquet(tmp_path / "in/c.parquet", empty, [0])
    units = make_plan(job(), TEMPLATE).units
    assert [(Path(unit.path).name, unit.start, unit.rows) for unit in units] == [("b.parquet", 0, 2)]


def test_more_units_than_a_manifest_lists_are_refused_before_any_work(
    tmp_path: Path, job: Job, write_parquet: WriteParquet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "MOST_UNITS", 3)
    write_parquet(tmp_path / "in/a.parquet", {"text": ["x"] * 12})
    assert len(make_plan(job(rows_per_unit=4), TEMPLATE).units) == 3
    with pytest.raises(JobError, match=r"more than 3 work units of 3 rows.* raise rows_per_unit"):
        make_plan(job(rows_per_unit=3), TEMPLATE)


def test_one_file_may_lack_an_optional_column_but_the_output_has_it(
    tmp_path: Path, job: Job, write_parquet: WriteParquet, caplog: pytest.LogCaptureFixture
) -> None:
    write_parquet(tmp_path / "in/a.parquet", {"text": ["x"]})
    write_parquet(tmp_path / "in/b.parquet", {"text": ["y"], "year": [1999]})
    found = make_plan(job(), PromptTemplate("{year} {text}"))
    assert found.kept == pa.schema([("text", pa.string()), ("year", pa.int64())])
    assert "1 input files, such as " in caplog.text
    assert "a.parquet', have no column 'year': it is empty there" in caplog.text
    caplog.clear()
    make_plan(job(), PromptTemplate("{text}"))
    assert not caplog.text


def test_a_column_that_is_null_throughout_one_file_takes_the_type_of_the_others(
    tmp_path: Path, job: Job, write_parquet: WriteParquet
) -> None:
    write_parquet(tmp_path / "in/a.parquet", {"text": ["x"], "note": pa.nulls(1)})
    write_parquet(tmp_path / "in/b.parquet", {"text": ["y"], "note": ["z"]})
    write_parquet(tmp_path / "in/c.parquet", {"text": pa.nulls(1), "note": pa.nulls(1)})
    assert make_plan(job(), TEMPLATE).kept.field("note").type == pa.string()


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({}, ["id", "text", "note"]),
        ({"id_column": "id"}, ["id"]),
        ({"keep_columns": ["note"]}, ["note"]),
        ({"keep_columns": ["note"], "id_column": "id"}, ["id", "note"]),
        ({"keep_columns": ["note", "id"], "id_column": "id"}, ["note", "id"]),
        ({"keep_columns": []}, []),
    ],
)
def test_kept_columns_are_the_named_ones_else_the_id_else_all(
    tmp_path: Path, job: Job, write_parquet: WriteParquet, options: dict[str, object], kept: list[str]
) -> None:
    write_parquet(tmp_path / "in/a.parquet", {"id": [1], "text": ["x"], "note": ["n"]})
    found = make_plan(job(**options), TEMPLATE)
    assert found.kept.names == kept
    assert set(found.read_columns) == {*kept, "text"}


def test_dictionary_encoded_and_large_strings_are_text(tmp_path: Path, job: Job, write_parquet: WriteParquet) -> None:
    for number, type_ in enumerate((pa.large_string(), pa.dictionary(pa.int32(), pa.string()))):
        path = write_parquet(tmp_path / f"in{number}/a.parquet", {"text": pa.array(["x"]).cast(type_)})
        assert make_plan(job(input=str(path)), TEMPLATE).rows == 1


def refusal(config: JobConfig, template: PromptTemplate = TEMPLATE) -> str:
    with pytest.raises(JobError) as refused:
        make_plan(config, template)
    message = str(refused.value)
    assert "\n" not in message
    return message


def test_a_missing_text_column_is_named_with_the_columns_there_are(
    tmp_path: Path, job: Job, write_parquet: WriteParquet
) -> None:
    write_parquet(tmp_path / "in/a.parquet", {"body": ["x"], "id": [1]})
    assert "no column 'text': name the text column among body, id" in refusal(job())


UNREADABLE = r"' cannot be read as Parquet \(.*\): repair it or take it out"
Damage = Callable[[Path], object]
PROBLEMS: list[tuple[Damage, str]] = [
    (lambda path: path.write_bytes(b""), UNREADABLE),
    (lambda path: path.write_bytes(b"PAR1"), UNREADABLE),
    (lambda path: path.write_bytes(b"not parquet at all" * 100), UNREADABLE),
    (lambda path: path.write_bytes(b"PAR1" + bytes(100) + b"PAR1"), UNREADABLE),
    (lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]), UNREADABLE),
    (lambda path: pq.write_table(pa.table({"text": [1]}), path), "' is int64, not string"),
]
AMONG_SOUND_FILES: list[tuple[Damage, str]] = [  # where none is sound, other words are found
    (lambda path: (path.unlink(), path.symlink_to("nowhere")), "No such file or directory"),
    (lambda path: (path.unlink(), os.mkfifo(path)), "it is no file but a device, pipe or socket"),
    (lambda path: pq.write_table(pa.table({"body": ["x"]}), path), "has no column 'text': it has body"),
    (lambda path: pq.write_table(pa.table([["x"], ["y"]], ["text", "text"]), path), "has column 'text' twice"),
]


@pytest.mark.parametrize(("damage", "problem"), [*PROBLEMS, *AMONG_SOUND_FILES])
def test_a_file_with_a_problem_is_named_and_all_others_are_planned(
    tmp_path: Path, job: Job, write_parquet: WriteParquet, damage: Damage, problem: str
) -> None:
    for name in "abc":
        path = write_parquet(tmp_path / f"in/{name}.parquet", {"text": ["x"]})
        if name == "b":
            damage(path)
    found = make_plan(job(), TEMPLATE)
    assert [(Path(unit.path).name, unit.id) for unit in found.units] == [
        ("a.parquet", "00000-000000000"),
        ("c.parquet", "00002-000000000"),
    ]
    ((unit, said),) = found.unreadable
    assert Path(unit.path).name == "b.parquet"
    assert "b.parquet'" in said
    assert re.search(problem, said)
    assert found.kept.names == ["text"]


def test_rows_are_not_counted_through_a_file_that_cannot_be_read(
    tmp_path: Path, job: Job, write_parquet: WriteParquet
) -> None:
    write_parquet(tmp_path / "in/a.parquet", {"text": ["x"] * 3})
    (tmp_path / "in/b.parquet").write_bytes(b"half")
    write_parquet(tmp_path / "in/c.parquet", {"text": ["x"] * 3})
    assert make_plan(job(limit=3), TEMPLATE).rows == 3
    assert not make_plan(job(limit=3), TEMPLATE).unreadable
    message = refusal(job(limit=4))
    assert "b.parquet' cannot be read" in message
    assert "limit counts rows through this file" in message


@pytest.mark.parametrize(("damage", "problem"), PROBLEMS)
def test_an_input_of_which_nothing_can_be_read_is_refused(
    tmp_path: Path, job: Job, write_parquet: WriteParquet, damage: Damage, problem: str
) -> None:
    for name in "ab":
        damage(write_parquet(tmp_path / f"in/{name}.parquet", {"text": ["x"]}))
    assert re.search(rf"a\.parquet{problem}.* \(and 1 more files have problems", refusal(job()))


@pytest.mark.parametrize(
    ("name", "way_out"),
    [
        ("a.csv", "only Parquet is read, so convert it, or repair or take it out"),
        ("a.jsonl.gz", "only Parquet is read, so convert it, or repair or take it out"),
        ("a.jsonl", "(generate_dataset.py answers OpenAI batch files with --input-format openai-batch)"),
    ],
)
def test_a_file_of_another_format_is_to_be_converted(tmp_path: Path, job: Job, name: str, way_out: str) -> None:
    (tmp_path / name).write_text('{"text": "x"}\n')
    assert refusal(job(input=str(tmp_path / name))).endswith(way_out)


def test_types_of_a_column_that_nobody_uses_do_not_matter(
    tmp_path: Path, job: Job, write_parquet: WriteParquet
) -> None:
    write_parquet(tmp_path / "in/a.parquet", {"text": ["x"], "id": [1], "year": [1999]})
    write_parquet(tmp_path / "in/b.parquet", {"text": pa.array(["y"], pa.large_string()), "id": [2], "year": ["1999"]})
    for options in ({"id_column": "id"}, {"keep_columns": ["text"]}):
        assert make_plan(job(**options), TEMPLATE).rows == 2
    assert "column 'year' is int64 in" in refusal(job(id_column="id"), PromptTemplate("{year} {text}"))


def test_a_column_of_two_types_is_named_with_both_files(tmp_path: Path, job: Job, write_parquet: WriteParquet) -> None:
    write_parquet(tmp_path / "in/a.parquet", {"text": ["x"], "year": [1999]})
    write_parquet(tmp_path / "in/b.parquet", {"text": ["y"], "year": ["1999"]})
    message = refusal(job())
    assert "column 'year' is int64 in" in message
    assert "a.parquet' but string in" in message
    assert "b.parquet'" in message


@pytest.mark.parametrize("options", [{"keep_columns": ["titel"]}, {"id_column": "titel"}])
def test_an_unknown_column_to_keep_is_named_and_not_warned_of(
    tmp_path: Path, job: Job, write_parquet: WriteParquet, options: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    write_parquet(tmp_path / "in/a.parquet", {"text": ["x"], "title": ["y"]})
    message = refusal(job(**options))
    assert f"no column 'titel', which {next(iter(options))} names: it has text, title" in message
    assert not caplog.text


def test_a_prompt_field_that_no_file_has_is_named(tmp_path: Path, job: Job, write_parquet: WriteParquet) -> None:
    write_parquet(tmp_path / "in/a.parquet", {"text": ["x"], "title": ["y"]})
    assert "names column 'titel'" in refusal(job(), PromptTemplate("{titel} {text}"))
