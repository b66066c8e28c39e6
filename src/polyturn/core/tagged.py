"""Text between two marks, found in time linear in the text.

    between("<a>1</a> <a>2</a> <a>", "<a>", "</a>")   ->  ["1", "2"]

The pattern `<a>(.*?)</a>` finds the same, and looks from each opening mark to the end of a text that has no closing one:
seconds for some thousand marks that a model wrote, in which nothing else runs.
"""

from __future__ import annotations


def between(text: str, opens: str, closes: str) -> list[str]:
    """Return the texts between each opening mark and the closing one after it, from left to right."""
    pieces, at = [], 0
    while (start := text.find(opens, at)) >= 0 and (end := text.find(closes, start + len(opens))) >= 0:
        pieces.append(text[start + len(opens) : end])
        at = end + len(closes)
    return pieces
