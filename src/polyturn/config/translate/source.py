"""Source: the input of converters, another trainer's configuration, and their output, the native one.

    values {"actor.clip_ratio": 0.2}   ->   native {"algorithm": {"loss": {"clip_low": 0.2}}}, and origins

Each converter is one function that reads and writes only this object.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(slots=True, kw_only=True)
class Source:
    """The input and output of a converter."""

    values: dict[str, Any] = field(default_factory=dict)
    """Key -> value of the whole tree, with aliases resolved."""
    written: set[str] = field(default_factory=set)
    """The keys that a file or an override wrote."""
    read: set[str] = field(default_factory=set)
    """The keys that converters have read."""
    native: dict[str, Any] = field(default_factory=dict)
    origin: dict[tuple[str | int, ...], str] = field(default_factory=dict)
    """Native key -> the original key that determined it."""
    paths: list[tuple[str, ...]] = field(default_factory=list)
    """Native keys whose values are paths."""
    notes: dict[str, str] = field(default_factory=dict)
    """Key -> note that replaces the note in the table."""
    problems: list[tuple[str, str]] = field(default_factory=list)

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of a key; the default if it is missing or null."""
        self.read.add(key)
        value = self.values.get(key)
        return default if value is None else value

    def polyturn(self, key: str) -> Any:
        """Return the value of a native key in the section `polyturn`, or None."""
        at: Any = self.values.get("polyturn")
        for part in key.split("."):
            at = at.get(part) if isinstance(at, Mapping) else None
        return at

    def sections(self, *names: str) -> dict[str, Any]:
        """Return whole sections of the composed tree."""
        out: dict[str, Any] = {}
        for key, value in self.values.items():
            *above, last = key.split(".")
            if (above or [last])[0] in names:
                at = out
                for part in above:
                    at = at.setdefault(part, {})
                at[last] = value
        return out

    def number(self, key: str, default: float) -> Any:
        """Return a value that must be a number; other values are refused."""
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            self.refuse(key, "it must be a number")
            return default
        return value

    def whole(self, key: str, default: int, *, least: int | None = None) -> int:
        """Return a value that must be a whole number of at least `least`; other values are refused."""
        value = self.number(key, default)
        if not math.isfinite(value) or value != int(value) or (least is not None and value < least):
            self.refuse(key, "it must be a whole number" + ("" if least is None else f", {least} or more"))
            return default
        return int(value)

    def switch(self, key: str, *, default: bool = False) -> bool:
        """Return a value that must be true, false, or empty (false); other values are refused."""
        value = self.get(key, default) or False
        if not isinstance(value, bool):
            self.refuse(key, "it must be true or false")
        return bool(value)

    def text(self, key: str, default: str) -> str:
        """Return a value that must be a text; other values are refused."""
        value = self.get(key, default)
        if not isinstance(value, str):
            self.refuse(key, "it must be a text")
            return default
        return value

    def put(self, native_key: str, value: Any, *, by: str) -> None:
        """Set a native key, determined by the original key `by`. A part's name and its options may be set in any order."""
        *above, last = native_key.split(".")
        at = self.native
        for part in above:
            if isinstance(at.get(part), str):
                at[part] = {"name": at[part]}
            at = at.setdefault(part, {})
        if isinstance(at.get(last), dict) and isinstance(value, str):
            at[last]["name"] = value
        else:
            at[last] = value
        self.origin[tuple(native_key.split("."))] = by

    def put_path(self, native_key: str, value: Any, *, by: str) -> None:
        """Set a native key to a path, or a list of them, relative to the working directory."""
        self.put(native_key, value, by=by)
        self.paths.append(tuple(native_key.split(".")))

    def put_model(self, native_key: str, name: str, *, by: str) -> None:
        """Set a native key to a model's folder, or to a name on the hub, if there is no such folder."""
        path = Path(os.path.expanduser(name))
        is_folder = path.is_dir() or name.startswith(("~", "/", "."))
        (self.put_path if is_folder else self.put)(native_key, str(path) if is_folder else name, by=by)

    def refuse(self, key: str, why: str) -> None:
        """Record that a key is not supported."""
        self.problems.append((key, why))
