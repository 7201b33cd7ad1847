"""One type for a column of several tables: the narrowest that holds the values of all of them unchanged."""

from collections.abc import Callable

import pyarrow as pa
import pyarrow.types as is_

TEXTS = (is_.is_string, is_.is_large_string, is_.is_string_view)
BYTES = (is_.is_binary, is_.is_large_binary, is_.is_binary_view, is_.is_fixed_size_binary)
_WITHOUT_VIEWS = {pa.string_view(): pa.large_string(), pa.binary_view(): pa.large_binary()}
LISTS = (is_.is_list, is_.is_large_list, is_.is_fixed_size_list, is_.is_list_view, is_.is_large_list_view)


def is_text(type_: pa.DataType) -> bool:
    """Strings of one kind or another, but not dictionaries of them."""
    return any(test(type_) for test in TEXTS)


def holds_text(type_: pa.DataType) -> bool:
    """Strings, in a dictionary or not, or nothing at all."""
    values = _decoded(type_)
    return is_text(values) or is_.is_null(values)


def open_type(type_: pa.DataType) -> pa.DataType:
    """The same values, and those of other tables beside them.

    Numbers of dictionaries have at least 32 bits, for two tables together may have more values than 8 bits can count;
    fields of structs and items of lists of one size may be null, as in rows of a table that lacks the column.
    """
    if is_.is_dictionary(type_) and type_.index_type.bit_width < 32:
        return pa.dictionary(pa.int32(), type_.value_type, type_.ordered)
    return _of_parts(type_, open_type)


def without_views(type_: pa.DataType) -> pa.DataType:
    """The same values, in a type that Arrow can repeat them in: of views it repeats none."""
    return _WITHOUT_VIEWS.get(type_) or _of_parts(type_, without_views)


def _of_parts(type_: pa.DataType, changed: Callable[[pa.DataType], pa.DataType]) -> pa.DataType:
    """A type with its parts changed, as it is if nothing changes."""
    new = type_
    if is_.is_struct(type_):
        new = pa.struct([(field.name, changed(field.type)) for field in type_])
    elif is_.is_map(type_):
        new = pa.map_(changed(type_.key_type), changed(type_.item_type))
    elif is_.is_fixed_size_list(type_):
        new = pa.list_(changed(type_.value_type), type_.list_size)
    elif is_.is_list(type_) and (item := changed(type_.value_type)) != type_.value_type:
        new = pa.list_(item)
    elif is_.is_large_list(type_) and (item := changed(type_.value_type)) != type_.value_type:
        new = pa.large_list(item)
    return type_ if new == type_ else new  # as it is, with what its file says of its fields


def common_type(one: pa.DataType, other: pa.DataType) -> pa.DataType | None:
    """None where there is no type to which both can be cast with nothing lost."""
    if one == other or is_.is_null(other):
        return one
    if is_.is_null(one):
        return other
    if is_.is_dictionary(one) or is_.is_dictionary(other):
        return common_type(_decoded(one), _decoded(other))
    if _both(TEXTS, one, other):
        return pa.large_string()
    if _both(BYTES, one, other):
        return pa.large_binary()
    if _both(LISTS, one, other):
        item = common_type(one.value_type, other.value_type)
        return None if item is None else _list(one, other, item)
    if is_.is_struct(one) and is_.is_struct(other):
        return _struct(one, other)
    if is_.is_map(one) and is_.is_map(other):
        key, item = common_type(one.key_type, other.key_type), common_type(one.item_type, other.item_type)
        return None if key is None or item is None else pa.map_(key, item)
    if is_.is_decimal(one) and is_.is_decimal(other):
        return _decimal(one, other)
    return _plain(one, other)


def _both(tests: tuple[Callable[[pa.DataType], bool], ...], one: pa.DataType, other: pa.DataType) -> bool:
    return any(test(one) for test in tests) and any(test(other) for test in tests)


def _decoded(type_: pa.DataType) -> pa.DataType:
    return type_.value_type if is_.is_dictionary(type_) else type_


def _list(one: pa.DataType, other: pa.DataType, item: pa.DataType) -> pa.DataType | None:
    if any(test(type_) for test in (is_.is_list_view, is_.is_large_list_view) for type_ in (one, other)):
        return None  # Arrow casts none to a list that is whole and valid
    if is_.is_list(one) and is_.is_list(other):
        return pa.list_(item)
    if is_.is_fixed_size_list(one) and is_.is_fixed_size_list(other) and one.list_size == other.list_size:
        return pa.list_(item, one.list_size)
    return pa.large_list(item)


def _struct(one: pa.StructType, other: pa.StructType) -> pa.DataType | None:
    """Of the same fields in the same order; fields that one lacks would be guesses."""
    names = [field.name for field in one]
    if names != [field.name for field in other]:
        return None
    types = [common_type(mine.type, theirs.type) for mine, theirs in zip(one, other, strict=True)]
    return None if None in types else pa.struct(list(zip(names, types, strict=True)))


def _decimal(one: pa.DataType, other: pa.DataType) -> pa.DataType | None:
    scale = max(one.scale, other.scale)
    digits = max(one.precision - one.scale, other.precision - other.scale) + scale
    if digits > 76:
        return None
    return pa.decimal128(digits, scale) if digits <= 38 else pa.decimal256(digits, scale)


def _plain(one: pa.DataType, other: pa.DataType) -> pa.DataType | None:
    """Of numbers or times of one kind; a value that a finer unit can't hold fails the work unit of its row."""
    kinds = (is_.is_integer, is_.is_floating, is_.is_temporal)
    if not any(kind(one) and kind(other) for kind in kinds):
        return None
    if pa.uint64() in (one, other) and any(map(is_.is_signed_integer, (one, other))):
        return None  # Arrow would take one that does not hold both
    schemas = [pa.schema([("", type_)]) for type_ in (one, other)]
    try:
        return pa.unify_schemas(schemas, promote_options="permissive").field(0).type
    except (pa.ArrowTypeError, pa.ArrowInvalid):
        return None
