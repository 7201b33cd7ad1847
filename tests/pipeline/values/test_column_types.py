"""Which type a column has whose files differ."""

import pyarrow as pa
import pytest

from pipeline.values.column_types import common_type


@pytest.mark.parametrize(
    ("one", "other", "common"),
    [
        (pa.string(), pa.large_string(), pa.large_string()),
        (pa.string_view(), pa.string(), pa.large_string()),
        (pa.dictionary(pa.int8(), pa.string()), pa.dictionary(pa.int32(), pa.string()), pa.string()),
        (pa.dictionary(pa.int8(), pa.string()), pa.large_string(), pa.large_string()),
        (pa.int32(), pa.int64(), pa.int64()),
        (pa.uint32(), pa.int32(), pa.int64()),
        (pa.float32(), pa.float64(), pa.float64()),
        (pa.timestamp("ms", "UTC"), pa.timestamp("us", "UTC"), pa.timestamp("us", "UTC")),
        (pa.date32(), pa.date64(), pa.date64()),
        (pa.time32("ms"), pa.time64("us"), pa.time64("us")),
        (pa.duration("s"), pa.duration("ns"), pa.duration("ns")),
        (pa.int8(), pa.uint8(), pa.int16()),
        (pa.date32(), pa.timestamp("us"), None),
        (pa.decimal128(5, 2), pa.decimal128(9, 4), pa.decimal128(9, 4)),
        (pa.list_(pa.int32()), pa.list_(pa.field("element", pa.int64())), pa.list_(pa.int64())),
        (pa.struct([("a", pa.int8())]), pa.struct([("a", pa.int16())]), pa.struct([("a", pa.int16())])),
        (pa.list_view(pa.int64()), pa.list_(pa.int64()), None),
        (pa.large_list_view(pa.int64()), pa.list_(pa.int64()), None),
        (pa.large_list_view(pa.int64()), pa.large_list_view(pa.int32()), None),
        (pa.int64(), pa.float64(), None),
        (pa.uint64(), pa.int64(), None),
        (pa.timestamp("us"), pa.timestamp("us", "UTC"), None),
        (pa.string(), pa.binary(), None),
        (pa.bool_(), pa.int8(), None),
        (pa.struct([("a", pa.int8())]), pa.struct([("b", pa.int8())]), None),
    ],
)
def test_types_of_one_column_meet_where_nothing_is_lost(
    one: pa.DataType, other: pa.DataType, common: pa.DataType | None
) -> None:
    assert common_type(one, other) == common
    assert common_type(other, one) == common
