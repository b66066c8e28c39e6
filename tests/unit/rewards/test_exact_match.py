"""The exact-match scorer."""

from __future__ import annotations

from typing import Any

import pytest

from polyturn.rewards.exact_match import compute_score


@pytest.mark.parametrize(
    ("text", "truth", "score"),
    [
        ("Paris", "Paris", 1.0),
        ("  PARIS.\n", "paris", 1.0),
        ("new\n york", "New York", 1.0),
        ("b", ["a", "B"], 1.0),
        ("42", 42, 1.0),
        ("It is Paris", "Paris", 0.0),
        ("", "Paris", 0.0),
        (None, "None", 0.0),
    ],
)
def test_up_to_case_space_and_a_full_stop(text: Any, truth: Any, score: float) -> None:
    assert compute_score(text, truth) == score
