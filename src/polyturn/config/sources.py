"""Merge the values of a configuration from files and overrides, and record the source of each.

    sources.merge({"train": {"steps": 5}}, "in run.yaml")
    sources.of(("train", "steps"))   ->  " (in run.yaml)"

Mappings are merged key by key. A mapping over a text keeps the text as its name (`loss: {clip_low: 0.1}` over `loss: gspo`).
Other values replace each other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from polyturn.config.schema import KeyPath, dotted
from polyturn.infra.live import LiveObject


@dataclass(slots=True)
class Sources:
    """The merged values, and the file or override of each."""

    values: dict[str, Any] = field(default_factory=dict)
    origin: dict[KeyPath, str] = field(default_factory=dict)
    translated: Mapping[KeyPath, str] = field(default_factory=dict)
    """For values translated from another configuration: the original key with its source."""

    def merge(self, values: Mapping[str, Any], source: str) -> None:
        """Merge values over the present ones."""
        merge(self.values, values)
        for path, _ in leaves(values, ()):
            self.origin[path] = source

    def of(self, path: KeyPath) -> str:
        """Return " (in run.yaml)" for the value at `path`, "" if it is a default."""
        if (written := self._nearest(self.translated, path)) is not None:
            return f" (from {written})"
        origin = self._nearest(self.origin, path)
        return f" ({origin})" if origin else ""

    def statement(self, path: KeyPath, value_text: str) -> str:
        """Describe the value of a key with its source: "train.steps is 'many' (in run.yaml)"."""
        if (written := self._nearest(self.translated, path)) is not None:
            return f"{written} is {value_text}, as {dotted(path)}"
        return f"{dotted(path)} is {value_text}{self.of(path)}"

    def _nearest(self, origin: Mapping[KeyPath, str], path: KeyPath) -> str | None:
        # The source of the value itself, else of the nearest parent, else of a key inside a section.
        inside = [p for p in origin if p[: len(path)] == path and _is_there(self.values, p)]
        candidates = [*(path[:n] for n in range(len(path), 0, -1)), *inside]
        return next((origin[candidate] for candidate in candidates if candidate in origin), None)


def _is_there(values: Any, path: KeyPath) -> bool:
    """Return whether there is a value at `path`; an override may have replaced it."""
    for step in path:
        is_index = isinstance(values, list) and isinstance(step, int) and step < len(values)
        if not is_index and not (isinstance(values, Mapping) and step in values):
            return False
        values = values[step]
    return True


def merge(into: dict[str, Any], values: Mapping[str, Any]) -> None:
    """Merge copies of `values` into `into`, mappings key by key."""
    for key, value in values.items():
        mine = into.get(key)
        if isinstance(mine, dict) and isinstance(value, Mapping):
            merge(mine, value)
        elif isinstance(mine, str | LiveObject) and isinstance(value, Mapping):
            into[key] = {"name": mine, **_copy(value)}
        else:
            into[key] = _copy(value)


def nested(path: KeyPath, value: Any) -> Any:
    """Return nested mappings with `value` at `path`."""
    return {path[0]: nested(path[1:], value)} if path else value


def _copy(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {k: _copy(v) for k, v in value.items()}
    return [_copy(v) for v in value] if isinstance(value, list | tuple) else value


def leaves(value: Any, path: KeyPath) -> Iterator[tuple[KeyPath, Any]]:
    """Yield path and value of all values that are not containers, and of empty containers."""
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from leaves(inner, (*path, key))
    elif isinstance(value, list) and value:
        for index, inner in enumerate(value):
            yield from leaves(inner, (*path, index))
    else:
        yield path, value
