"""Text of models, environments and files of others, as a terminal or a page may show it.

"\\x1b[2J"    ->  "�[2J"        what would move the cursor, change colours or turn the direction around is replaced
"a\\n\\tb 中"  ->  "a\\n\\tb 中"   lines, tabs and blanks of any width stay
"""

from __future__ import annotations

import unicodedata

REPLACED = "\ufffd"


def printable(text: str) -> str:
    """Return a text in which nothing is left that a reader's screen would obey."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" or unicodedata.category(c) == "Zs" else REPLACED for c in text)
