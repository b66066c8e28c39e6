"""The GSM8K scorer, by example and against a slow reference that reads the text character by character."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyturn.core.errors import ConfigError
from polyturn.rewards.gsm8k import SEARCHED_CHARS, compute_score, extract_solution
from support.refusals import refuses


@pytest.mark.parametrize(
    ("text", "strict", "flexible"),
    [
        ("#### 72", "72", "72"),
        ("a #### 1 b #### -2", "-2", "-2"),
        ("#### 1,234", "1234", "1,234"),
        ("#### 72.", "72.", "72."),
        ("#### $72", None, "72"),
        ("####72", None, "72"),
        ("I think 5 or 6", None, "6"),
        ("it is 7 . ", None, "7"),
        ("none", None, None),
        ("", None, None),
        (None, None, None),
        ([{"type": "text", "text": "#### 72"}], None, None),
    ],
)
def test_solution_is_extracted_as_users_rely_on(text: object, strict: str | None, flexible: str | None) -> None:
    assert extract_solution(text) == strict
    assert extract_solution(text, "flexible") == flexible


@pytest.mark.parametrize(
    ("text", "truth", "score"),
    [
        ("#### 72", "72", "2.0"),
        ("#### 72", 72, "2.0"),
        ("#### 72" + "x" * 293, "72", "2.0"),
        ("#### 72" + "x" * 294, "72", "0"),
        ("#### 71", "72", "0.1"),
        ("72", "72", "0"),
        ("#### 72", None, "0.1"),
    ],
)
def test_answer_is_right_of_the_form_or_neither(text: str, truth: Any, score: str) -> None:
    """The score is compared as it is printed: models read it, and policies were trained on "0" where no answer is found."""
    assert str(compute_score(text, truth, score=2.0, format_score=0.1)) == score
    refuses(lambda: compute_score(text, truth, method="strcit"), ConfigError, "'strcit'")


def reference(text: str, method: str) -> str | None:
    end, found, i = text[-300:], [], 0
    while i < len(end):
        start = i
        if method == "strict":
            if not end.startswith("#### ", i):
                i += 1
                continue
            i += 5
            start = i
        if i < len(end) and end[i] == "-":
            i += 1
        first_digit = i
        while i < len(end) and end[i] in "0123456789.,":
            i += 1
        if i > first_digit:
            found.append(end[start:i])
        else:
            i = start + (method == "flexible")
    if method == "strict":
        return found[-1].replace(",", "") if found else None
    # verl, too, gives a full stop where nothing else was found.
    return next((f for f in reversed(found) if f not in ("", ".")), found[0] if found else None)


@given(
    text=st.lists(st.sampled_from(["#### ", "#", "-", "1", "72", ",", ".", " ", "x", "٣", "\n", "x" * 100])).map("".join),
    method=st.sampled_from(["strict", "flexible"]),
)
def test_extraction_agrees_with_a_slow_reference(text: str, method: str) -> None:
    assert extract_solution(text, method) == reference(text, method)


@pytest.mark.parametrize("method", ["strict", "flexible"])
def test_only_the_end_of_a_hostile_text_is_searched(method: str) -> None:
    for unit in ("#### -", "1,", "-"):
        end = (unit * SEARCHED_CHARS)[-SEARCHED_CHARS:]
        assert extract_solution("#### 7\n" + unit * 500_000, method) == extract_solution(end, method)
