"""Objects of a program in the place of names: a configuration's `<live __main__:price>` stands for the function itself.

    held = hold(price)            held.label == "<live __main__:price>"
    target("<live __main__:price>")   ->  price, for as long as `held` is referenced

A configuration stays plain data that YAML could hold; its holder also holds the objects that it names. Separate from
the registry, whose names stand for the same thing in every process: a label means something only in the process that got
its object, and goes to another process with the object, by pickle. Two objects never share a label.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping
from typing import Any
from weakref import WeakValueDictionary

from polyturn.core.errors import ConfigError

_START, _END = "<live ", ">"


class LiveObject:
    """An object with the label that stands for it; the label is free again when this is garbage-collected."""

    __slots__ = ("__weakref__", "label", "target")

    def __init__(self, label: str, target: Any) -> None:
        self.label = label
        self.target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return _arrive, (self.label, self.target)


_HELD: WeakValueDictionary[str, LiveObject] = WeakValueDictionary()
_LOCK = threading.Lock()


def hold(of: Any, *, name: str | None = None) -> LiveObject:
    """Give an object a label, which stands for it as long as what is returned is kept.

    Args:
        of: The object.
        name: What the label says of it; by default the module and the name of a function or class, or those of its class.
    """
    name = name or _name_of(of)
    with _LOCK:
        number = 1
        while (entry := _HELD.get(label := _label(name, number))) is not None and entry.target is not of:
            number += 1
        return entry if entry is not None else _HELD.setdefault(label, LiveObject(label, of))


def is_label(value: Any) -> bool:
    """Return whether `value` is written as the label of a live object."""
    return isinstance(value, str) and value.startswith(_START) and value.endswith(_END)


def shown_name(name: Any) -> Any:
    """Return a name as a message says it: what a label says without its brackets, anything else as it is."""
    return name.removeprefix(_START).removesuffix(_END) if is_label(name) else name


def unnumbered(value: Any) -> Any:
    """Return plain data with the labels in it as they are where each object is the first of its name."""
    if isinstance(value, Mapping):
        return {key: unnumbered(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [unnumbered(inner) for inner in value]
    return re.sub(r" #\d+>$", _END, value) if is_label(value) else value


def is_held(label: str) -> bool:
    """Return whether an object of this process has that label."""
    return label in _HELD


def target(label: str) -> Any:
    """Return the object that has a label.

    Raises:
        ConfigError: none has, in this process.
    """
    entry = _HELD.get(label)
    if entry is None:
        raise ConfigError(
            f"{label!r} stands for an object that a Python program gave, and a file cannot hold it; go on from that "
            "program, with polyturn.train(…, resume=True) or run.resume()"
        )
    return entry.target


def _label(name: str, number: int) -> str:
    return f"{_START}{name}{'' if number == 1 else f' #{number}'}{_END}"


def _name_of(of: Any) -> str:
    named = of if hasattr(of, "__qualname__") else getattr(of, "__wrapped__", type(of))
    return f"{named.__module__}:{named.__qualname__}".replace(".<locals>", "")


def _arrive(label: str, of: Any) -> LiveObject:
    """Hold in this process what came from another one, under the label that it had there."""
    with _LOCK:
        return _HELD.setdefault(label, LiveObject(label, of))
