"""The conversations and tokens of each example scheduler, with a scripted model."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

import polyturn
from polyturn.core.errors import ConfigError, DataError, UnknownNameError
from polyturn.core.generation import GenerateRequest
from polyturn.core.lifecycle import StopReason
from polyturn.core.messages import Message
from polyturn.core.trajectory import Trajectory
from polyturn.rollout.limits import Limits
from polyturn.rollout.run_episode import run_episode
from polyturn.testing.episodes import scripted_context, task, tiny_codec
from polyturn.testing.suites.scheduler import check_scheduler
from polyturn.testing.tiny_models import tiny_tokenizer
from polyturn.tokens.codec import Codec
from support.example_schedulers import ImageTools, MathTips, React, ThinkingTips, Tree, of_example
from support.parts import add, call, check_tokens, seen_script
from support.templates import CHATML

CALL = call("add", a=2, b=3)


@polyturn.tool
def shout(text: str) -> str:
    """Say it loudly.

    Args:
        text: What to say.
    """
    return text.upper()


async def play(says: Any, scheduler: Any, *, tools: Any = (), limits: Limits | None = None, **fields: Any) -> Trajectory:
    rewards = {"tree": of_example("tree.py:score_tree")}
    context = scripted_context(says, scheduler=scheduler, tools=tools, limits=limits, rewards=rewards)
    t = await run_episode(context, task(**{"ground_truth": "42", **fields}), id="e")
    assert not t.is_failed, t.error
    return t


def weighted(t: Trajectory) -> list[str]:
    """Return the trained text of each segment."""
    return [tiny_codec().decode(s.token_ids[s.loss_weights > 0]) for s in t.segments]


def whole(t: Trajectory, segment: int = 0) -> str:
    return tiny_codec().decode(t.segments[segment].token_ids)


@pytest.mark.parametrize("scheduler", [MathTips, ThinkingTips, React, ImageTools])
async def test_example_keeps_the_contract(scheduler: Any) -> None:
    await check_scheduler(scheduler(), says=["a</think>b", CALL, "c"], tools=[add], ground_truth="42")


# math_tips


async def test_math_tip_replaces_the_wrong_answer() -> None:
    t = await play(["ab</think>41<answer>41</answer>", "  42"], MathTips(tip=" But wait,"))
    assert [turn.message.text for turn in t.turns][-1] == "ab But wait,  42" and len(t.segments) == 1
    assert t.messages[-1].text == "ab But wait,  42" and len(t.messages) == 2
    end = tiny_codec().decode(tiny_codec().stop_token_ids[:1])
    assert weighted(t) == [f"ab  42{end}"]
    codec = tiny_codec()
    said = [*codec.encode("ab</think>41<answer>41</answer>"), codec.stop_token_ids[0]]
    assert t.metrics["dropped_cut"] == len(said) - len(codec.encode("ab"))


@pytest.mark.parametrize(
    ("says", "turns"), [(["<answer>42</answer>"], 1), (["abc", "x"], 2), (["a</think>b", r"\boxed{42}"], 2)]
)
async def test_math_tip_is_given_once_to_a_wrong_answer(says: list[str], turns: int) -> None:
    t = await play(says, MathTips(tip=" Wait,"))
    assert len(t.turns) == turns and t.stop_reason is StopReason.STOP


# thinking_tips


async def test_thinking_tips_leave_earlier_reasoning_out() -> None:
    says = ["<think>two</think>41", "<think>four</think>\\boxed{42}"]
    t = await play(says, ThinkingTips(tip="Wrong."))
    assert len(t.segments) == 2 and len(t.turns) == 2
    assert [("two" in whole(t, i), "four" in whole(t, i)) for i in range(2)] == [(True, False), (False, True)]
    assert "41" in whole(t, 1) and "Wrong." in whole(t, 1)
    check_tokens(t)


@pytest.mark.parametrize(("says", "turns"), [(["\\boxed{42}"], 1), (["41", "\\boxed{42}"], 2), (["41", "40", "39"], 2)])
async def test_thinking_tip_is_given_once_to_a_wrong_answer(says: list[str], turns: int) -> None:
    t = await play(says, ThinkingTips())
    assert len(t.turns) == turns and len(t.segments) == 1  # without reasoning nothing is left out
    more = await play(says, ThinkingTips(max_tips=5))
    assert len(more.turns) == (turns if turns < 2 or "42" in says[1] else 6)


# react


async def test_react_call_is_answered_inside_the_message() -> None:
    says = ['I add.\nAction: add\nAction Input: {"a": 2, "b": 3}\nObservation: 7 I guess', "Final Answer: 5"]
    t = await play(says, React(), tools=[add])
    assert t.messages[-1].text == ('I add.\nAction: add\nAction Input: {"a": 2, "b": 3}\nObservation: 5\nFinal Answer: 5')
    assert len(t.segments) == 1
    assert len(t.turns) == 2
    assert t.turns[0].tool_results[0].content == "5"
    assert [(c.name, dict(c.arguments)) for c in t.turns[0].message.tool_calls] == [("add", {"a": 2, "b": 3})]
    assert "Observation" not in weighted(t)[0] and "I guess" not in whole(t)
    assert t.metrics["dropped_cut"] > 0


async def test_reward_never_reads_the_observation_inside_the_message() -> None:
    says = ['<think>hm</think>Action: add\nAction Input: {"a": 2, "b": 3}', "Final Answer: 6"]
    t = await play(says, React(), tools=[add])
    assert "Observation: 5" in t.messages[-1].text
    own = 'Action: add\nAction Input: {"a": 2, "b": 3}Final Answer: 6'
    assert t.text_of("answer") == own
    assert t.text_of("turn") == t.text_of("turns") == f"<think>hm</think>{own}"


@pytest.mark.parametrize(
    ("written", "observed"),
    [
        ("Action: shout\nAction Input: hello", "HELLO"),  # the only parameter needs no name
        ("Action: add\nAction Input: 2 and 3", "Action Input must be a JSON object with ['a', 'b']"),
        ("Action: sing\nAction Input: {}", "sing"),
    ],
)
async def test_react_input_may_be_the_only_parameter(written: str, observed: str) -> None:
    t = await play([written, "done"], React(), tools=[add, shout])
    assert observed in t.messages[-1].text.partition("Observation: ")[2]


@pytest.mark.parametrize("end", ["", " ", "\n", " {}", "\nObservation: 7", " x\n\nObservation: 7", " é\n"])
async def test_react_call_stays_in_the_turn_with_any_input(end: str) -> None:
    t = await play([f"Action: shout\nAction Input:{end}", "done"], React(), tools=[shout])
    (call,) = t.turns[0].message.tool_calls
    assert call.name == "shout" and t.turns[0].tool_results[0].call_id == call.id
    assert call.raw.startswith("Action: shout\nAction Input:") and call.raw in t.messages[-1].text


@pytest.mark.parametrize("system", [None, "Be brief."])
async def test_react_writes_tools_that_the_template_leaves_out(system: str | None) -> None:
    seen: list[GenerateRequest] = []
    context = scripted_context(seen_script(["Final Answer: 5"], seen), scheduler=React(), tools=[add])
    context.codec = Codec(tiny_tokenizer(), chat_template=CHATML)
    prompt = (*([Message(role="system", content=system)] if system else []), Message(role="user", content="2 + 3?"))
    t = await run_episode(context, dataclasses.replace(task(ground_truth="5"), prompt=prompt), id="e")
    assert not t.is_failed, t.error
    shown = context.codec.decode(seen[0].prompt_ids)
    assert "Action Input:" in shown and '"properties"' in shown and "Action: one of add" in shown
    assert shown.count("<|im_start|>system") == 1 and (system or "") in shown


class Greets(React):
    def on_trajectory_start(self, episode: Any) -> None:
        episode.rewrite([Message(role="user", content="Hello. 2 + 3?")])


async def test_react_shows_tools_of_a_subclass_with_a_start_of_its_own() -> None:
    seen: list[GenerateRequest] = []
    context = scripted_context(seen_script(["Final Answer: 5"], seen), scheduler=Greets(), tools=[add])
    context.codec = Codec(tiny_tokenizer(), chat_template=CHATML)
    await run_episode(context, task(ground_truth="5"), id="e")
    shown = context.codec.decode(seen[0].prompt_ids)
    assert "Hello." in shown and "Action: one of add" in shown


async def test_react_writes_tools_to_the_user_of_a_template_without_a_system_role() -> None:
    seen: list[GenerateRequest] = []
    context = scripted_context(seen_script(["Final Answer: 5"], seen), scheduler=React(), tools=[add])
    refuses = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    context.codec = Codec(tiny_tokenizer(), chat_template=refuses + CHATML)
    t = await run_episode(context, task(ground_truth="5"), id="e")
    assert not t.is_failed, t.error
    assert "Action: one of add" in context.codec.decode(seen[0].prompt_ids)


@pytest.mark.parametrize("written", ["9" * 5_000, "[" * 100_000, '{"a":' * 100_000, "{", "NaN"])
def test_input_that_is_not_json_is_a_call(written: str) -> None:
    schemas = [{"function": {"name": "f", "parameters": {"properties": {"text": {"type": "string"}}}}}]
    assert of_example("react.py:read_call")("f", written, schemas=schemas, id="c").arguments == {"text": written}
    two = [{"function": {"name": "f", "parameters": {"properties": {"a": {}, "b": {}}}}}]
    assert of_example("react.py:read_call")("f", written, schemas=two, id="c").error is not None


# tree


async def test_branches_of_a_tree_call_tools() -> None:
    t = await play([CALL, "c"], Tree(width=3), tools=[add])
    assert any(turn.tool_results for turn in t.turns)


async def test_tree_scores_each_turn_by_its_leaves() -> None:
    """Branches say their number; only those of the first half are right."""

    def say(request: GenerateRequest) -> str:
        number = int(request.session_id.rpartition("#")[2]) if "#" in request.session_id else 0
        return r"\boxed{42}" if number % 2 else "wrong, and long enough to be cut here"

    limits = Limits(max_tokens_per_turn=12, max_turns=4)
    t = await play(say, Tree(width=4), limits=limits, data_source="tree")
    check_tokens(t)
    first = [turn.scores["tree"] for turn in t.turns if turn.info["depth"] == 0]
    assert len(first) == 2
    assert t.reward.total == pytest.approx(sum(first) / 2)
    assert all("tree" in turn.scores for turn in t.turns)


async def test_tree_of_one_branch_continues_its_message() -> None:
    t = await play(
        ["one two three four five six", "seven"], Tree(width=1), limits=Limits(max_tokens_per_turn=5, max_turns=3)
    )
    assert len(t.segments) == 1 and t.turns[0].is_continued


# judges

build_judge = of_example("judge.py:build_judge")


@pytest.mark.parametrize(
    ("text", "score"), [("<answer>1/2</answer>", 1.0), (r"\boxed{1/2}", 1.0), ("1/2", 0.0), ("<answer>3</answer>", 0.0)]
)
def test_math_judge_reads_tags_and_boxes(text: str, score: float) -> None:
    assert of_example("judge.py:judge_math")(text, "1/2") == score


@pytest.mark.parametrize(
    ("work", "error", "key"),
    [
        (lambda: build_judge("maths"), UnknownNameError, "'maths'"),
        (lambda: build_judge(3), ConfigError, "judge is 3"),
        *(
            (lambda made=made: made.check_task(task(ground_truth=None)), DataError, "'t0'.*ground_truth")
            for made in (MathTips(), ThinkingTips(), Tree())
        ),
    ],
)
def test_judge_or_row_that_cannot_work_is_refused(work: Callable[[], Any], error: type[Exception], key: str) -> None:
    with pytest.raises(error, match=key):
        work()


async def test_judge_that_returns_no_score_fails_its_trajectory() -> None:
    context = scripted_context(["x"], scheduler=MathTips(judge=lambda text, truth: "yes"))
    t = await run_episode(context, task(), id="e")
    assert "'yes'" in (t.error or "")
