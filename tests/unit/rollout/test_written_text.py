"""The model's own text stays on its message, whatever a parser makes of it."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from polyturn.core.messages import Message
from polyturn.rewards.options import CallOptions
from polyturn.rewards.router import RewardRouter
from polyturn.rollout.edits import as_written
from polyturn.rollout.episode import Episode
from polyturn.rollout.limits import Limits
from polyturn.rollout.open_turn import OpenTurn
from polyturn.rollout.run_episode import run_episode
from polyturn.rollout.scheduler import MultiTurnScheduler
from polyturn.testing.episodes import scripted_context, task
from polyturn.tokens.parsers import parsers

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
CHANNELS = "<|channel|>analysis<|message|>Two.<|end|><|start|>assistant<|channel|>final<|message|>Four."


def parser(name: str, reasoning: str) -> Any:
    return parsers.resolve(name)(reasoning=reasoning)


@pytest.mark.parametrize(
    ("name", "reasoning", "text"),
    [
        ("hermes", "mistral", "[THINK]x[/THINK]\\boxed{4}"),
        ("hermes", "qwen3", "\\boxed{4} <think>x</think>"),
        ("hermes", "qwen3", "<think>\n\nx\n</think>\n\n\\boxed{4}"),
        ("hermes", "qwen3", "<think>x, and"),
        ("hermes", "qwen3", f"Before. {CALL} Between. {CALL} Behind."),
        ("gpt-oss", "gpt-oss", CHANNELS),
    ],
)
@pytest.mark.parametrize("which", ["turn", "turns"])
async def test_reward_reads_the_text_of_any_parser(name: str, reasoning: str, text: str, which: Any) -> None:
    texts: list[str] = []

    def score(solution_str: str) -> float:
        texts.append(solution_str)
        return 0.0

    router = RewardRouter(function=score, calls=CallOptions(text=which))
    context = scripted_context([text], limits=Limits(max_turns=1))
    context = dataclasses.replace(context, parser=parser(name, reasoning), rewarder=router)
    trajectory = await run_episode(context, task(data_source=None), id="e0")
    assert trajectory.turns[0].message.written == text
    assert texts == [text]


async def test_form_is_scored_as_the_model_wrote_it() -> None:
    row = task(data_source="hiyouga/geometry3k")
    context = scripted_context(["\\boxed{4} <think>x</think>"], limits=Limits(max_turns=1))
    reward = (await run_episode(context, row, id="e0")).reward
    assert reward is not None and reward.total == pytest.approx(0.9), "right, in the wrong form"


class Tips(MultiTurnScheduler):
    """Lets the message go on once after a tip: after the turn's text, or after a text of the scheduler's own."""

    stateless = True

    def __init__(self, text: str | None = None) -> None:
        self.text = text

    async def step(self, episode: Episode, turn: OpenTurn) -> Any:
        if turn.index > 0:
            return None
        if self.text is None:
            return episode.go_on(" Check: 42. ", keep="It is 4")
        return episode.rewrite([*episode.messages[:-1], {"role": "assistant", "content": self.text}], goes_on=True)


@pytest.mark.parametrize(("scheduler", "own"), [(Tips(), "It is 4So 5."), (Tips("It is 42. "), "So 5.")])
async def test_text_of_a_message_that_went_on_is_the_models_alone(scheduler: Tips, own: str) -> None:
    context = scripted_context(["It is 41.", "So 5."], scheduler=scheduler)
    trajectory = await run_episode(context, task(), id="e0")
    assert "42" in trajectory.messages[-1].text
    assert [trajectory.text_of(which) for which in ("answer", "turn")] == [own, own]


def test_changed_message_is_not_rendered_as_written() -> None:
    message = Message(role="assistant", content="4", reasoning="2 and 2", written="<think>2 and 2</think>4")
    changed = [dataclasses.replace(message, **{field: "other"}) for field in ("content", "reasoning")]
    assert [m.reasoning for m in as_written([message, *changed], opened="")] == [None, "2 and 2", "other"]
