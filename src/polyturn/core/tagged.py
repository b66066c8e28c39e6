"""Finds the text between two marks, in linear time.

    between("<a>1</a> <a>2</a> <a>", "<a>", "</a>")   ->  ["1", "2"]

The pattern `<a>(.*?)</a>` gives the same result, but takes quadratic time if closing marks are missing: it scans from each
opening mark to the end of the text. A model that writes thousands of opening marks would block the process for seconds.
"""

from __future__ import annotations


def between(text: str, opens: str, closes: str) -> list[str]:
    """Return the texts between each opening mark and the next closing mark, from left to right."""
    pieces, at = [], 0
    while (start := text.find(opens, at)) >= 0 and (end := text.find(closes, start + len(opens))) >= 0:
        pieces.append(text[start + len(opens) : end])
        at = end + len(closes)
    return pieces
