"""The text between marks is what its pattern finds, also in a text of only marks."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from polyturn.core.tagged import between

TEXTS = st.lists(st.sampled_from(["<a>", "</a>", "x", "\n", "<a", "a>"]), max_size=12).map("".join)


@given(TEXTS)
def test_between_finds_what_the_pattern_finds(text: str) -> None:
    assert between(text, "<a>", "</a>") == re.findall(r"<a>(.*?)</a>", text, re.DOTALL)


def test_text_of_marks_alone_takes_linear_time() -> None:
    """The pattern would take hours, and nothing else would run meanwhile."""
    assert between("<a>" * 1_000_000, "<a>", "</a>") == []
