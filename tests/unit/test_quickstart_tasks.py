"""The quick start's generators keep the promises that docs/demo.md makes about them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from polyturn.infra.plugins import import_attr
from polyturn.rewards import gsm8k
from support.refusals import refuses

FOLDER = Path(__file__).parents[2] / "examples" / "quickstart"


def named(name: str) -> Any:
    return import_attr(f"tasks.py:{name}", base=FOLDER)


def numbers_or_item(task: Any) -> tuple[str, ...]:
    return tuple(sorted(re.findall(r"\d+", task.extra["item"]))) or (task.extra["item"],)


def test_training_and_held_out_share_no_parameters():
    train = named("tasks")(seed=0, num_tasks=2000)
    held_out = named("tasks")(seed=7, num_tasks=512, is_held_out=True)
    assert len({t.prompt[1].text for t in held_out}) == 512
    assert not {t.extra["item"] for t in train} & {t.extra["item"] for t in held_out}


def test_same_seed_gives_the_same_tasks_of_both_families():
    first, again = (named("tasks")(seed=3, num_tasks=200) for _ in range(2))
    assert first == again
    lookups = sum(t.data_source == "quickstart/lookup" for t in first)
    assert 70 <= lookups <= 130


def test_demonstrations_end_right_and_skip_wrong_attempts():
    calculate = named("calculate")
    for conversation in named("demonstrations")(0, 500):
        assistant = [m for m in conversation.messages if m.role == "assistant"]
        final = gsm8k.extract_solution(assistant[-1].text)
        calls = [c for m in assistant for c in m.tool_calls]
        claims = [m.text.removeprefix("Easy:\n").partition(" = ")[0] for m in assistant if " = " in m.text]
        expressions = [c for c in (*claims, *(str(v) for call in calls for v in call.arguments.values())) if c[0].isdigit()]
        if expressions:
            assert final == str(calculate(expressions[-1]))
        for message, weight in zip(assistant, conversation.weights, strict=True):
            if "incorrect" in "".join(m.text for m in conversation.messages) and message is assistant[0]:
                assert weight == 0.0


def test_every_answer_has_two_digits():
    """Answers of one digit were rare, were copied wrongly, and kept runs below what the demo promises."""
    computed = {t.ground_truth for s in (False, True) for t in named("tasks")(seed=5, num_tasks=1000, is_held_out=s)}
    looked_up = {str(named("price")(f"g{i}/0", "red lamp")) for i in range(1000)}
    shown = {gsm8k.extract_solution(c.messages[-1].text) for c in named("demonstrations")(0, 1000)}
    assert {len(answer) for answer in (computed - {None}) | looked_up | shown} == {2}


def test_most_demonstrations_call_no_tool():
    """Imitation must teach the habit of answering at once; only the reward may change it."""
    last_choice: dict[str, list[bool]] = {"lookup": [], "after feedback": [], "arithmetic": []}
    for conversation in named("demonstrations")(0, 4000):
        users = [m.text for m in conversation.messages if m.role == "user"]
        family = "after feedback" if len(users) > 1 else "lookup" if '"' in users[0] else "arithmetic"
        last_choice[family].append(any(m.tool_calls for m in conversation.messages))
    share = {family: sum(calls) / len(calls) for family, calls in last_choice.items()}
    assert share["arithmetic"] == 0
    assert 0.3 < share["lookup"] < 0.45 and 0.3 < share["after feedback"] < 0.45


def test_looked_up_price_is_drawn_per_episode():
    price = named("price")
    assert len({price(f"g0/{i}", "red lamp") for i in range(64)}) > 20
    assert price("g0/0", "red lamp") == price("g0/0", "red lamp")


@pytest.mark.parametrize("expression", ["2 + 3 + 4", "9 * 8 - 7", "2 * 3 + 4", "5"])
def test_calculator_is_right(expression: str):
    assert named("calculate")(expression) == eval(expression)


@pytest.mark.parametrize("expression", ["2 +", "__import__('os')", "9 ** 9", "", "1+1"])
def test_calculator_refuses_other_texts(expression: str):
    refuses(lambda: named("calculate")(expression), Exception, "write numbers joined by")
