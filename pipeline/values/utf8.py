"""Text that is not UTF-8, wherever in a column it is: replacement characters in its place, for readers fail at it."""

import pyarrow as pa

from pipeline.values.column_types import LISTS, is_text

MOST_BYTES = 2**31 - 1  # of the strings of one array


def readable(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """The column itself if all its text is UTF-8, in lists, structs, maps and dictionaries too; else a mended copy."""
    try:
        column.validate(full=True)  # that it is, among all else that Arrow demands
    except pa.ArrowInvalid:
        chunks = [part for chunk in column.chunks for part in _mended_parts(chunk)]
        return pa.chunked_array(chunks, column.type)
    return column


def _mended_parts(array: pa.Array) -> list[pa.Array]:
    """In parts that stay below an array's limit: a byte may become a character of three."""
    if 3 * array.nbytes <= MOST_BYTES or len(array) < 2:
        return [_mended(array)]
    middle = len(array) // 2
    return [*_mended_parts(array[:middle]), *_mended_parts(array[middle:])]


def _mended(array: pa.Array) -> pa.Array:
    type_ = array.type
    if is_text(type_):
        values = [
            value.as_buffer().to_pybytes().decode(errors="replace") if value.is_valid else None for value in array
        ]
        return pa.array(values, type_)
    if isinstance(type_, pa.BaseExtensionType):
        return pa.ExtensionArray.from_storage(type_, _mended(array.storage))
    if pa.types.is_dictionary(type_) and is_text(type_.value_type):
        # Two values may have become one, and a dictionary holds each once.
        found = _mended(array.dictionary).take(array.indices).dictionary_encode()
        indices = found.indices.cast(type_.index_type)
        return pa.DictionaryArray.from_arrays(indices, found.dictionary, ordered=type_.ordered)
    if pa.types.is_struct(type_):
        children = [_mended(array.field(index)) for index in range(type_.num_fields)]
        return pa.StructArray.from_arrays(children, fields=list(type_), mask=array.is_null())
    if not (pa.types.is_map(type_) or any(is_list(type_) for is_list in LISTS)):
        return array
    own = 1 if pa.types.is_fixed_size_list(type_) else 2  # buffers: validity, offsets, sizes of a list view
    if pa.types.is_list_view(type_) or pa.types.is_large_list_view(type_):
        own = 3
    return pa.Array.from_buffers(
        type_, len(array), array.buffers()[:own], array.null_count, array.offset, [_mended(array.values)]
    )
