"""The GSM8K scorer, by example and against a slow reference that reads the text character by character."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyturn.core.errors import ConfigError
from polyturn.rewards.gsm8k import SEARCHED_CHARS, compute_score, extract_solution


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
def test_what_is_taken_for_the_answer(text: object, strict: str | None, flexible: str | None) -> None:
    """Users of this answer format rely on these corner cases."""
    assert extract_solution(text) == strict
    assert extract_solution(text, "flexible") == flexible


def test_only_the_last_300_characters_are_searched() -> None:
    assert compute_score("#### 72" + "x" * 293, "72") == 1.0
    assert compute_score("#### 72" + "x" * 294, "72") == 0.0


def test_the_three_scores() -> None:
    assert compute_score("#### 72", "72", score=2.0, format_score=0.1) == 2.0
    assert compute_score("#### 71", "72", score=2.0, format_score=0.1) == 0.1
    assert compute_score("72", "72", score=2.0, format_score=0.1) == 0.0


def test_a_number_is_compared_as_text_and_no_ground_truth_is_never_right() -> None:
    assert compute_score("#### 72", 72) == 1.0
    assert compute_score("#### 72", None) == 0.0


def test_an_unknown_method_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="'strcit'"):
        compute_score("x", "y", method="strcit")


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
def test_it_agrees_with_the_reference(text: str, method: str) -> None:
    assert extract_solution(text, method) == reference(text, method)


@pytest.mark.parametrize("method", ["strict", "flexible"])
def test_no_more_than_the_end_of_a_hostile_text_is_looked_at(method: str) -> None:
    for unit in ("#### -", "1,", "-"):
        end = (unit * SEARCHED_CHARS)[-SEARCHED_CHARS:]
        assert extract_solution("#### 7\n" + unit * 500_000, method) == extract_solution(end, method)


def test_no_answer_is_shown_as_a_whole_number_and_a_wrong_one_is_not() -> None:
    """Texts that models read hold the score as it is printed, and policies were trained on them."""
    assert [str(compute_score(text, "72")) for text in ("none", "#### 71", "#### 72")] == ["0", "0.0", "1.0"]
