"""The size of a column is read from its pages, because the footer of a file may lie."""

from __future__ import annotations

import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from polyturn.core.errors import DataError
from polyturn.store import bounded
from polyturn.store.bounded import BoundedFile
from polyturn.store.pages import sum_pages

TABLE = pa.table(
    {
        "number": pa.array([None if i % 7 == 0 else i * 0.5 for i in range(20_000)]),
        "text": pa.array([f"text {i % 50}" for i in range(20_000)]),
        "ids": pa.array([list(range(i % 5)) for i in range(20_000)], type=pa.list_(pa.int32())),
        "flag": pa.array([i % 2 == 0 for i in range(20_000)]),
        "fields": pa.array([{"a": i, "b": str(i)} for i in range(20_000)]),
    }
)


@pytest.mark.parametrize("version", ["1.0", "2.0"])
@pytest.mark.parametrize("compression", ["none", "zstd"])
@pytest.mark.parametrize("use_dictionary", [True, False])
def test_pages_hold_what_an_honest_footer_says(tmp_path: Path, version: Any, compression: Any, use_dictionary: bool) -> None:
    path = tmp_path / "honest.parquet"
    options: dict[str, Any] = {"compression": compression, "use_dictionary": use_dictionary, "write_statistics": True}
    pq.write_table(TABLE, path, data_page_version=version, data_page_size=4096, row_group_size=9_000, **options)
    head = pq.read_metadata(path)
    with path.open("rb") as file:
        for group in range(head.num_row_groups):
            for number in range(head.num_columns):
                column = head.row_group(group).column(number)
                found = sum_pages(file, column)
                extra = found.num_values - column.num_values  # those of a dictionary
                assert 0 <= extra <= 9_000 if column.has_dictionary_page else extra == 0
                assert 0 < found.num_bytes <= column.total_uncompressed_size


def test_footer_that_understates_its_pages_is_not_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    num = 3_000_000
    path = tmp_path / "lies.parquet"
    pq.write_table(pa.table({"ids": pa.array([np.zeros(num, np.int32)])}), path, compression="zstd")
    data = path.read_bytes()
    assert len(data) < 10_000
    said, little = (_varint(2 * each, length=4) for each in (num, 100))
    footer = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    assert said in data[footer:]
    path.write_bytes(data[:footer] + data[footer:].replace(said, little))
    assert pq.read_metadata(path).row_group(0).column(0).num_values == 100
    monkeypatch.setattr(bounded, "ALLOWANCE", 1 << 20)
    with pytest.raises(DataError, match=r"takes 1200\d{4} bytes of memory, and a file of its size may take"):
        BoundedFile(path).read(["ids"])


def test_damaged_pages_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "damaged.parquet"
    pq.write_table(TABLE, path, compression="zstd")
    column = pq.read_metadata(path).row_group(0).column(0)
    data = path.read_bytes()
    refused = 0
    for place in range(4, 40):
        path.write_bytes(data[:place] + b"\xff" * 64 + data[place + 64 :])
        with path.open("rb") as file:
            try:
                sum_pages(file, column)
            except DataError as problem:
                refused += "write the file again" in str(problem)
    assert refused > 10


@pytest.mark.parametrize(
    "header",
    [b"\x19" * 65_000, b"\x1c" * 65_000, b"\x19\x1c" * 30_000, b"\x18" + b"\xff" * 9 + b"\x01", b"\x17", b"\x29\x10"],
    ids=[
        "lists in lists",
        "structs in structs",
        "structs in lists",
        "a text without end",
        "nothing",
        "structs for a number",
    ],
)
def test_forged_header_is_refused(header: bytes) -> None:
    with pytest.raises(DataError, match="the header of a page of the column 'ids' cannot be read"):
        sum_pages(io.BytesIO(header), _chunk(len(header)))


def test_empty_pages_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    empty = b"\x25\x00\x15\x00\x2c\x15\x00\x00\x00"  # no bytes, before and after, and no values
    assert sum_pages(io.BytesIO(empty * 50), _chunk(len(empty) * 50)) == (0, 0, 50)
    with pytest.raises(DataError, match="more than 32768 pages"):
        sum_pages(io.BytesIO(empty * 40_000), _chunk(len(empty) * 40_000))
    path = tmp_path / "small.parquet"
    pq.write_table(TABLE, path, data_page_size=1, row_group_size=100)
    monkeypatch.setattr(bounded, "ALLOWANCE", 1 << 20)
    monkeypatch.setattr(bounded, "PER_BYTE", 0)
    with pytest.raises(DataError, match="bytes of memory"):
        BoundedFile(path).read(["number"])


def test_row_groups_are_bounded_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, group = tmp_path / "groups.parquet", pa.table({"text": ["a" * 300_000]})
    with pq.ParquetWriter(path, group.schema, compression="zstd") as writer:
        for _ in range(20):
            writer.write_table(group)
    assert path.stat().st_size < 10_000
    monkeypatch.setattr(bounded, "ALLOWANCE", 1 << 20)
    file = BoundedFile(path)
    file.read(["text"], groups=[0])
    with pytest.raises(DataError, match="it repeats values as no part of a run does"):
        _ = [file.read(["text"], groups=[number]) for number in range(1, 20)]


def _chunk(size: int) -> Any:
    places = {"data_page_offset": 0, "has_dictionary_page": False, "total_compressed_size": size}
    return SimpleNamespace(**places, path_in_schema="ids")


def _varint(value: int, *, length: int) -> bytes:
    """Return a number in so many bytes, the last of which may say nothing."""
    parts = [(value >> 7 * i) & 127 for i in range(length)]
    return bytes([*(part | 128 for part in parts[:-1]), parts[-1]])
