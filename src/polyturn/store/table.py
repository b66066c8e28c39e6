"""RowTable: a list of dicts that is displayed as a table in terminals and notebooks.

run.metrics[-1]["reward/mean"]      a row is a dict
run.metrics["reward/mean"]          a column; None for rows without this value
run.metrics.to_pandas()             needs pandas
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from polyturn.core.errors import ConfigError, DataError, did_you_mean

MAX_ROWS = 20
"""Largest number of rows to show, from the end."""


class RowTable(list[dict[str, Any]]):
    """Rows as dicts, and the columns to show."""

    def __init__(self, rows: Iterable[Mapping[str, Any]] = (), *, columns: Sequence[str] = ()) -> None:
        """Create a table. It shows the names in `columns` that any row has, or all columns if `columns` is empty."""
        super().__init__(dict(row) for row in rows)
        self._shown = tuple(columns)

    @property
    def columns(self) -> list[str]:
        """The columns of all rows, in order of appearance."""
        return list(dict.fromkeys(name for row in self for name in row))

    def __getitem__(self, key: Any) -> Any:
        """Return a row by number, rows by a slice, or a column by name.

        Raises:
            DataError: there is no such row, or no row has such a column.
        """
        if isinstance(key, str):
            if key not in self.columns:
                raise DataError(f"there is no column {key!r}.{did_you_mean(key, self.columns)}")
            return [row.get(key) for row in self]
        if isinstance(key, slice):
            return RowTable(super().__getitem__(key), columns=self._shown)
        if isinstance(key, int) and not -len(self) <= key < len(self):
            raise DataError(f"there is no row {key}; the table has {len(self)} rows")
        return super().__getitem__(key)

    def to_pandas(self) -> Any:
        """Return the rows as a pandas frame.

        Raises:
            ConfigError: pandas is not installed.
        """
        try:
            import pandas
        except ModuleNotFoundError as problem:
            raise ConfigError("pandas is not installed; pip install pandas, or use the rows, which are dicts") from problem
        return pandas.DataFrame(list(self), columns=self.columns)

    def _picture(self) -> tuple[list[str], list[list[str]]]:
        names = [name for name in self._shown if any(name in row for row in self)] or self.columns
        return names, [[_cell(row.get(name)) for name in names] for row in self[-MAX_ROWS:]]

    def __repr__(self) -> str:
        names, rows = self._picture()
        if not rows:
            return "no rows"
        widths = [max(len(name), *(len(row[i]) for row in rows)) for i, name in enumerate(names)]
        lines = ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in (names, *rows)]
        return "\n".join(lines + self._rest(names))

    def _repr_html_(self) -> str:
        names, rows = self._picture()
        head = "".join(f"<th>{escape(name)}</th>" for name in names)
        body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
        rest = "".join(f"<p>{escape(line)}</p>" for line in self._rest(names))
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{rest}"

    def _rest(self, names: Sequence[str]) -> list[str]:
        more = []
        if len(self) > MAX_ROWS:
            more.append(f"the last {MAX_ROWS} of {len(self)} rows")
        if (left := len(self.columns) - len(names)) > 0:
            more.append(f"{left} further columns: see .columns")
        return ["; ".join(more)] if more else []


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
