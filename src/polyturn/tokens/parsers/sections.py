"""Parses formats with one section around all calls.

SECTION-BEGIN CALL-BEGIN head SEPARATOR {json} CALL-END CALL-BEGIN … CALL-END SECTION-END

The marks of the section are not needed to find the calls, so a missing SECTION-END (because the turn ended or was cut) is
not an error.
"""

from __future__ import annotations

from collections.abc import Callable

from polyturn.core.messages import ToolCall
from polyturn.tokens.parsers.base import ParsedText, broken, read_blocks


def read_sections(
    text: str, section: tuple[str, str], call_tags: tuple[str, str], read: Callable[[str, str], ToolCall]
) -> ParsedText:
    """Parse the calls in a text and drop the marks of sections; a section without a call becomes a broken call."""
    pieces, calls = read_blocks(text, call_tags, read)
    begins, ends = section
    if not calls and begins in text:
        content, _, rest = text.partition(begins)
        return ParsedText(
            [content, ""], [broken(begins + rest, f"the section calls nothing; write {call_tags[0]} inside it")]
        )
    if calls:
        pieces = [p.replace(begins, "").replace(ends, "") for p in pieces]
    return ParsedText(pieces, calls)
