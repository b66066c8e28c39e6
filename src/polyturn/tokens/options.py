"""Options of reading a completion's text.

rollout: {parser: hermes}
rollout: {parser: {name: hermes, reasoning: deepseek_r1, calls_in_reasoning: true}}
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from polyturn.infra.live import NameOrObject


@dataclass(frozen=True, slots=True, kw_only=True)
class ParserOptions:
    """The parsers of tool calls and reasoning in the model's text."""

    PART: ClassVar[str] = "any parser"

    name: NameOrObject = "auto"
    """A registered name or `file.py:Class`; auto: the one that reads what the chat template writes."""
    reasoning: str | None = None
    """Name of the reasoning format; null for the one that the chat template, or else the parser's family, writes."""
    calls_in_reasoning: bool = False
    """Execute calls inside reasoning too; they are thoughts otherwise."""
