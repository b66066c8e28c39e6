"""Characters that a terminal would obey are replaced, and other text stays."""

from __future__ import annotations

import pytest

from polyturn.core.printable import printable


@pytest.mark.parametrize("text", ["plain", "two\nlines\tand a tab", "中文\u3000和空格", "no\u00a0break", "👍 é", ""])
def test_visible_text_stays(text: str) -> None:
    assert printable(text) == text


@pytest.mark.parametrize("sign", ["\x00", "\x07", "\x08", "\r", "\x1b", "\x7f", "\x9b", "\u202e", "\u2066", "\ud800"])
def test_control_characters_are_replaced(sign: str) -> None:
    assert printable(f"a{sign}b") == "a\ufffdb"
