"""A column of every Arrow type that a Parquet file gives back, with the values that libraries trip over."""

from collections.abc import Sequence
from decimal import Decimal
from uuid import UUID

import pyarrow as pa

FAR = [-(2**31), None, 2**31 - 1, 19_000]  # as days: years -5877641 to 5881580
HUGE = [-(2**63), None, 2**63 - 1, 1_700_000_000_000_000]
TEXTS = ["a", None, "é\n<b>|`{x}", ""]
BYTES = [b"plain", None, b"\xff\x00\xfe", b""]


def invalid(type_: pa.DataType, values: Sequence[bytes | None]) -> pa.Array:
    """Text of any string type that holds these bytes, UTF-8 or not, as a broken writer would leave it."""
    as_bytes = {
        pa.string(): pa.binary(),
        pa.large_string(): pa.large_binary(),
        pa.string_view(): pa.binary_view(),
    }[type_]
    return pa.Array.from_buffers(type_, len(values), pa.array(values, as_bytes).buffers())


def _integers() -> dict[str, pa.Array]:
    types = [*(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))]
    return {name: pa.array([0, None, 2**7 - 1, 1], name) for name in types}


def _texts() -> dict[str, pa.Array]:
    strings = {"string": pa.string(), "large_string": pa.large_string(), "string_view": pa.string_view()}
    binaries = {"binary": pa.binary(), "large_binary": pa.large_binary(), "binary_view": pa.binary_view()}
    return {
        **{name: pa.array(TEXTS, type_) for name, type_ in strings.items()},
        **{f"broken_{name}": invalid(type_, BYTES) for name, type_ in strings.items()},
        **{name: pa.array(BYTES, type_) for name, type_ in binaries.items()},
        "fixed_size_binary": pa.array([b"ab", None, b"\xff\xff", b"cd"], pa.binary(2)),
        "dictionary": pa.array(TEXTS).dictionary_encode(),
        "broken_dictionary": _broken_dictionary(),
    }


def _broken_dictionary() -> pa.Array:
    return pa.DictionaryArray.from_arrays(
        pa.array([0, None, 1, 2], pa.int32()), invalid(pa.string(), [b"\xff", b"\xfe", b"fine"])
    )


def _times() -> dict[str, pa.Array]:
    days = pa.array(FAR, pa.int32())
    clocks = {
        "time32_ms": (pa.int32(), pa.time32("ms"), 86_399_999),
        "time64_us": (pa.int64(), pa.time64("us"), 86_399_999_999),
        "time64_ns": (pa.int64(), pa.time64("ns"), 86_399_999_999_999),
    }
    instants = pa.array(HUGE, pa.int64())
    return {
        "date32": days.cast(pa.date32()),
        **{name: pa.array([0, None, last, 1], kind).cast(type_) for name, (kind, type_, last) in clocks.items()},
        **{f"timestamp_{unit}": instants.cast(pa.timestamp(unit)) for unit in ("ms", "us", "ns")},
        "timestamp_zone": instants.cast(pa.timestamp("us", "Europe/Berlin")),
        "timestamp_no_zone": instants.cast(pa.timestamp("us", "Nowhere/Land")),
        **{f"duration_{unit}": instants.cast(pa.duration(unit)) for unit in ("s", "ms", "us", "ns")},
    }


def _nested() -> dict[str, pa.Array]:
    dates = pa.array(FAR, pa.int32()).cast(pa.date32())
    text = invalid(pa.string(), BYTES)
    offsets, sizes = pa.array([0, 2, 2, 3, 4], pa.int32()), pa.array([2, 0, 1, 1], pa.int32())
    mask = pa.array([False, True, False, False])
    keys = pa.array(["k", "l", "m", "n"])
    return {
        "list": pa.ListArray.from_arrays(offsets, dates, mask=mask),
        "large_list": pa.LargeListArray.from_arrays(offsets.cast(pa.int64()), text, mask=mask),
        "fixed_size_list": pa.array([[1, 2], None, [3, None], [5, 6]], pa.list_(pa.int64(), 2)),
        "list_view": pa.ListViewArray.from_arrays(offsets[:4], sizes, text, mask=mask),
        "large_list_view": pa.LargeListViewArray.from_arrays(
            offsets[:4].cast(pa.int64()), sizes.cast(pa.int64()), dates, mask=mask
        ),
        "struct": pa.StructArray.from_arrays([dates, text, pa.array(TEXTS)], ["date", "broken", "text"], mask=mask),
        "map": pa.MapArray.from_arrays(offsets, keys, text, mask=mask),
        "map_of_lists": pa.array(
            [[("k", [1, None])], None, [], [("k", None)]], pa.map_(pa.string(), pa.list_(pa.int8()))
        ),
        "list_of_views": pa.array([["a", None], None, [], ["é"]], pa.list_(pa.string_view())),
        "list_of_dictionaries": pa.ListArray.from_arrays(offsets, _broken_dictionary(), mask=mask),
        "list_of_nulls": pa.array([[None], None, [], [None, None]], pa.list_(pa.null())),
    }


def _extensions() -> dict[str, pa.Array]:
    storage = pa.array([UUID(int=1).bytes, None, b"\xff" * 16, b"0" * 16], pa.binary(16))
    tensors = pa.array([[1, 2], None, [3, 4], [5, 6]], pa.list_(pa.int32(), 2))
    return {
        "uuid": pa.ExtensionArray.from_storage(pa.uuid(), storage),
        "json": pa.ExtensionArray.from_storage(pa.json_(), pa.array(['{"a": 1}', None, "[]", "3"])),
        "bool8": pa.ExtensionArray.from_storage(pa.bool8(), pa.array([1, None, 0, 1], pa.int8())),
        "opaque": pa.ExtensionArray.from_storage(
            pa.opaque(pa.date32(), "t", "v"), pa.array(FAR, "int32").cast("date32")
        ),
        "tensor": pa.ExtensionArray.from_storage(pa.fixed_shape_tensor(pa.int32(), [2]), tensors),
    }


def _decimals() -> dict[str, pa.Array]:
    values = [Decimal("1.50"), None, Decimal("-0.01"), Decimal("0.00")]
    types = [pa.decimal32(7, 2), pa.decimal64(12, 2), pa.decimal128(30, 2), pa.decimal256(60, 2)]
    return {f"decimal{type_.bit_width}": pa.array(values, type_) for type_ in types}


# Four rows of each, the second null. What Parquet has no room for (unions, run ends, intervals, date64, seconds of time
# or timestamps, dictionaries of anything but strings) a file gives back as another of these, or its writer refuses it.
COLUMNS: dict[str, pa.Array] = {
    "null": pa.nulls(4),
    "bool": pa.array([True, None, False, True]),
    **_integers(),
    **{f"float{bits}": pa.array([1.5, None, float("inf"), 0.25], f"float{bits}") for bits in (16, 32, 64)},
    **_decimals(),
    **_texts(),
    **_times(),
    **_nested(),
    **_extensions(),
}
ROWS = 4
