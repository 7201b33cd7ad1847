"""Values as text: whatever an Arrow array holds can be shown, and what Python can say reads as Python says it."""

import datetime as dt
import json
import math
from decimal import Decimal
from typing import Any, Literal

import pyarrow as pa
import pytest
from arrow_values import COLUMNS, invalid
from hypothesis import given
from hypothesis import strategies as st

from pipeline.values.show import names, shown, texts

INT64 = st.integers(-(2**63), 2**63 - 1)
UNITS = st.sampled_from(["s", "ms", "us", "ns"])
ZONES = st.sampled_from([None, "UTC", "Europe/Berlin", "America/St_Johns", "+05:30", "Nowhere/Land", "\x00", "../x"])


def of(type_: pa.DataType, values: list[int | None]) -> pa.Array:
    """Any integers as values of a type that is kept as integers."""
    return pa.array(values, pa.int32() if type_.bit_width == 32 else pa.int64()).view(type_)


integers = st.lists(st.none() | INT64, max_size=4)
small = st.lists(st.none() | st.integers(-(2**31), 2**31 - 1), max_size=4)
byte_texts = st.lists(st.none() | st.binary(max_size=12), max_size=4)
leaves = st.one_of(
    st.builds(lambda v: of(pa.date32(), v), small),
    st.builds(lambda u, v: of(pa.time32(u), v), st.sampled_from(["s", "ms"]), small),
    st.builds(lambda v: of(pa.date64(), v), integers),
    st.builds(lambda u, v: of(pa.time64(u), v), st.sampled_from(["us", "ns"]), integers),
    st.builds(lambda u, z, v: of(pa.timestamp(u, z), v), UNITS, ZONES, integers),
    st.builds(lambda u, v: of(pa.duration(u), v), UNITS, integers),
    st.builds(invalid, st.sampled_from([pa.string(), pa.large_string(), pa.string_view()]), byte_texts),
    st.builds(lambda v: pa.array(v, pa.binary()), byte_texts),
    st.builds(lambda v: pa.array(v, pa.binary_view()), byte_texts),
    st.builds(lambda v: pa.array(v, pa.float16()), st.lists(st.none() | st.floats(width=16), max_size=4)),
    st.builds(
        lambda v: pa.array(v, pa.decimal256(76, 5)),
        st.lists(st.none() | st.decimals(-(10**60), 10**60, places=5), max_size=4),
    ),
    st.builds(
        lambda v: pa.array(v, pa.month_day_nano_interval()),
        st.lists(st.none() | st.tuples(st.integers(-9, 9), st.integers(-9, 9), INT64), max_size=4),
    ),
    st.sampled_from([*COLUMNS.values(), pa.array([], pa.list_(pa.null()))]),
)


def _wrapped(values: pa.Array, how: str) -> pa.Array:
    if how == "list":
        return pa.ListArray.from_arrays(pa.array([0, len(values)], pa.int32()), values)
    if how == "list view":
        sizes = pa.array([len(values)], pa.int64())
        return pa.LargeListViewArray.from_arrays(pa.array([0], pa.int64()), sizes, values)
    if how == "struct":
        return pa.StructArray.from_arrays([values, values], ["a", "a\x1b"])
    if how == "map":
        offsets = pa.array([0, len(values)], pa.int32())
        keys = pa.array([f"k{index}" for index in range(len(values))], pa.string())
        return pa.MapArray.from_arrays(offsets, keys, values)
    if how == "runs":
        ends = pa.array(range(1, len(values) + 1), pa.int32())
        try:
            return pa.RunEndEncodedArray.from_arrays(ends, values) if len(values) else values
        except pa.ArrowInvalid:  # alone among all, these are checked: times of day outside a day are refused
            return values
    if how == "dictionary":
        return pa.DictionaryArray.from_arrays(pa.array(range(len(values)), pa.int32()), values)
    assert how == "union"
    types = pa.array([0] * len(values), pa.int8())
    return pa.UnionArray.from_sparse(types, [values, pa.nulls(len(values))])


WRAPPERS = st.lists(st.sampled_from(["list", "list view", "struct", "map", "runs", "dictionary", "union"]), max_size=3)


@given(values=leaves, wrappers=WRAPPERS, longest=st.integers(1, 60))
def test_any_value_of_any_type_can_be_shown_in_as_few_characters_as_asked_for(
    values: pa.Array, wrappers: list[str], longest: int
) -> None:
    for how in wrappers:
        values = _wrapped(values, how)
    for value in [*values, values, pa.chunked_array([values, values])]:
        text = shown(value, longest)
        assert len(text) <= longest
        assert "cannot be shown" not in shown(value, 200)
        text.encode()
        assert not any(ord(mark) < 32 and mark not in "\n\t" for mark in text)
    assert len(texts(values)) == len(names(values)) == len(values)


@given(value=st.one_of(
    st.text(), st.none(), st.integers(), st.floats(), st.dictionaries(st.text(), st.binary()), st.just("\ud800\x1b"),
))  # fmt: skip
def test_what_is_no_arrow_value_can_be_shown_too(value: object) -> None:
    shown(value).encode()
    assert len(shown(value, 10)) <= 10


class Spiteful:
    def __str__(self) -> str:
        raise RuntimeError("no")


def test_a_value_that_refuses_to_be_shown_says_so() -> None:
    assert shown(Spiteful()) == "(Spiteful that cannot be shown: RuntimeError)"


def test_a_huge_value_is_shown_without_being_read_whole() -> None:
    reads = pa.array([list(range(1_000_000))]), pa.array(["é" * 10_000_000]), pa.array([b"\xff" * 10_000_000])
    for column in reads:
        assert len(shown(column[0], 100)) == 100
        assert shown(column[0], 100).endswith("…")
    assert shown(pa.array([b"\xc3\xa9" * 1000])[0], 5) == "éééé…"


dates = st.dates()
instants = st.datetimes()
spans = st.timedeltas()
PLAIN = st.one_of(
    st.tuples(st.just(pa.int64()), INT64),
    st.tuples(st.just(pa.float64()), st.floats()),
    st.tuples(st.just(pa.bool_()), st.booleans()),
    st.tuples(st.just(pa.string()), st.text()),
    st.tuples(st.just(pa.date32()), dates),
    st.tuples(st.just(pa.time64("us")), st.times()),
    st.tuples(st.just(pa.timestamp("us")), instants),
    st.tuples(st.just(pa.timestamp("us", "Europe/Berlin")), st.datetimes(dt.datetime(1900, 1, 1))),
    st.tuples(st.just(pa.timestamp("us", "-03:30")), st.datetimes(dt.datetime(1900, 1, 1))),
    st.tuples(st.just(pa.duration("us")), spans.filter(lambda span: abs(span) < dt.timedelta(days=10**8))),
)


@given(PLAIN)
def test_what_python_can_hold_reads_in_a_prompt_as_its_str_does(case: tuple[pa.DataType, Any]) -> None:
    type_, value = case
    column = pa.array([value, None], type_)
    assert texts(column) == [str(column[0].as_py()), None]


@given(st.sampled_from([(pa.float32(), 32, 9), (pa.float16(), 16, 5)]), st.data())
def test_a_number_of_less_than_double_precision_reads_in_as_few_digits_as_tell_which_it_is(
    kind: tuple[pa.DataType, Literal[16, 32], int], data: st.DataObject
) -> None:
    type_, width, digits = kind
    value = data.draw(st.floats(width=width))
    column = pa.array([value, None], type_)
    text, null = texts(column)
    assert isinstance(text, str)
    assert null is None
    assert shown(pa.array([float(text)], type_)) == shown(column[:1]) == json.dumps([float(text)])
    significand = text.partition("e")[0].strip("-").replace(".", "").strip("0")
    assert math.isnan(value) or math.isinf(value) or len(significand) <= digits


def test_a_price_in_single_precision_reads_as_it_was_written() -> None:
    assert texts(pa.array([19.99, 0.1, 1e9, 1.0], pa.float32())) == ["19.99", "0.1", "1000000000.0", "1.0"]
    assert texts(pa.array([[19.99, None]], pa.list_(pa.float32()))) == ["[19.99, null]"]
    assert names(pa.array([0.1], pa.float16())) == ["0.1"]


@pytest.mark.parametrize(
    ("column", "text"),
    [
        (COLUMNS["date32"], "-5877641-06-23"),
        (COLUMNS["timestamp_us"], "-290308-12-21 19:59:05.224192"),
        (COLUMNS["timestamp_no_zone"], "-290308-12-21 19:59:05.224192+00:00"),
        (COLUMNS["time64_ns"][3:], "00:00:00.000000001"),
        (COLUMNS["duration_s"], "-106751991167301 days, 8:29:52"),
        (COLUMNS["binary"], "plain"),
        (COLUMNS["binary"][2:], "0xff00fe"),
        (pa.array([Decimal("0E-10")], pa.decimal128(20, 10)), "0.0000000000"),
        (COLUMNS["list"], '["-5877641-06-23", null]'),
        (COLUMNS["map"], '{"k": "plain", "l": null}'),
        (COLUMNS["struct"], '{"date": "-5877641-06-23", "broken": "plain", "text": "a"}'),
        (pa.array([[True, 1.5, None]], pa.list_(pa.float64())), "[1.0, 1.5, null]"),
        (COLUMNS["uuid"], "00000000-0000-0000-0000-000000000001"),
        (COLUMNS["bool8"], "True"),
        (pa.array([(1, -2, 3)], pa.month_day_nano_interval()), "1 months, -2 days, 0:00:00.000000003"),
    ],
)
def test_other_values_read_so(column: pa.Array, text: str) -> None:
    assert texts(column)[0] == shown(column[0]) == text


@pytest.mark.parametrize("name", [name for name in COLUMNS if "broken" in name])
def test_ids_tell_broken_texts_apart(name: str) -> None:
    column = COLUMNS[name]
    values = [value for value in column if value.is_valid]
    assert len({value.as_buffer().to_pybytes() if hasattr(value, "as_buffer") else value.value.as_buffer().to_pybytes()
                for value in values}) == len({*names(column)} - {"None"})  # fmt: skip
