"""Makes text of models, environments and untrusted files safe to show on a terminal or page.

"\\x1b[2J"    ->  "�[2J"        characters that move the cursor, change colours or reverse the direction are replaced
"a\\n\\tb 中"  ->  "a\\n\\tb 中"   line breaks, tabs and spaces of any width stay
"""

from __future__ import annotations

import unicodedata

REPLACED = "\ufffd"


def printable(text: str) -> str:
    """Replace all control and formatting characters of a text, except line breaks and tabs."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" or unicodedata.category(c) == "Zs" else REPLACED for c in text)
