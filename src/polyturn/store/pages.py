"""Sums over the pages of a Parquet column by their own headers, which say what a reader decodes.

    column chunk:  [header | dictionary page] [header | data page: 20,000 values] [header | data page: 3,812 values] …

The file's footer says the same of the whole column, and a file that is made to take memory says there what it likes. A
header is a struct in Thrift's compact protocol, of which three numbers are read here and everything else is skipped.
"""

from __future__ import annotations

import io
from typing import Any, BinaryIO, NamedTuple

from polyturn.core.errors import DataError

_MAX_HEADER = 1 << 16
"""Bytes of a header, statistics included."""
_MAX_DEPTH = 8
_MAX_PAGES = 1 << 15
"""Pages of a column chunk: about thirty gigabytes, as they are written."""
_UNCOMPRESSED, _COMPRESSED, _NUM_VALUES = 2, 3, 1
_DATA, _DATA_V2, _DICTIONARY = 5, 8, 7
_FIXED_BYTES = {3: 1, 7: 8, 13: 16}


class PageSums(NamedTuple):
    """Sums over the pages of a column chunk."""

    num_values: int
    num_bytes: int
    """Decompressed."""
    num_pages: int


def sum_pages(file: BinaryIO, column: Any) -> PageSums:
    """Read the headers of all pages of a column chunk.

    Args:
        file: The Parquet file.
        column: Its `ColumnChunkMetaData`.

    Raises:
        DataError: they are damaged.
    """
    offset = column.data_page_offset
    if column.has_dictionary_page and 0 < column.dictionary_page_offset < offset:
        offset = column.dictionary_page_offset
    end = offset + column.total_compressed_size
    num_values = num_bytes = num_pages = 0
    what = f"of the column {column.path_in_schema!r}"
    while offset < end:
        num_pages += 1
        if num_pages > _MAX_PAGES:
            raise DataError(f"a part {what} has more than {_MAX_PAGES} pages; write the file again, with larger ones")
        file.seek(offset)
        stream = io.BytesIO(file.read(_MAX_HEADER))
        try:
            header = _read_struct(stream, depth=0)
            kinds = [header[kind] for kind in (_DATA, _DATA_V2, _DICTIONARY) if kind in header]
            num_values += sum(max(0, kind[_NUM_VALUES]) for kind in kinds)
            num_bytes += max(0, header[_UNCOMPRESSED])
            size = header[_COMPRESSED]
        except (KeyError, IndexError, TypeError, ValueError, OverflowError) as problem:
            raise DataError(f"the header of a page {what} cannot be read; write the file again") from problem
        offset += stream.tell() + max(0, size)
    return PageSums(num_values, num_bytes, num_pages)


def _read_struct(stream: io.BytesIO, *, depth: int) -> dict[int, Any]:
    """Return the numbers and structs of a struct by the ids of their fields."""
    values: dict[int, Any] = {}
    field = 0
    while byte := stream.read(1)[0]:
        field = field + (byte >> 4) if byte >> 4 else _number(stream)
        values[field] = _read_value(stream, byte & 15, depth=depth)
    return values


def _read_value(stream: io.BytesIO, kind: int, *, depth: int) -> Any:
    if depth > _MAX_DEPTH:
        raise ValueError
    if kind in (1, 2):  # true and false, which have no bytes of their own in a field
        return None
    if kind in (4, 5, 6):
        return _number(stream)
    if kind in _FIXED_BYTES:
        return stream.read(_FIXED_BYTES[kind])
    if kind == 8:
        return stream.read(_varint(stream))
    if kind in (9, 10):
        head = stream.read(1)[0]
        size = _varint(stream) if head >> 4 == 15 else head >> 4
        return [_read_item(stream, head & 15, depth=depth + 1) for _ in range(min(size, _MAX_HEADER))]
    if kind == 12:
        return _read_struct(stream, depth=depth + 1)
    raise ValueError(kind)


def _read_item(stream: io.BytesIO, kind: int, *, depth: int) -> Any:
    return stream.read(1) if kind in (1, 2) else _read_value(stream, kind, depth=depth)


def _varint(stream: io.BytesIO) -> int:
    value = shift = 0
    while True:
        byte = stream.read(1)[0]
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return value
        if shift > 63:
            raise ValueError


def _number(stream: io.BytesIO) -> int:
    value = _varint(stream)
    return (value >> 1) ^ -(value & 1)
