"""Single values as a column holds them: texts that UTF-8 cannot write, and JSON of what has no fixed shape.

    "plain"           <->  "plain"
    broken bytes      <->  ESCAPE + JSON of the text
    {"x": 1.0}        <->  '{"x":1.0}'

Whatever is written here comes back equal, bit for bit.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from polyturn.core.serde import to_json

_ESCAPE = "\ue000json:"
"""Opens a text that UTF-8 cannot write (a lone surrogate, from a tool that read broken bytes), kept as JSON."""


def clean(text: str | None) -> str | None:
    """Return a text as Parquet can hold it."""
    if text is None or text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return _ESCAPE + json.dumps(text)
    return _ESCAPE + json.dumps(text) if text.startswith(_ESCAPE) else text


def restore(text: str | None) -> Any:
    """Return the text that `clean` was given."""
    return json.loads(text[len(_ESCAPE) :]) if text is not None and text.startswith(_ESCAPE) else text


def restore_all(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a struct with each of its texts restored."""
    return {name: restore(value) if isinstance(value, str) else value for name, value in row.items()}


def as_json(value: Any) -> str:
    """Return a value of any shape as JSON in a string."""
    return json.dumps(to_json(value), separators=(",", ":"))


def read_json(text: str | None) -> Any:
    """Parse the output of `as_json`; {} if nothing was recorded."""
    return {} if text is None else json.loads(text)


def read_floats(text: str | None) -> dict[str, float]:
    """Return the numbers that `as_json` wrote."""
    return {k: float(v) if isinstance(v, str) else v for k, v in read_json(text).items()}
