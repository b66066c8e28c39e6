"""No tool calls: all text is content, and nothing is reasoning unless a reasoning format is named."""

from __future__ import annotations

from polyturn.tokens.parsers.base import ParsedText, Tools, TurnParser, parsers


@parsers.register("none")
class PlainParser(TurnParser):
    """See the head of the file."""

    default_reasoning = "none"

    def read(self, text: str, tools: Tools) -> ParsedText:
        """Return the text as content."""
        return ParsedText([text], [])
