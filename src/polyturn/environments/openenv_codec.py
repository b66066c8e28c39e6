"""OpenEnvCodec: between what a model writes and reads, and the JSON actions and observations of an OpenEnv environment.

    schema {"properties": {"message": {"type": "string"}, "metadata": …}}       "hello"   ->  {"message": "hello"}
    schema {"properties": {"action_id": {"type": "integer"}, …}}                "I go 3"  ->  {"action_id": 3}
    anything else                                                               one JSON object, wherever it stands

    {"echoed": "hello"}  ->  "hello"         {"board": [0, 1], "turn": "x"}  ->  the same, as JSON

Separate from the session because it handles text only; the model reads its errors.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
_BASE = frozenset({"metadata"})
"""Fields of every action that no model writes, and of every observation that none is shown: they may hold the solution."""
MAX_VALUES = 1 << 18
"""Values of a message. More take seconds to parse, and no other thread runs meanwhile."""


def loads(text: str) -> Any:
    """Parse a server's message.

    Raises:
        ValueError: it is not JSON, or of too many values.
        RecursionError: it is nested too deeply.
    """
    if sum(map(text.count, "[{,")) > MAX_VALUES:  # those in texts as well, which costs no parsing
        raise ValueError(f"a message of more than {MAX_VALUES} values")
    return json.loads(text)


class OpenEnvCodec:
    """The actions and observations of one environment, as text."""

    def __init__(self, schema: Mapping[str, Any], *, field: str | None = None, show: str | None = None) -> None:
        """Look at the schema of the actions.

        Args:
            schema: The JSON schema that the server gives for an action.
            field: The field that the text goes into; None where the schema says it.
            show: The field of an observation that is shown; None for all.
        """
        self._fields = {k: v for k, v in (schema.get("properties") or {}).items() if k not in _BASE}
        required = [k for k in schema.get("required") or () if k in self._fields]
        only = required if len(required) == 1 else list(self._fields)
        self._field = field or (only[0] if len(only) == 1 and self._kind(only[0]) is not None else None)
        self._show = show

    def action(self, text: str) -> dict[str, Any] | str:
        """Return the action that a text means; a string is what is wrong with it, for the model."""
        if self._field is None:
            return self._object(text)
        kind = self._kind(self._field)
        if kind in (None, "string"):
            return {self._field: text}
        numbers = [value for number in _NUMBER.findall(text) if math.isfinite(value := float(number))]
        if not numbers:
            return f"There is no number in the answer. Answer with the {kind} {self._field!r}."
        return {self._field: numbers[-1] if kind == "number" else int(numbers[-1])}

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
            except (ValueError, RecursionError):  # a thousand brackets are not an object
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
