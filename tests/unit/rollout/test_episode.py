"""Turns of an episode with a scripted model and real tools, interactions, rewards and tokens.

`tests/property/test_rollout_invariants.py` breaks parts at random and checks tokens and releases.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import polyturn
from polyturn.core.errors import AlignmentError, InteractionError
from polyturn.core.generation import FinishReason, GenerateRequest
from polyturn.core.lifecycle import StopReason
from polyturn.core.messages import Message, count_chars
from polyturn.core.task import InteractionRef
from polyturn.core.trajectory import Trajectory
from polyturn.interactions.gsm8k import Gsm8kInteraction
from polyturn.rollout.episode import Episode
from polyturn.rollout.history import History
from polyturn.rollout.limits import ContextPolicy, Limits
from polyturn.rollout.next_prompt import Prompt
from polyturn.rollout.run_episode import run_episode
from polyturn.testing.episodes import scripted_context, task, tiny_codec, turn_ids
from polyturn.tokens.codec import LONG_CHARS
from polyturn.tokens.delta import DeltaEncoder
from polyturn.tokens.sanity import KINDS, Difference
from support.parts import Says, Steps, add, call, check_tokens, virtual
from support.refusals import refuses, refuses_later

ADD = call("add", a=2, b=2)
GSM8K = {"gsm8k": Gsm8kInteraction({})}


def text_of(trajectory: Trajectory) -> str:
    return tiny_codec().decode(trajectory.segments[0].token_ids)


async def test_tool_call_is_answered_by_an_observation() -> None:
    t = await run_episode(scripted_context([ADD, "#### 4"], tools=[add]), task(), id="e")
    assert [turn.message.text for turn in t.turns] == ["", "#### 4"]
    assert t.turns[0].tool_results[0].content == "4"
    assert t.turns[0].observation[0].tool_call_id == t.turns[0].message.tool_calls[0].id
    assert [s.source.value for s in t.segments[0].spans] == ["prompt", "sampled", "observation", "sampled"]
    assert t.stop_reason is StopReason.STOP
    assert t.reward.total == 1.0
    assert [name for name in t.metrics if name.startswith("sanity_")] == ["sanity_checked"]
    check_tokens(t)


async def test_interaction_answers_until_the_answer_is_right() -> None:
    context = scripted_context(["#### 5", "#### 4"], interactions=GSM8K)
    t = await run_episode(context, task(interaction="gsm8k"), id="e")
    assert t.turn_scores == (0.0, 1.0)
    assert t.stop_reason is StopReason.ENV_DONE
    assert "Your response is incorrect!" in text_of(t)
    assert "Your response is correct!" not in text_of(t), "the last reply is recorded, not encoded"
    assert t.turns[1].observation[0].text == "Your response is correct!"
    assert context.num_live_interactions == 0
    check_tokens(t)


async def test_running_episodes_are_counted_by_state() -> None:
    seen: list[dict[str, int]] = []

    def look() -> None:
        seen.append({state.value: number for state, number in context.running.items() if number})

    def says(request: GenerateRequest) -> str:
        look()
        return "#### 5" if len(seen) > 2 else ADD

    class Looks(Says):
        async def generate_response(self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any) -> Any:
            look()
            return True, "done", 0.0, {}

    @polyturn.tool
    async def add(a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: The first.
            b: The second.
        """
        look()
        return a + b

    context = scripted_context(says, tools=[add], interactions={"gsm8k": Looks()})
    await run_episode(context, task(interaction="gsm8k"), id="e")
    assert seen == [{"generating": 1}, {"tool_calling": 1}, {"generating": 1}, {"interacting": 1}]
    assert not any(context.running.values())


async def test_optional_interaction_is_used_where_one_is_configured() -> None:
    unnamed = InteractionRef(name="gsm8k", kwargs={"ground_truth": "4"}, is_optional=True)
    row = dataclasses.replace(task(), interaction=unnamed)
    assert len((await run_episode(scripted_context(["#### 5"]), row, id="e")).turns) == 1
    assert len((await run_episode(scripted_context(["#### 5", "#### 4"], interactions=GSM8K), row, id="e")).turns) == 2
    strict = scripted_context(["#### 5"], interactions=GSM8K, require_interaction_name=True)
    await refuses_later(lambda: run_episode(strict, row, id="e"), InteractionError, "'name'", "interaction_kwargs")
    refuses(lambda: Episode(strict, task(interaction="gsm9k"), id="e"), Exception, "'gsm9k'", "'gsm8k'", "interaction_map")


@pytest.mark.parametrize(
    ("limits", "num_turns", "num_replies"),
    [(Limits(max_turns=1), 1, 0), (Limits(max_user_turns=2), 3, 2), (Limits(max_turns=1, max_user_turns=2), 1, 0)],
)
async def test_last_allowed_turn_is_scored_and_its_reply_not_encoded(
    limits: Limits, num_turns: int, num_replies: int
) -> None:
    t = await run_episode(scripted_context(["#### 5"], interactions=GSM8K, limits=limits), task(interaction="gsm8k"), id="e")
    assert t.stop_reason is StopReason.MAX_TURNS
    assert t.turn_scores == (0.0,) * num_turns
    assert text_of(t).count("incorrect") == num_replies


class Fails(Says):
    """Fails in one of its methods."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where

    async def start_interaction(self, instance_id: str | None = None, **kwargs: Any) -> str:
        own = await super().start_interaction(instance_id, **kwargs)
        if self.where == "start":
            raise ValueError("no")
        return own

    async def generate_response(self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any) -> Any:
        if self.where == "reply":
            raise ValueError("broken\nsimulator")
        if self.where == "hang":
            await asyncio.sleep(3600)
        return "not a tuple"


@pytest.mark.parametrize(
    ("where", "error", "end"),
    [
        ("start", "ValueError: no", "end e"),  # it may have taken something under the id that it was given
        ("reply", "ValueError: broken simulator", "end own-e"),
        ("hang", "took longer than 60 s", "end own-e"),
        ("shape", "(should_terminate, content, score, metadata)", "end own-e"),
    ],
)
@virtual
async def test_failing_interaction_is_finalized(where: str, error: str, end: str) -> None:
    user = Fails(where)
    context = scripted_context(["hello"], interactions={"user": user})
    t = await run_episode(context, task(interaction="user", data_source=None), id="e")
    assert t.is_failed
    assert error in (t.error or "")
    assert "\n" not in (t.error or "")
    assert t.reward is None
    assert [each for each in user.calls if each.startswith("end")] == [end]
    assert context.num_live_interactions == 0


async def test_own_id_metadata_and_scores_of_an_interaction_are_kept() -> None:
    user = Says(score=0.25)
    user.answer = (False, "again", 0.25, {"seen": 1})
    context = scripted_context(["hello"], interactions={"user": user}, limits=Limits(max_turns=2))
    t = await run_episode(context, task(interaction="user", data_source=None), id="e")
    assert user.calls == ["start", "reply own-e 2", "reply own-e 4", "end own-e"]
    assert [turn.info for turn in t.turns] == [{"seen": 1}] * 2
    assert t.reward.total == 0.25


async def test_final_turn_without_reply_is_scored() -> None:
    user = Says()
    limits = Limits(max_tokens_per_turn=3)
    context = scripted_context(["a very long answer"], interactions={"user": user}, limits=limits)
    t = await run_episode(context, task(interaction="user", data_source=None), id="e")
    assert t.stop_reason is StopReason.LENGTH
    assert t.turns[0].finish_reason is FinishReason.LENGTH
    assert user.calls == ["start", "score own-e", "end own-e"]
    assert t.turn_scores == (0.5,)


async def test_lost_engine_and_raising_reward_fail_the_trajectory() -> None:
    t = await run_episode(scripted_context([ADD, OSError("gone")], tools=[add]), task(), id="e")
    assert t.is_failed
    assert len(t.turns) == 1
    assert "gone" in (t.error or "")

    def reward(trajectory: Trajectory) -> float:
        raise KeyError("missing")

    t = await run_episode(scripted_context(["#### 4"], rewards={"mine": reward}), task(data_source="mine"), id="e")
    assert t.is_failed
    assert t.reward is None
    assert "missing" in (t.error or "")


async def test_broken_invariant_ends_the_run() -> None:
    def fail(episode: Any, turn: Any) -> None:
        raise RuntimeError("mine")

    t = await run_episode(scripted_context(["hello"], scheduler=Steps(fail)), task(), id="e")
    assert t.is_failed
    assert "RuntimeError: mine (test_episode.py, line " in (t.error or "")
    misaligned = Steps(lambda episode, turn: episode.weigh(turn, [1.0]))
    with pytest.raises(AlignmentError, match="1 weights"):
        await run_episode(scripted_context(["hello"], scheduler=misaligned), task(), id="e")


async def test_scheduler_can_set_the_weights_of_a_turn() -> None:
    def first_turn_off(episode: Any, turn: Any) -> str | None:
        if turn.index:
            return None
        episode.weigh(turn, np.zeros(len(turn.completion.token_ids)))
        return "again"

    t = await run_episode(scripted_context(["one", "two"], scheduler=Steps(first_turn_off)), task(), id="e")
    assert t.segments[0].loss_weights.sum() == len(turn_ids("two"))


async def test_prompt_that_fills_the_context_is_a_truncation() -> None:
    t = await run_episode(scripted_context(["x"], limits=Limits(max_context=4)), task(), id="e")
    assert t.stop_reason is StopReason.CONTEXT_FULL
    assert t.turns == ()


@pytest.mark.parametrize(
    ("policy", "num_turns", "num_segments"),
    [(ContextPolicy.STOP, 3, 1), (ContextPolicy.COMPACT, 4, 3), (ContextPolicy.DROP_OLDEST, 6, 5)],
)
async def test_full_context_is_handled_by_its_policy(policy: ContextPolicy, num_turns: int, num_segments: int) -> None:
    limits = Limits(max_context=220, max_turns=6, max_tokens_per_turn=20, context_policy=policy)
    user = Says("a long reply " * 8)
    context = scripted_context(["an answer of some length"], interactions={"user": user}, limits=limits)
    t = await run_episode(context, task(interaction="user", data_source=None), id="e")
    assert t.stop_reason.is_truncation
    assert (len(t.turns), len(t.segments)) == (num_turns, num_segments)
    assert all(len(s) <= 220 for s in t.segments)
    check_tokens(t)


async def test_megabytes_of_an_environment_are_not_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    longest: list[int] = []
    extend = DeltaEncoder.extend

    def measured(self: DeltaEncoder, messages: Sequence[Message], **options: Any) -> Any:
        longest.append(max((len(m.text) for m in messages), default=0))
        return extend(self, messages, **options)

    monkeypatch.setattr(DeltaEncoder, "extend", measured)
    context = scripted_context(
        ["a", "b"], scheduler=Steps(lambda episode, turn: "x " * 10_000_000), limits=Limits(max_context=2000, max_turns=4)
    )
    trajectory = await run_episode(context, task(), id="e")
    assert (trajectory.error, trajectory.stop_reason, len(trajectory.turns)) == (None, StopReason.CONTEXT_FULL, 1)
    assert max(longest, default=0) < LONG_CHARS


async def test_prompt_of_megabytes_fails_its_trajectory() -> None:
    trajectory = await run_episode(scripted_context(["a"], limits=Limits(max_context=2000)), task("x " * 10_000_000), id="e")
    assert "DataError" in (trajectory.error or "") and "2000" in (trajectory.error or "")


async def test_event_loop_goes_on_while_long_text_is_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop itself lets the encoding end, which waits for it."""
    loop, loop_went_on, next_prompt = asyncio.get_running_loop(), asyncio.Event(), History.next_prompt

    def gated(self: History) -> Prompt:
        if count_chars(self.to_encode) > LONG_CHARS:
            asyncio.run_coroutine_threadsafe(loop_went_on.wait(), loop).result(timeout=120)
        return next_prompt(self)

    monkeypatch.setattr(History, "next_prompt", gated)
    running = asyncio.create_task(run_episode(scripted_context(["a"]), task("x" * 2 * LONG_CHARS), id="e"))
    loop_went_on.set()
    assert (await running).error is None


def test_every_nth_episode_is_compared_with_a_full_render() -> None:
    context = scripted_context([], sanity_every=3)
    assert [context.is_sanity_due() for _ in range(5)] == [True, False, False, True, False]
    for mode in ("off", "disable"):
        assert not scripted_context([], sanity_every=1, sanity_mode=mode).is_sanity_due()


def test_copied_context_shares_no_private_state() -> None:
    context = scripted_context([])
    context.encoder_for(task())
    context.is_sanity_due()
    copied = dataclasses.replace(context, sanity_every=2)
    private = [one.name for one in dataclasses.fields(context) if not one.init]
    assert not [name for name in private if getattr(copied, name) is getattr(context, name)]
    assert copied.reported is context.reported and copied.running is context.running


@pytest.mark.parametrize(("mode", "logged"), [("strict", KINDS), ("ignore_strippable", ("other",))])
def test_strict_mode_logs_each_kind_once(mode: str, logged: tuple[str, ...], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="polyturn")
    context = scripted_context([], sanity_mode=mode)
    for kind in (*KINDS, *KINDS):
        context.warn_of(Difference(kind=kind, index=3, full_index=3, block=0, kept="a b", full="a  b"), where="g1/0")
    lines = caplog.messages
    messages = {kind: line for kind in KINDS for line in lines if f"{kind} at token 3" in line}
    assert len(lines) == len(messages) and tuple(messages) == logged
    assert [r.levelname for r in caplog.records if r.getMessage() != messages["other"]] == ["INFO"] * (len(logged) - 1)
    assert caplog.records[-1].levelname == "WARNING", "only an unexplained difference may be an error"
    explained = [kind for kind, text in messages.items() if "tokenization_sanity_check_mode: ignore_strippable" in text]
    assert explained == [kind for kind in logged if kind != "other"]
    assert all("\n" not in line and len(line) < 280 for line in lines)
