"""Shared by formats with one section around all calls: the calls inside, and a section that holds none.

SECTION-BEGIN CALL-BEGIN head SEPARATOR {json} CALL-END CALL-BEGIN … CALL-END SECTION-END

The marks of the section carry no meaning of their own, so a missing end mark (the turn was cut, or ended) is not an error.
"""

from __future__ import annotations

from collections.abc import Callable

from polyturn.core.messages import ToolCall
from polyturn.tokens.parsers.base import ParsedText, broken, read_blocks


def read_sections(
    text: str, section: tuple[str, str], call_tags: tuple[str, str], read: Callable[[str, str], ToolCall]
) -> ParsedText:
    """Read the calls of a text and drop the marks of sections; a section without a call is a broken one."""
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
