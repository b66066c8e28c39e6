"""PartFile: reads columns of one Parquet file of a store. Equal texts of a row group are kept once (dictionary-encoded)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from polyturn.core.errors import DataError
from polyturn.store.schema import METADATA_KEY, VERSION

MAX_ROWS = 1_000_000
"""Largest number of rows of a file; a part written by this library has the rows of at most 64 steps."""


class PartFile:
    def __init__(self, path: Path) -> None:
        """Read the footer of a file.

        Raises:
            DataError: the file has more than `MAX_ROWS` rows, or another version of the store wrote it.
        """
        footer = pq.read_metadata(path)
        if footer.num_rows > MAX_ROWS:
            raise DataError(f"the file has {footer.num_rows} rows; at most {MAX_ROWS} are supported")
        version = (footer.metadata or {}).get(METADATA_KEY.encode(), b"none").decode(errors="replace")
        if version != str(VERSION):
            raise DataError(
                f"the part has version {version}, but this polyturn reads version {VERSION}; use the polyturn that wrote it"
            )
        columns = [footer.schema.column(i) for i in range(len(footer.schema))]
        self._paths = [column.path for column in columns]
        texts = [column.path for column in columns if column.physical_type == "BYTE_ARRAY"]
        self._file = pq.ParquetFile(path, read_dictionary=texts, metadata=footer)
        self.schema = self._file.schema_arrow
        self.num_rows: int = footer.num_rows
        self.rows_of_groups: list[int] = [footer.row_group(i).num_rows for i in range(footer.num_row_groups)]

    def read(self, columns: Sequence[str], *, groups: Iterable[int] | None = None) -> pa.Table:
        """Return columns, or fields of columns (`paths`), of all or some row groups, with texts dictionary-encoded."""
        chosen = range(len(self.rows_of_groups)) if groups is None else groups
        # One group at a time: each has its own dictionaries, and nested texts of several groups cannot be read together.
        # No threads: groups are small, so distributing columns over threads costs more than reading them.
        read = [self._file.read_row_group(number, columns=list(columns), use_threads=False) for number in chosen]
        return pa.concat_tables(read) if read else self.schema.empty_table().select(list(columns))

    def paths(self, column: str, leaf: str) -> list[str]:
        """Return the paths of a field of a column's structs; empty if the file has no such field."""
        return [path for path in self._paths if path.startswith(f"{column}.") and path.endswith(f".{leaf}")]
