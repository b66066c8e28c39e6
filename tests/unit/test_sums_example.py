"""The task of `make demo`: held-out sums are never trained on, and the teacher names the mistake."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from polyturn.infra.plugins import import_attr

FOLDER = Path(__file__).parents[2] / "examples" / "sums"


def test_held_out_sums_are_never_trained_on() -> None:
    sums = import_attr("teacher.py:sums", base=FOLDER)
    train, held_out = (
        {row["prompt"] for row in sums(seed=0, num_held_out=64, is_held_out=is_held_out)} for is_held_out in (False, True)
    )
    assert len(held_out) == 64 and len(train) == 19 * 19 - 64 and not train & held_out


@pytest.mark.parametrize(("reply", "is_right"), [("8 + 14 = 22", True), ("22 or 23", False), ("I cannot add", False)])
def test_teacher_compares_the_last_number(reply: str, is_right: bool) -> None:
    teacher = import_attr("teacher.py:Teacher", base=FOLDER)({})
    messages = [{"role": "assistant", "content": reply}]
    is_over, feedback, score, _ = asyncio.run(teacher.generate_response("a", messages, ground_truth="22"))
    assert (is_over, score) == (is_right, float(is_right)) and ("wrong" in feedback) is not is_right
