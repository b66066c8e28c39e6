"""OpenEnvCodec: converts a model's text to JSON actions of an OpenEnv environment, and observations to text.

    schema {"properties": {"message": {"type": "string"}, "metadata": …}}       "hello"   ->  {"message": "hello"}
    schema {"properties": {"action_id": {"type": "integer"}, …}}                "I go 3"  ->  {"action_id": 3}
    any other schema                                                            the last JSON object in the text

    {"echoed": "hello"}  ->  "hello"         {"board": [0, 1], "turn": "x"}  ->  the same, as JSON

The model reads the errors of a conversion.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
_BASE = frozenset({"metadata"})
"""Fields of actions and observations that are hidden from the model, because they may contain the solution."""
MAX_VALUES = 1 << 18
"""Largest number of values in a message. More would take seconds to parse, during which no other thread runs."""


def loads(text: str) -> Any:
    """Parse a server's message.

    Raises:
        ValueError: the message is not JSON, or has too many values.
        RecursionError: the message is nested too deeply.
    """
    if sum(map(text.count, "[{,")) > MAX_VALUES:  # also counts brackets inside strings; exact counting would need a parse
        raise ValueError(f"the message has more than {MAX_VALUES} values")
    return json.loads(text)


class OpenEnvCodec:
    """Converts the actions and observations of one environment from and to text."""

    def __init__(self, schema: Mapping[str, Any], *, field: str | None = None, show: str | None = None) -> None:
        """Create a codec from the schema of the actions.

        Args:
            schema: The server's JSON schema of an action.
            field: The field that takes the text; None derives it from the schema.
            show: The field of an observation to show; None shows all.
        """
        self._fields = {k: v for k, v in (schema.get("properties") or {}).items() if k not in _BASE}
        required = [k for k in schema.get("required") or () if k in self._fields]
        only = required if len(required) == 1 else list(self._fields)
        self._field = field or (only[0] if len(only) == 1 and self._kind(only[0]) is not None else None)
        self._show = show

    def action(self, text: str) -> dict[str, Any] | str:
        """Return the action in a text, or a string with the error for the model."""
        if self._field is None:
            return self._object(text)
        kind = self._kind(self._field)
        if kind in (None, "string"):
            return {self._field: text}
        numbers = [number for number in _NUMBER.findall(text) if math.isfinite(float(number))]
        if not numbers:
            return f"There is no number in the answer. Answer with the {kind} {self._field!r}."
        last = numbers[-1]
        return {self._field: float(last) if kind == "number" else int(last.partition(".")[0])}

    def shown(self, observation: Any) -> str:
        """Return an observation as text, without its metadata unless `show` names that."""
        if not isinstance(observation, Mapping):
            return "" if observation is None else str(observation)
        if self._show is not None:
            return _text(observation.get(self._show))
        fields = {k: v for k, v in observation.items() if k not in _BASE and v not in (None, "", [], {})}
        return _text(next(iter(fields.values()))) if len(fields) == 1 else _text(fields) if fields else ""

    def _kind(self, field: str) -> str | None:
        kind = self._fields.get(field, {}).get("type")
        return kind if kind in ("string", "integer", "number") else None

    def _object(self, text: str) -> dict[str, Any] | str:
        decoder = json.JSONDecoder()
        parsed = None
        at = text.find("{")
        while at >= 0:
            try:
                value, end = decoder.raw_decode(text, at)
            except (ValueError, RecursionError):  # for example a thousand brackets
                at = text.find("{", at + 1)
                continue
            parsed = value
            at = text.find("{", end)
        if isinstance(parsed, dict):
            return parsed
        names = ", ".join(map(repr, self._fields)) or "the action's fields"
        return f"There is no JSON object in the answer. Answer with one object with {names}."


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
