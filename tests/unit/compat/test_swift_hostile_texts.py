"""ms-swift's shipped rewards on hostile texts: the scores of its patterns, in time linear in the text."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyturn.compat.swift import orm

FORMAT = re.compile(r"\A<think>.*?</think>\s*<answer>.*?</answer>(?![\s\S])", re.DOTALL)
REACT = re.compile(r"\A<think>.*?</think>\s*Action:.*?Action Input:.*?\Z", re.DOTALL)
ACTION = re.compile(r"Action:\s*(.*?)\s*\n\s*Action Input:\s*(.*?)\s*(?=\nObservation:|\nThought:|\nAction:|\Z)", re.DOTALL)
PIECES = ["<think>", "</think>", "<answer>", "</answer>", "Action:", "Action Input:", "\n", " ", "x", "{}", "\nObservation:"]
TEXTS = st.lists(st.sampled_from(PIECES), max_size=9).map("".join)


@given(TEXTS)
def test_forms_equal_the_patterns(text: str) -> None:
    assert orm.Format()([text]) == [float(FORMAT.match(text) is not None)]
    assert orm.ReActFormat()([text]) == [float(REACT.match(text) is not None)]
    found = ACTION.findall(text)
    assert orm.last_action(text) == (found[-1] if found else None)


HOSTILE = [
    "Action:" + "\n" * 100_000,
    "Action: a" + " Action Input:" * 50_000,
    "Action: a\nAction Input: " + "[" * 100_000,
    "<answer>" * 50_000,
    "<think>" + "</think><answer>" * 50_000 + "</answer>x",
    "\ud800",
    "",
]


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_text_scores_nothing_in_linear_time(text: str) -> None:
    """The patterns would take hours, and nothing else would run meanwhile."""
    told: dict[str, Any] = {"solution": ['Action: a\nAction Input: {"b": 1}']}
    for function in (orm.ReactORM(), orm.Format(), orm.ReActFormat(), orm.MathAccuracy()):
        assert function([text], **told) == [0.0]
