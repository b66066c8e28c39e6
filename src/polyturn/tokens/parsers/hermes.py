"""Calls as JSON between <tool_call> tags, reasoning between <think> tags: Hermes, Qwen 2.5, Qwen 3 and many others.

<tool_call>
{"name": "add", "arguments": {"a": 2, "b": 2}}
</tool_call>
"""

from __future__ import annotations

from polyturn.tokens.parsers.base import ParsedText, Tools, TurnParser, parsers, read_blocks
from polyturn.tokens.parsers.json_calls import read_call


@parsers.register("qwen25")
@parsers.register("qwen")
@parsers.register("hermes")
class HermesParser(TurnParser):
    """See the head of the file."""

    call_tags = ("<tool_call>", "</tool_call>")

    def read(self, text: str, tools: Tools) -> ParsedText:
        """Read the blocks."""
        return read_blocks(text, self.call_tags, read_call, tells_end=True)
