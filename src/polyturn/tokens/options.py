"""Options of the parsers that read a completion's text.

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
    """Name of the reasoning format; null takes the format of the chat template, or else of the parser's family."""
    calls_in_reasoning: bool = False
    """Also execute calls inside reasoning; false treats them as reasoning text."""
