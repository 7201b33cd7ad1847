"""Any value of any Arrow type as text: `shown` for people, cut and never failing; `texts` in full, for prompts and ids.

Values are taken from Arrow itself, for Python has no dates beyond year 9999 and no text that is not UTF-8. Numbers,
texts, dates and times read as Python's `str` has them, a number of single or half precision with no more digits than
tell it from its neighbours; bytes as the text that they are, else as 0x and hexadecimal digits; lists, structs and maps
as JSON has them, with dates and bytes as strings.
"""

import codecs
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import repeat
from typing import Any
from uuid import UUID

import numpy as np
import pyarrow as pa

from pipeline.values import calendar
from pipeline.values.column_types import BYTES, is_text

CUT = "…"
_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")  # what a terminal or a page may choke on
_SHORT_FLOATS = {pa.float32(): np.float32, pa.float16(): np.float16}
_PLAIN = (pa.types.is_boolean, pa.types.is_integer, pa.types.is_floating)


def shown(value: object, longest: int = 200) -> str:
    """A value for people, at most `longest` characters: cut where it is longer, control characters escaped.

    The value is an Arrow scalar or array, or anything else; null reads null, invalid UTF-8 as replacement characters.
    Time and memory are bounded by `longest`, at least 1, not by the value.
    """
    text = ""
    try:
        for piece in _pieces(value, "replace", longest):
            text += piece
            if len(text) > longest:
                break
    except Exception as error:  # people are told what there is to tell, whatever it is
        text = f"({type(value).__name__} that cannot be shown: {type(error).__name__})"
    text = _UNPRINTABLE.sub(lambda found: ascii(found[0])[1:-1], text[: longest + 1])
    return text if len(text) <= longest else text[: longest - 1] + CUT


def texts(column: pa.ChunkedArray | pa.Array) -> list[str | Exception | None]:
    """Every value in full, None for null; in place of one that has no text the error that says why.

    Text that is not UTF-8, in a list too, is a UnicodeDecodeError.
    """
    if any(is_plain(column.type) for is_plain in _PLAIN):
        return [None if value is None else str(_plain(value, column.type)) for value in column.to_pylist()]
    if is_text(column.type):
        try:
            return list(column.to_pylist())
        except UnicodeDecodeError:
            pass  # some are valid
    return [_text_or_error(value) for value in column]


def names(column: pa.ChunkedArray | pa.Array, of_nulls: Sequence[str] | None = None) -> list[str]:
    """Every value in full, as an id: different values of a column have different names. Null is None, or as given."""
    return [
        "".join(_pieces(value, "backslashreplace", None)) if value.is_valid else null
        for value, null in zip(column, of_nulls or repeat("None"), strict=False)
    ]


def _text_or_error(value: pa.Scalar) -> str | Exception | None:
    try:
        return "".join(_pieces(value, "strict", None)) if value.is_valid else None
    except Exception as error:
        return error


def _pieces(value: Any, errors: str, limit: int | None, inside: bool = False) -> Iterator[str]:
    """A value inside a list, struct or map reads as JSON has it; one that stands alone needs no quotes."""
    if isinstance(value, pa.Array | pa.ChunkedArray):
        yield from _list(value, errors, limit)
        return
    if not isinstance(value, pa.Scalar):
        yield "null" if value is None else str(value)
        return
    value = _unwrapped(value)
    if not value.is_valid:
        yield "null"
    elif any(is_plain(value.type) for is_plain in _PLAIN):
        plain = _plain(value.as_py(), value.type)
        yield json.dumps(plain) if inside else str(plain)
    elif (text := _text(value, errors, limit)) is None:
        yield from _nested(value, errors, limit)
    else:
        yield json.dumps(text, ensure_ascii=False) if inside and not pa.types.is_decimal(value.type) else text


def _plain(value: bool | int | float, type_: pa.DataType) -> bool | int | float:
    """A number as it is to be read: 19.99 in single precision is 19.989999771118164 as a double."""
    short = _SHORT_FLOATS.get(type_)
    return float(str(short(value))) if short is not None else value


def _unwrapped(value: pa.Scalar) -> pa.Scalar:
    """What a dictionary, union, run or extension type stands for. Null if that is."""
    while value.is_valid:
        type_ = value.type
        if isinstance(type_, pa.BaseExtensionType):
            if isinstance(type_, pa.UuidType):
                return pa.scalar(str(UUID(bytes=value.value.as_py())))
            value = value.value.cast(pa.bool_()) if isinstance(type_, pa.Bool8Type) else value.value
        elif pa.types.is_dictionary(type_) or pa.types.is_union(type_) or pa.types.is_run_end_encoded(type_):
            value = value.value
        else:
            break
    return value


def _text(value: pa.Scalar, errors: str, limit: int | None) -> str | None:
    """Of a value that holds no others; None for one that does."""
    type_ = value.type
    if is_text(type_):
        head, is_cut = _head(value, limit)
        return head.decode(errors="replace" if is_cut else errors)
    if any(test(type_) for test in BYTES):
        return _bytes(value, limit)
    if pa.types.is_decimal(type_):
        return f"{value.as_py():f}"
    if pa.types.is_date32(type_):
        return calendar.date(value.value)
    if pa.types.is_date64(type_):
        return calendar.date(value.value // (calendar.DAY * 1_000))
    if pa.types.is_timestamp(type_):
        return calendar.timestamp(value.value, type_.unit, type_.tz)
    if pa.types.is_time(type_):
        return calendar.time(value.value, type_.unit)
    if pa.types.is_duration(type_):
        return calendar.duration(value.value, type_.unit)
    if pa.types.is_interval(type_):
        months, days, nanoseconds = value.as_py()
        return f"{months} months, {days} days, {calendar.duration(nanoseconds, 'ns')}"
    return None if pa.types.is_nested(type_) else str(value.as_py())


def _nested(value: pa.Scalar, errors: str, limit: int | None) -> Iterator[str]:
    if pa.types.is_map(value.type):
        pairs: Iterable[tuple[Any, Any]] = zip(value.values.field(0), value.values.field(1), strict=True)
    elif pa.types.is_struct(value.type):
        pairs = ((pa.scalar(field.name), value[index]) for index, field in enumerate(value.type))
    else:
        yield from _list(value.values, errors, limit)
        return
    yield "{"
    for index, (key, item) in enumerate(pairs):
        yield ", " if index else ""
        yield from _pieces(key, errors, limit, inside=True)
        yield ": "
        yield from _pieces(item, errors, limit, inside=True)
    yield "}"


def _list(values: pa.Array | pa.ChunkedArray, errors: str, limit: int | None) -> Iterator[str]:
    yield "["
    for index, item in enumerate(values):
        yield ", " if index else ""
        yield from _pieces(item, errors, limit, inside=True)
    yield "]"


def _bytes(value: pa.Scalar, limit: int | None) -> str:
    """As the text that they are, else in hexadecimal digits."""
    head, is_cut = _head(value, limit)
    try:
        # What is cut may end in the midst of a character.
        return codecs.getincrementaldecoder("utf-8")().decode(head, final=not is_cut)
    except UnicodeDecodeError:
        return f"0x{head.hex()}"


def _head(value: pa.Scalar, limit: int | None) -> tuple[bytes, bool]:
    """The bytes of `limit` characters, of at most four each, and whether there are more."""
    content = value.as_buffer()
    is_cut = limit is not None and len(content) > 4 * limit
    return (content[: 4 * limit + 4] if limit is not None else content).to_pybytes(), is_cut
