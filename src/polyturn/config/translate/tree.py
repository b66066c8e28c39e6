"""Composed: a configuration in another trainer's keys, with the file or override that wrote each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any


class Unresolved(str):
    """The expression of a value that cannot be resolved; an error is raised only if the value is needed."""

    __slots__ = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Composed:
    """A whole, resolved tree."""

    values: dict[str, Any]
    """Plain data; values that cannot be resolved are `Unresolved`."""
    origin: Mapping[str, str]
    """Dotted key -> the file or override that wrote its value; without keys of the base."""

    def where(self, key: str) -> str:
        """Return " (in run.yaml)" for a written key or section, else ""."""
        for at, origin in self.origin.items():
            if at == key or at.startswith(f"{key}.") or key.startswith(f"{at}."):
                return f" ({origin})"
        return ""

    def is_written(self, key: str) -> bool:
        """Return whether a file or an override wrote the key or a key below it."""
        return any(at == key or at.startswith(f"{key}.") for at in self.origin)


def leaves(values: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the path and value of every leaf; empty mappings are leaves."""
    if isinstance(values, Mapping) and values:
        for key, inner in values.items():
            yield from leaves(inner, (*path, str(key)))
    else:
        yield path, values
