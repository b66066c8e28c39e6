"""Parse a Google-style docstring: the descriptions of the function and of each parameter.

Search the index.                 description "Search the index."

Args:
    query: What to look           parameters {"query": "What to look for."}
        for.
"""

from __future__ import annotations

import re
from typing import NamedTuple

_SECTION = re.compile(r"^(Args|Arguments|Parameters|Returns|Return|Yields|Raises|Example|Examples|Note|Notes):\s*$")
_PARAMETER = re.compile(r"^\*{0,2}(\w+)\s*(?:\([^)]*\))?:\s*(.*)$")


class Docstring(NamedTuple):
    """The parts of a docstring that a tool's schema needs."""

    description: str
    parameters: dict[str, str]


def read_docstring(text: str) -> Docstring:
    """Parse a docstring without common indentation, as `inspect.getdoc` returns it."""
    head: list[str] = []
    parameters: dict[str, list[str]] = {}
    section, indent, current = "", 0, ""
    for line in text.splitlines():
        if match := _SECTION.match(line):
            section, indent, current = match[1], 0, ""
        elif not section:
            head.append(line)
        elif section in ("Args", "Arguments", "Parameters") and line.strip():
            depth = len(line) - len(line.lstrip())
            indent = indent or depth
            if depth <= indent and (entry := _PARAMETER.match(line.strip())):
                current = entry[1]
                parameters[current] = [entry[2]]
            elif current:
                parameters[current].append(line.strip())
    described = {name: " ".join(filter(None, lines)) for name, lines in parameters.items()}
    return Docstring("\n".join(head).strip(), {name: words for name, words in described.items() if words})
