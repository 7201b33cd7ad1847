"""Rows between input and output: order kept, bad rows turned into rows with an error, one schema for all."""

import io
from collections.abc import Callable, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from arrow_values import COLUMNS, ROWS
from engine_double import ByteTokenizer, Echo
from hypothesis import given
from hypothesis import strategies as st

from engine import BatchStats, ModelError, Sampling
from pipeline.errors import JobError
from pipeline.execution.wire import to_bytes
from pipeline.rows.row_generator import RowGenerator
from pipeline.rows.rows import generate, output_schema, prepare, quarantine
from pipeline.rows.template import PromptTemplate
from pipeline.values.show import shown

StringsOfBytes = Callable[[Sequence[bytes | None]], pa.Array]
LOREM = PromptTemplate("{text}", format="raw")

# The contract that readers of an output rely on.
CONTRACT = [
    ("generation", pa.string()),
    ("finish_reason", pa.string()),
    ("prompt_tokens", pa.int32()),
    ("prompt_truncated", pa.bool_()),
    ("shared_prefix_tokens", pa.int32()),
    ("generated_tokens", pa.int32()),
    ("flops_prompt", pa.int64()),
    ("flops_decode", pa.int64()),
    ("flops_decode_full_depth", pa.int64()),
    ("flops_full_depth", pa.int64()),
    ("mean_active_layers", pa.float32()),
    ("error", pa.string()),
]


def through(
    table: pa.Table,
    kept: pa.Schema | None = None,
    template: PromptTemplate = LOREM,
    longest: int = 1000,
    batch_size: int = 3,
    on_batch: Callable[[BatchStats], None] | None = None,
    samples: int = 1,
) -> pa.Table:
    """A table's output as a reader of the written file gets it."""
    kept = table.schema if kept is None else kept
    prepared = prepare(table, kept, "text", template, ByteTokenizer(), longest)
    ids = [str(row) for row in range(table.num_rows)]
    sampling = Sampling(max_new_tokens=50, temperature=1.0, samples_per_prompt=samples)
    generator = RowGenerator(Echo(), sampling, None, batch_size)
    output = generate(prepared, ids, generator, on_batch)
    sink = io.BytesIO()
    pq.write_table(output, sink)
    read = pq.read_table(sink)
    read.validate(full=True)
    return read


@given(texts=st.lists(st.none() | st.text(max_size=20)), batch_size=st.integers(1, 8))
def test_rows_keep_their_order_whatever_order_generations_come_in(texts: list[str | None], batch_size: int) -> None:
    rows = through(pa.table({"text": pa.array(texts, pa.string())}), batch_size=batch_size).to_pylist()
    assert [row["text"] for row in rows] == texts
    for text, row in zip(texts, rows, strict=True):
        if text is None or not text.strip():
            assert (row["generation"], row["finish_reason"]) == (None, "error")
            assert row["error"] == ("text is null" if text is None else "text is empty")
        else:
            assert (row["error"], row["prompt_tokens"]) == (None, len(text.encode()))
            assert text.startswith(row["generation"])


def test_a_good_row_carries_what_the_engine_said() -> None:
    (row,) = through(pa.table({"text": ["hello"]})).to_pylist()
    assert row == {
        "text": "hello",
        "generation": "hello",
        "finish_reason": "stop",
        "prompt_tokens": 5,
        "prompt_truncated": False,
        "shared_prefix_tokens": 0,
        "generated_tokens": 5,
        "flops_prompt": 500,
        "flops_decode": 150,
        "flops_decode_full_depth": 300,
        "flops_full_depth": 800,
        "mean_active_layers": 2.0,
        "error": None,
    }


def test_a_bad_row_costs_nothing_and_says_why() -> None:
    (row,) = through(pa.table({"text": pa.array([None], pa.string())})).to_pylist()
    figures = [name for name, type_ in CONTRACT if pa.types.is_integer(type_)] + ["mean_active_layers"]
    assert {row[name] for name in figures} == {0}
    assert (row["generation"], row["finish_reason"], row["error"]) == (None, "error", "text is null")


def test_an_error_that_quotes_half_a_surrogate_pair_is_that_rows_alone() -> None:
    class Refuses(ByteTokenizer):
        def encode(self, text: str) -> list[int]:
            if text == "bad":
                raise ModelError("the template refuses a chat of \ud800")
            return super().encode(text)

    template = PromptTemplate(format="raw")
    prepared = prepare(pa.table({"text": ["bad", "good"]}), pa.schema([]), "text", template, Refuses(), 100)
    assert prepared["_error"].to_pylist() == ["ModelError: the template refuses a chat of \\ud800", None]


@pytest.mark.parametrize("texts", [["good", None], [None, " "], []])
def test_the_schema_is_the_contract_however_bad_the_rows(texts: list[str | None]) -> None:
    table = pa.table({"text": pa.array(texts, pa.string()), "year": pa.array([1] * len(texts), pa.int16())})
    rows = through(table, pa.schema([("year", pa.int16())]))
    assert list(zip(rows.schema.names, rows.schema.types, strict=True)) == [("year", pa.int16()), *CONTRACT]


BROKEN = [b"fine", b"\xed\xa0\x80 half a surrogate pair", b"cut \xc3", None, b"\xff\xfe", "whole é".encode()]


def test_text_that_is_not_utf8_becomes_an_error_row_that_names_the_byte(strings_of_bytes: StringsOfBytes) -> None:
    table = pa.table({"id": range(6), "text": strings_of_bytes(BROKEN)})
    rows = through(table, pa.schema([("id", pa.int64())])).to_pylist()
    assert [row["id"] for row in rows] == [0, 1, 2, 3, 4, 5]
    assert [row["generation"] for row in rows] == ["fine", None, None, None, None, "whole é"]
    assert [row["error"] for row in rows] == [
        None,
        "text is not valid UTF-8 (byte 0xed at 0)",
        "text is not valid UTF-8 (byte 0xc3 at 4)",
        "text is null",
        "text is not valid UTF-8 (byte 0xff at 0)",
        None,
    ]


@pytest.mark.parametrize("type_", [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())])
def test_kept_strings_that_are_not_utf8_come_out_readable(strings_of_bytes: StringsOfBytes, type_: pa.DataType) -> None:
    broken = strings_of_bytes(BROKEN)
    column = broken.dictionary_encode() if pa.types.is_dictionary(type_) else broken.cast(type_)
    rows = through(pa.table({"text": ["x"] * 6, "note": column}))
    assert rows.schema.field("note").type == type_
    assert rows["note"].to_pylist()[0] == "fine"
    assert rows["note"].to_pylist()[1].endswith(" half a surrogate pair")
    assert rows["note"].to_pylist()[2:] == ["cut \ufffd", None, "\ufffd\ufffd", "whole é"]
    assert rows["error"].null_count == 6


@pytest.mark.parametrize("name", COLUMNS)
def test_a_column_of_any_type_is_kept_as_it_is_but_for_broken_text(name: str) -> None:
    column = COLUMNS[name]
    rows = through(pa.table({"text": ["x"] * ROWS, "kept": column}), longest=9)
    assert rows["error"].null_count == ROWS
    assert rows["kept"].type == column.type
    assert shown(rows["kept"]) == shown(column)
    if "\ufffd" not in shown(column):
        assert rows["kept"].combine_chunks().equals(column)


@pytest.mark.parametrize("name", COLUMNS)
def test_samples_stand_side_by_side_each_with_its_rows_columns_of_any_type(name: str) -> None:
    column = pa.concat_arrays([COLUMNS[name]] * 2)
    table = pa.table({"text": ["one", None, "two", "thr"] * 2, "kept": column})
    once, thrice = through(table), through(table, samples=3)
    assert thrice.schema == once.schema.insert(2, pa.field("sample", pa.int32()))
    assert thrice["sample"].to_pylist() == [0, 1, 2] * len(table)
    for name_ in ("generation", "error", "finish_reason"):
        assert thrice[name_].to_pylist() == [value for value in once[name_].to_pylist() for _ in range(3)]
    repeated = [chunk for row in range(len(table)) for chunk in 3 * once["kept"].slice(row, 1).chunks]
    assert shown(thrice["kept"]) == shown(pa.chunked_array(repeated, column.type))
    costs = thrice["flops_prompt"].to_pylist()
    assert costs[::3] == once["flops_prompt"].to_pylist()
    assert costs[1::3] == costs[2::3] == [0] * len(table)


def sampled(kept: pa.Array, samples: int) -> pa.Table:
    """Output of rows that keep one column."""
    table = pa.table({"text": ["x"] * len(kept), "kept": kept})
    prepared = prepare(table, table.select(["kept"]).schema, "text", LOREM, ByteTokenizer(), 100)
    sampling = Sampling(temperature=1.0, samples_per_prompt=samples)
    return generate(prepared, list(map(str, range(len(kept)))), RowGenerator(Echo(), sampling, None, 4))


def test_samples_may_have_more_bytes_together_than_one_array_has_room_for() -> None:
    most = 2**31 - 2  # of an array with 32-bit offsets
    offsets = np.array([0, 1, most], np.int32)
    zeros = np.zeros(most, np.uint8)  # they take no memory: nobody writes them
    blobs = pa.Array.from_buffers(pa.binary(), 2, [None, pa.py_buffer(offsets), pa.py_buffer(zeros)])
    rows = sampled(blobs, 2)
    assert pc.binary_length(rows["kept"]).to_pylist() == [1, 1, most - 1, most - 1]
    assert rows["sample"].to_pylist() == [0, 1, 0, 1]


@pytest.mark.parametrize(
    ("type_", "of"),
    [
        (pa.string(), str),
        (pa.string_view(), str),
        (pa.binary_view(), str.encode),
        (pa.list_(pa.string_view()), lambda text: [text]),
        (pa.map_(pa.string_view(), pa.binary_view()), lambda text: [("k", text.encode())]),
        (pa.struct([("k", pa.string_view())]), lambda text: {"k": text}),
    ],
)
def test_samples_take_as_many_times_the_bytes_of_their_rows(type_: pa.DataType, of: Callable[[str], object]) -> None:
    values = [of(f"{row:05}" * 1000) for row in range(50)]
    rows = sampled(pa.array(values, type_), 4).select(["kept"])
    assert rows["kept"].type == type_
    assert rows["kept"].to_pylist() == [value for value in values for _ in range(4)]
    assert len(to_bytes(rows)) < 5 * 50 * 5000


@pytest.mark.parametrize("samples", [1, 3])
@pytest.mark.parametrize("kept", [pa.schema([]), pa.schema([("text", pa.string())])])
def test_of_a_row_that_was_never_done_every_sample_has_its_error(kept: pa.Schema, samples: int) -> None:
    table = pa.table({"text": ["one"]})
    rows = quarantine(table, kept, samples, "its process died")
    assert rows.schema == through(table, kept, samples=samples).schema
    assert rows["error"].to_pylist() == ["its process died"] * samples
    assert rows["generation"].null_count == samples


@pytest.mark.parametrize("name", COLUMNS)
def test_a_column_of_any_type_fills_a_prompt_or_is_that_rows_error(name: str) -> None:
    column = COLUMNS[name]
    table = pa.table({"text": ["x"] * ROWS, "value": column})
    rows = through(table, pa.schema([]), PromptTemplate("{value}:{text}", format="raw"))
    assert rows["generation"].to_pylist()[1] == ":x"  # null
    for value, prompt, error in zip(column, rows["generation"].to_pylist(), rows["error"].to_pylist(), strict=True):
        if "\ufffd" in shown(value):
            assert error == "value is not valid UTF-8 (byte 0xff at 0)" or "0xfe at 0" in error
        else:
            assert error is None
            text = f"{shown(value) if value.is_valid else ''}:x"
            assert prompt == text.encode()[:50].decode(errors="ignore")


def test_a_prompt_field_that_is_not_utf8_makes_the_row_an_error(strings_of_bytes: StringsOfBytes) -> None:
    table = pa.table({"text": ["x", "y"], "title": strings_of_bytes([b"ok", b"\xff"])})
    rows = through(table, template=PromptTemplate("{title}: {text}", format="raw"))
    assert rows["generation"].to_pylist() == ["ok: x", None]
    assert rows["error"].to_pylist() == [None, "title is not valid UTF-8 (byte 0xff at 0)"]


@pytest.mark.parametrize("type_", [pa.string(), pa.large_string(), pa.dictionary(pa.int8(), pa.string())])
def test_every_kind_of_string_column_is_text(type_: pa.DataType) -> None:
    table = pa.table({"text": pa.array(["a", None, "b"]).cast(type_)})
    assert through(table)["generation"].to_pylist() == ["a", None, "b"]


def test_a_text_column_of_nothing_but_nulls_is_all_errors() -> None:
    assert through(pa.table({"text": pa.nulls(2)}))["error"].to_pylist() == ["text is null"] * 2


def test_a_column_that_this_file_lacks_is_null_in_the_output_and_nothing_in_the_prompt() -> None:
    kept = pa.schema([("year", pa.int64())])
    rows = through(pa.table({"text": ["x"]}), kept, PromptTemplate("{year}{text}", format="raw"))
    assert rows["year"].to_pylist() == [None]
    assert rows["generation"].to_pylist() == ["x"]


def test_a_cut_prompt_is_marked_and_a_rejected_one_is_an_error() -> None:
    table = pa.table({"text": ["short", "far too long"]})
    cut = through(table, longest=6)
    assert cut["prompt_truncated"].to_pylist() == [False, True]
    assert cut["prompt_tokens"].to_pylist() == [5, 6]
    rejected = through(table, template=PromptTemplate("{text}", format="raw", overlong="reject"), longest=6)
    assert rejected["error"].to_pylist() == [None, "prompt has 12 tokens, the limit is 6"]


def test_text_with_characters_outside_the_basic_plane_passes_unharmed() -> None:
    texts = ["👩‍👩‍👧‍👦 family", "नमस्ते", "\u202eright to left", "a\x00b"]
    assert through(pa.table({"text": texts}))["generation"].to_pylist() == texts


def test_each_batch_is_reported_and_bad_rows_are_in_none() -> None:
    batches: list[BatchStats] = []
    through(pa.table({"text": ["a", None, "b", "c", ""]}), batch_size=2, on_batch=batches.append)
    assert sum(batch.samples for batch in batches) == 3


@pytest.mark.parametrize("name", ["error", "generation", "_prompt", "_error"])
def test_an_input_column_with_a_name_the_job_needs_is_refused(name: str) -> None:
    with pytest.raises(JobError, match=f"column '{name}'.*leave it out with keep_columns"):
        output_schema(pa.schema([("id", pa.int64()), (name, pa.string())]))
