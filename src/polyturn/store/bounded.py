"""Parquet files of others, read within bounds that follow from their own size.

    0.5 MB of Parquet  ->  a column of one text of 1 MB that 100,000 rows repeat, a column of a billion zeros, …

A file may say in few bytes that a value is repeated, so its size says nothing about the memory that its rows take. What its
columns take is computed from the headers of their pages before anything is decoded; texts are read as Parquet's
dictionaries, each value held once; and what the rows take with every text written out is counted before they leave this
module.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from polyturn.core.errors import DataError
from polyturn.store.pages import sum_pages

ALLOWANCE = 256 << 20
"""Bytes that the columns of any file may take."""
PER_BYTE = 32
"""Further bytes that they may take for each byte of the file: text and tokens compress less than that."""
MAX_ROWS = 1_000_000
"""Rows of a file; a part that this library writes holds those of 64 steps."""
_PAGE_BYTES = 2048
"""Bytes that a page counts for beside its values: it takes time, though it may hold nothing."""
_WIDTHS = {"BOOLEAN": 1, "INT32": 4, "FLOAT": 4, "INT64": 8, "DOUBLE": 8, "INT96": 12}


class BoundedFile:
    """One Parquet file."""

    def __init__(self, path: Path) -> None:
        """Read the head of a file.

        Raises:
            DataError: it has more rows than it may.
        """
        head = pq.read_metadata(path)
        if head.num_rows > MAX_ROWS:
            raise DataError(f"it has {head.num_rows} rows, and at most {MAX_ROWS} are read")
        columns = [head.schema.column(i) for i in range(len(head.schema))]
        self._head, self._paths, self._path = head, [c.path for c in columns], path
        self._file = pq.ParquetFile(
            path, read_dictionary=[c.path for c in columns if c.physical_type == "BYTE_ARRAY"], metadata=head
        )
        self.schema = self._file.schema_arrow
        self.num_rows: int = head.num_rows
        self.rows_of_groups: list[int] = [head.row_group(i).num_rows for i in range(head.num_row_groups)]
        self._limit = ALLOWANCE + PER_BYTE * path.stat().st_size
        self._num_read = 0  # bytes

    def read(self, columns: Sequence[str], *, groups: Iterable[int] | None = None) -> pa.Table:
        """Return some of the columns, or parts of columns (`paths`), of all row groups or of some, texts as dictionaries.

        Raises:
            DataError: they, and all that was read before, take more memory than the size of the file allows.
        """
        chosen = range(len(self.rows_of_groups)) if groups is None else list(groups)
        wanted = frozenset(columns)
        places = [i for i, path in enumerate(self._paths) if path in wanted or path.partition(".")[0] in wanted]
        for number in chosen:
            self._num_read += self._size(number, places)
            self._check(self._num_read)
        # One at a time: each group has dictionaries of its own, and nested texts of several cannot be read together.
        # Groups are small: to share out the columns of one among threads costs more than to read them.
        read = [self._file.read_row_group(number, columns=list(columns), use_threads=False) for number in chosen]
        return pa.concat_tables(read) if read else self._file.schema_arrow.empty_table().select(list(columns))

    def paths(self, column: str, leaf: str) -> list[str]:
        """Return the paths of a field of the structs that a column lists; none where the file has no such field."""
        return [path for path in self._paths if path.startswith(f"{column}.") and path.endswith(f".{leaf}")]

    def plain(self, table: pa.Table) -> pa.Table:
        """Return rows that `read` gave, once it is known what they take with every text written out.

        Raises:
            DataError: it is more than the size of the file allows.
        """
        self._check(sum(_text_bytes(chunk) for column in table.columns for chunk in column.chunks))
        return table

    def _size(self, group: int, places: Iterable[int]) -> int:
        """Return the size of columns of a row group, given by their places in `_paths`, in bytes."""
        of, total = self._head.row_group(group), 0
        with self._path.open("rb") as file:
            for column in map(of.column, places):
                pages = sum_pages(file, column)  # the head may say less than what a reader decodes
                values = pages.num_values * _WIDTHS.get(column.physical_type, 4)
                total += max(values, pages.num_bytes) + pages.num_pages * _PAGE_BYTES
        return total

    def _check(self, size: int) -> None:
        if size > self._limit:
            raise DataError(
                f"what is asked of it takes {size} bytes of memory, and a file of its size may take {self._limit}: "
                "it repeats values as no part of a run does"
            )


def _text_bytes(array: pa.Array) -> int:
    """Return the size of an array's texts in bytes, each counted as often as it occurs."""
    kind = array.type
    if pa.types.is_dictionary(kind):
        lengths = pc.binary_length(array.dictionary)
        return int(pc.sum(pc.take(lengths, array.indices)).as_py() or 0)
    if pa.types.is_struct(kind):
        return sum(_text_bytes(field) for field in array.flatten())
    if pa.types.is_map(kind):
        return _text_bytes(array.keys) + _text_bytes(array.items)
    if pa.types.is_list(kind):
        return _text_bytes(array.flatten())
    return 0
