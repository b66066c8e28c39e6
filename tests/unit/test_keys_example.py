"""The example of keys without signs: held-out numbers are never shown in training, and the reward reads the last number."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from pathlib import Path

import pytest

import polyturn
from polyturn.config.load import load_config
from polyturn.config.models import RunConfig
from polyturn.core.generation import FinishReason
from polyturn.core.plugins import import_attr
from polyturn.core.trajectory import StopReason, Turn
from support.benchmark import load_benchmark
from support.refusals import refuses

FOLDER = Path(__file__).parents[2] / "examples" / "keys"


def part(name: str):
    return import_attr(f"keys.py:{name}", base=FOLDER)


def asked(prompts) -> set[tuple[str, ...]]:
    return {tuple(re.findall(r"\d+", prompt)) for prompt in prompts}


def test_held_out_numbers_are_never_shown_in_training() -> None:
    held_out = asked(row["prompt"] for row in part("tasks")(num_tasks=500, is_held_out=True))
    trained = asked(row["prompt"] for row in part("tasks")(num_tasks=2000))
    demonstrated = asked(c.messages[0].text for c in part("demonstrations")(num_conversations=300))
    assert len(demonstrated) > 250 and not held_out & (trained | demonstrated)


def test_demonstrations_press_every_key_as_often_at_every_sign() -> None:
    pairs = Counter(
        (c.messages[0].text.split()[3], c.messages[1].tool_calls[0].arguments["keys"].split()[1])
        for c in part("demonstrations")(num_conversations=99)
    )
    assert pairs == dict.fromkeys(itertools.product("*+-", "ABC"), 11)


@pytest.mark.parametrize("key", "ABC")
def test_one_key_answers_a_third_of_the_evaluation(key: str) -> None:
    rows = part("tasks")(num_tasks=63, is_held_out=True)
    results = [part("press")(row["prompt"][len("What is ") : -1].replace(row["prompt"].split()[3], key)) for row in rows]
    assert sum(result == row["ground_truth"] for result, row in zip(results, rows, strict=True)) == 21


def test_controls_take_the_tool_or_the_later_turns_away() -> None:
    options = {
        name: load_config(RunConfig, FOLDER / "config.yaml", overrides).config
        for name, overrides in load_benchmark("example_learns").CONTROLS.items()
    }
    assert {name: (len(o.rollout.tools.functions), o.rollout.limits.max_turns) for name, o in options.items()} == {
        "shuffled": (1, 2), "without_tool": (0, 2), "one_turn": (1, 1)
    }  # fmt: skip
    guesses = part("demonstrations")(**options["without_tool"].warm_start.kwargs)
    assert not any(message.tool_calls for conversation in guesses for message in conversation.messages)


@pytest.mark.parametrize(("keys", "result"), [("53 A 40", "2120"), ("53 B 40", "93"), ("40 C 53", "-13")])
def test_keys_multiply_add_and_subtract(keys: str, result: str) -> None:
    assert part("press")(keys) == result


def test_calculator_refuses_other_text() -> None:
    refuses(lambda: part("press")("import os"), polyturn.ToolError, "import os")


@pytest.mark.parametrize(
    ("reply", "reward"), [("It is 2120.", 1.0), ("2,120", 1.0), ("2120 or 3", 0.0), ("-2120", 0.0), ("No idea", 0.0)]
)
def test_reward_reads_the_last_number(reply: str, reward: float) -> None:
    turn = Turn(index=0, message=polyturn.Message(role="assistant", content=reply), finish_reason=FinishReason.STOP)
    task = polyturn.Task(id="t", prompt=(polyturn.Message(role="user", content="?"),), ground_truth="2120")
    trajectory = polyturn.Trajectory(id="t/0", task=task, segments=(), turns=(turn,), stop_reason=StopReason.STOP)
    assert part("is_right")(trajectory) == reward
