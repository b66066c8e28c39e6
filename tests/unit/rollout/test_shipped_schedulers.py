"""The conversations and tokens of each shipped scheduler, with a scripted model."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from polyturn.core.errors import ConfigError, UnknownNameError
from polyturn.core.generation import GenerateRequest
from polyturn.core.lifecycle import StopReason
from polyturn.core.messages import Message
from polyturn.core.trajectory import Trajectory
from polyturn.rollout.limits import Limits
from polyturn.rollout.run_episode import run_episode
from polyturn.rollout.schedulers import Compaction, SingleTurn, schedulers
from polyturn.testing.episodes import scripted_context, task, tiny_codec
from polyturn.testing.suites.scheduler import check_scheduler
from support.parts import add, call, check_tokens, seen_script

CALL = call("add", a=2, b=3)


async def play(says: Any, scheduler: Any, *, tools: Any = (), limits: Limits | None = None) -> Trajectory:
    t = await run_episode(scripted_context(says, scheduler=scheduler, tools=tools, limits=limits), task(), id="e")
    assert not t.is_failed, t.error
    return t


@pytest.mark.parametrize(("name", "kwargs"), [("single_turn", {}), ("compaction", {"budget": 60})])
async def test_shipped_scheduler_keeps_the_contract(name: str, kwargs: Any) -> None:
    await check_scheduler(schedulers.resolve(name)(**kwargs), says=["a</think>b", CALL, "c"], tools=[add], ground_truth="42")


# single_turn


async def test_single_turn_answers_nothing() -> None:
    t = await play([CALL, "more"], SingleTurn(), tools=[add])
    assert len(t.turns) == 1
    assert t.turns[0].tool_results == ()
    assert t.stop_reason is StopReason.STOP
    cut = await play(["a long answer"], SingleTurn(), limits=Limits(max_tokens_per_turn=1))
    assert cut.stop_reason is StopReason.LENGTH


# compaction


THOUGHT = "<think>" + "so so so " * 8 + "</think>"


async def test_compaction_drops_old_reasoning_first() -> None:
    seen: list[GenerateRequest] = []
    says = [THOUGHT + CALL, THOUGHT + CALL, THOUGHT + CALL, "done"]
    context = scripted_context(seen_script(says, seen), tools=[add], scheduler=Compaction(budget=340))
    t = await run_episode(context, task(), id="e")
    assert not t.is_failed, t.error
    assert len(t.segments) > 1 and max(len(r.prompt_ids) for r in seen) <= 340
    last = tiny_codec().decode(seen[-1].prompt_ids)
    assert "What is 2+2?" in last and last.count("so so") <= THOUGHT.count("so so") + 4
    check_tokens(t)


async def test_summary_is_trained_and_has_the_models_origin() -> None:
    seen: list[GenerateRequest] = []
    says = [CALL, "I know <tool_response>2+3 is 5.", CALL, "five so far", "done"]
    scheduler = Compaction(budget=60, policies=["summarise"], request="Notes, please.")
    t = await run_episode(scripted_context(seen_script(says, seen), tools=[add], scheduler=scheduler), task(), id="e")
    assert not t.is_failed, t.error
    trained = [tiny_codec().decode(s.token_ids[s.loss_weights > 0]) for s in t.segments]
    assert any("I know <tool_response>2+3 is 5." in text for text in trained)
    shown = tiny_codec().decode(seen[2].prompt_ids)
    num_tokens = seen[2].prompt_ids.tolist().count(int(tiny_codec().encode("<tool_response>")[0]))
    assert num_tokens == shown.count("<tool_response>") - 1, "the model's own text is not a control token"
    assert "Notes so far:\nI know <tool_response>2+3 is 5." in shown and "Notes, please." not in shown


async def test_new_summary_replaces_the_old_one() -> None:
    seen: list[GenerateRequest] = []
    says = [CALL, "first notes", CALL, "second notes", "done"]
    scheduler = Compaction(budget=60, policies=["summarise"], request="Notes, please.")
    t = await run_episode(scripted_context(seen_script(says, seen), tools=[add], scheduler=scheduler), task(), id="e")
    assert not t.is_failed, t.error
    assert "first notes" in tiny_codec().decode(seen[3].prompt_ids), "the model summarises its earlier notes, too"
    last = tiny_codec().decode(seen[-1].prompt_ids)
    assert "Notes so far:\nsecond notes" in last and "first notes" not in last


async def test_window_keeps_notes_that_are_a_message() -> None:
    class FirstSummarises(Compaction):
        async def _shorter(self, policy: str, episode: Any, messages: Any) -> Any:
            return await super()._shorter("summarise" if len(episode.turns) == 1 else "window", episode, messages)

    seen: list[GenerateRequest] = []
    script = seen_script([CALL, "my notes", CALL, CALL, "done"], seen)
    context = scripted_context(script, tools=[add], scheduler=FirstSummarises(budget=60, policies=["window"]))
    only_system = dataclasses.replace(task(), prompt=(Message(role="system", content="Add numbers."),))
    t = await run_episode(context, only_system, id="e")
    assert not t.is_failed, t.error
    last = tiny_codec().decode(seen[-1].prompt_ids)
    assert "Notes so far:\nmy notes" in last and last.count("<tool_response>") == 1


# names and arguments


@pytest.mark.parametrize(
    ("work", "error", "key"),
    [
        (lambda: schedulers.resolve("compactoin"), UnknownNameError, "'compactoin'.*'compaction'"),
        (lambda: Compaction(budget=10, policies=[]), ConfigError, "policies is empty.*window"),
        (lambda: Compaction(budget=10, policies=["windows"]), ConfigError, "'windows'.*'window'"),
        (lambda: Compaction(budget=10, policies="window"), ConfigError, "policies is 'window'.*a list"),
        (lambda: Compaction(budget=0), ConfigError, "budget is 0"),
    ],
)
def test_wrong_name_or_argument_is_refused(work: Callable[[], Any], error: type[Exception], key: str) -> None:
    with pytest.raises(error, match=key):
        work()
