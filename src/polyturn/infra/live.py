"""LiveObject: a function, class or object of a Python program, in a key where a configuration file has an import path.

    polyturn.train(tools=[price], …)     rollout.tools.functions == [LiveObject(price)]
    config.yaml of that run              rollout: {tools: {functions: ["<live __main__:price>"]}}

The text shows where the object came from, and cannot be turned back into the object: resume such a run from the program that
has its objects. Other processes of the run receive the object with the pickled configuration.
"""

from __future__ import annotations

from typing import Any, TypeAlias

from pydantic_core import PydanticSerializationUnexpectedValue

_START, _END = "<live ", ">"


class LiveObject:
    """An object with a name that shows its origin, for messages."""

    __slots__ = ("name", "target")

    def __init__(self, target: Any, *, name: str | None = None) -> None:
        """Hold `target`.

        Args:
            target: The object.
            name: By default the module and name of the function or class; for other objects, those of their class.
        """
        self.target = target
        self.name = name or _name_of(target)

    def __str__(self) -> str:
        return f"{_START}{self.name}{_END}"

    def __repr__(self) -> str:
        return repr(self.name)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> dict[str, Any]:
        as_text = {"type": "function-plain", "function": _written, "when_used": "json"}
        return {"type": "is-instance", "cls": cls, "serialization": as_text}


NameOrObject: TypeAlias = str | LiveObject
"""The type of a key that takes a registered name, an import path, or (from a Python program) the object itself."""


def names_code(value: NameOrObject) -> bool:
    """Return whether the value of a key is an object or an import path, not a registered name."""
    return isinstance(value, LiveObject) or ":" in value


def stands_for_object(value: Any) -> bool:
    """Return whether a value is the text that a configuration file shows for a live object."""
    return isinstance(value, str) and value.startswith(_START) and value.endswith(_END)


def _written(value: Any) -> str:
    """Return the text of a live object for JSON; raise for another value, so that pydantic tries the union's next member."""
    if not isinstance(value, LiveObject):
        raise PydanticSerializationUnexpectedValue(f"{value!r:.100} is not a live object")
    return str(value)


def _name_of(target: Any) -> str:
    named = target if hasattr(target, "__qualname__") else getattr(target, "__wrapped__", type(target))
    return f"{named.__module__}:{named.__qualname__}".replace(".<locals>", "")
