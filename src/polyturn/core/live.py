"""LiveObject: a function, class or object of a Python program where a configuration file has an import path.

    polyturn.train(tools=[price], …)     rollout.tools.functions == [LiveObject(price)]
    config.yaml of that run              rollout: {tools: {functions: ["<live __main__:price>"]}}

The text tells a reader where the object came from. It cannot be turned back into the object: a run that began with objects
continues from the program that has them. An object reaches the run's other processes with the configuration, by pickle.
"""

from __future__ import annotations

from typing import Any, TypeAlias

from pydantic_core import PydanticSerializationUnexpectedValue

_START, _END = "<live ", ">"


class LiveObject:
    """An object, and the name of where it came from; messages show the name."""

    __slots__ = ("name", "target")

    def __init__(self, target: Any, *, name: str | None = None) -> None:
        """Hold an object.

        Args:
            target: The object.
            name: By default the module and the name of a function or class, or those of its class.
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
"""The type of a key that takes a registered name, an import path, or from a program the object itself."""


def names_code(value: NameOrObject) -> bool:
    """Return whether a key has an object or an import path, where it also takes other names."""
    return isinstance(value, LiveObject) or ":" in value


def stands_for_object(value: Any) -> bool:
    """Return whether a configuration file has the text of a live object as this value."""
    return isinstance(value, str) and value.startswith(_START) and value.endswith(_END)


def _written(value: Any) -> str:
    """Return the text of a live object in JSON; of a union, another member writes any other value."""
    if not isinstance(value, LiveObject):
        raise PydanticSerializationUnexpectedValue(f"{value!r:.100} is not a live object")
    return str(value)


def _name_of(target: Any) -> str:
    named = target if hasattr(target, "__qualname__") else getattr(target, "__wrapped__", type(target))
    return f"{named.__module__}:{named.__qualname__}".replace(".<locals>", "")
