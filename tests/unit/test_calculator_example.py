"""The calculator example: held-out products are never shown in training, and the reward reads the last number."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import polyturn
from polyturn.config.load import load_config
from polyturn.config.models import RunConfig
from polyturn.core.generation import FinishReason
from polyturn.core.trajectory import StopReason, Turn
from polyturn.infra.plugins import import_attr
from support.benchmark import load_benchmark
from support.refusals import refuses

FOLDER = Path(__file__).parents[2] / "examples" / "calculator"


def part(name: str):
    return import_attr(f"products.py:{name}", base=FOLDER)


def asked(prompts) -> set[tuple[str, ...]]:
    return {tuple(re.findall(r"\d+", prompt)) for prompt in prompts}


def test_held_out_products_are_never_shown_in_training() -> None:
    held_out = asked(row["prompt"] for row in part("tasks")(num_tasks=500, is_held_out=True))
    trained = asked(row["prompt"] for row in part("tasks")(num_tasks=2000))
    demonstrated = asked(c.messages[0].text for c in part("demonstrations")(num_conversations=300))
    assert len(demonstrated) > 290 and not held_out & (trained | demonstrated)


def test_demonstrations_mostly_guess() -> None:
    conversations = part("demonstrations")(num_conversations=160)
    calls = [c for c in conversations if any(message.tool_calls for message in c.messages)]
    assert (len(conversations), len(calls)) == (160, 16)


def test_controls_take_the_tool_or_the_later_turns_away() -> None:
    options = {
        name: load_config(RunConfig, FOLDER / "config.yaml", overrides).config
        for name, overrides in load_benchmark("example_learns").CONTROLS.items()
    }
    assert {name: (len(o.rollout.tools.functions), o.rollout.limits.max_turns) for name, o in options.items()} == {
        "shuffled": (1, 3), "without_tool": (0, 3), "one_turn": (1, 1)
    }  # fmt: skip
    guesses = part("demonstrations")(**options["without_tool"].warm_start.kwargs)
    assert not any(message.tool_calls for conversation in guesses for message in conversation.messages)


def test_calculator_multiplies_and_refuses_other_text() -> None:
    assert part("calculate")("412 * 367") == "151204"
    refuses(lambda: part("calculate")("import os"), polyturn.ToolError, "import os")


@pytest.mark.parametrize(
    ("reply", "reward"), [("It is 151204.", 1.0), ("151,204", 1.0), ("151204 or 3", 0.0), ("No idea", 0.0)]
)
def test_reward_reads_the_last_number(reply: str, reward: float) -> None:
    turn = Turn(index=0, message=polyturn.Message(role="assistant", content=reply), finish_reason=FinishReason.STOP)
    task = polyturn.Task(id="t", prompt=(polyturn.Message(role="user", content="?"),), ground_truth="151204")
    trajectory = polyturn.Trajectory(id="t/0", task=task, segments=(), turns=(turn,), stop_reason=StopReason.STOP)
    assert part("is_right")(trajectory) == reward
