"""What an episode does, turn by turn, with a scripted model and real tools, interactions, rewards and tokens."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import numpy as np
import pytest

import polyturn
from polyturn.core.errors import AlignmentError, EngineError, InteractionError
from polyturn.core.generation import FinishReason
from polyturn.core.lifecycle import StopReason
from polyturn.core.task import InteractionRef
from polyturn.core.trajectory import SpanSource, Trajectory
from polyturn.interactions.base import BaseInteraction
from polyturn.interactions.gsm8k import Gsm8kInteraction
from polyturn.rollout.episode import Episode
from polyturn.rollout.limits import ContextPolicy, Limits
from polyturn.rollout.run_episode import run_episode
from polyturn.rollout.scheduler import MultiTurnScheduler
from polyturn.testing.episodes import scripted_context, task, tiny_codec, turn_ids
from polyturn.tokens.sanity import KINDS, Difference

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 2}}\n</tool_call>'


@polyturn.tool
async def add(a: int, b: int) -> str:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return str(a + b)


def text_of(trajectory: Trajectory) -> str:
    return tiny_codec().decode(trajectory.segments[0].token_ids)


def check_tokens(trajectory: Trajectory) -> None:
    """I2 and I3 on one trajectory: equal lengths, weight exactly on sampled tokens, spans named once by the turns."""
    for segment in trajectory.segments:
        assert len(segment.token_ids) == len(segment.loss_weights) == len(segment.logprobs) == len(segment.turn_ids)
        assert np.array_equal(segment.loss_weights > 0, segment.sampled_mask)
    refs = [r for turn in trajectory.turns for r in turn.spans]
    assert len(refs) == len(set(refs))
    assert sum(trajectory.span(r).source is SpanSource.SAMPLED for r in refs) == len(trajectory.turns)


async def test_a_tool_call_is_answered_and_the_answer_is_an_observation():
    context = scripted_context([CALL, "#### 4"], tools=[add])
    t = await run_episode(context, task(), id="e")
    assert [turn.message.text for turn in t.turns] == ["", "#### 4"]
    assert t.turns[0].tool_results[0].content == "4"
    assert t.turns[0].observation[0].tool_call_id == t.turns[0].message.tool_calls[0].id
    assert [s.source.value for s in t.segments[0].spans] == ["prompt", "sampled", "observation", "sampled"]
    assert t.stop_reason is StopReason.STOP
    assert t.reward is not None and t.reward.total == 1.0
    assert t.metrics["sanity_checked"] == 1.0 and not [
        k for k in t.metrics if k.startswith("sanity_") and k != "sanity_checked"
    ]
    check_tokens(t)


async def test_sampled_ids_are_kept_exactly_also_when_they_are_not_what_the_tokenizer_would_write():
    odd = [ord(c) for c in "4 "]  # single-byte ids: a tokenization that no encoder would choose
    context = scripted_context(["x"])
    context.engine._function = lambda request: np.array([*odd, *context.codec.stop_token_ids[:1]], np.int32)  # type: ignore[attr-defined]
    t = await run_episode(context, task(), id="e")
    sampled = t.span(t.turns[0].spans[0])
    assert sampled.ids.tolist() == [*odd, context.codec.stop_token_ids[0]]


async def test_an_interaction_answers_until_the_answer_is_right_and_its_last_reply_is_not_encoded():
    interaction = Gsm8kInteraction({"name": "gsm8k"})
    context = scripted_context(["#### 5", "#### 4"], interactions={"gsm8k": interaction})
    t = await run_episode(context, task(interaction="gsm8k"), id="e")
    assert t.turn_scores == (0.0, 1.0)
    assert t.stop_reason is StopReason.ENV_DONE
    assert "Your response is incorrect!" in text_of(t)
    assert "Your response is correct!" not in text_of(t)
    assert t.turns[1].observation[0].text == "Your response is correct!"
    assert t.segments[0].spans[-1].source is SpanSource.SAMPLED
    assert context.num_live_interactions == 0
    check_tokens(t)


async def test_an_optional_interaction_is_used_where_one_is_configured_and_may_have_to_be_named():
    unnamed = InteractionRef(name="gsm8k", kwargs={"ground_truth": "4"}, is_optional=True)
    row = dataclasses.replace(task(), interaction=unnamed)
    gsm8k = {"gsm8k": Gsm8kInteraction({})}
    assert len((await run_episode(scripted_context(["#### 5"]), row, id="e")).turns) == 1
    assert len((await run_episode(scripted_context(["#### 5", "#### 4"], interactions=gsm8k), row, id="e")).turns) == 2
    strict = scripted_context(["#### 5"], interactions=gsm8k, require_interaction_name=True)
    with pytest.raises(InteractionError, match=r"^'name' key is required in interaction_kwargs"):
        await run_episode(strict, row, id="e")


async def test_the_last_turn_that_max_turns_allows_is_still_shown_to_the_interaction_and_scored():
    context = scripted_context(
        ["#### 5", "#### 4"], interactions={"gsm8k": Gsm8kInteraction({})}, limits=Limits(max_turns=1)
    )
    t = await run_episode(context, task(interaction="gsm8k"), id="e")
    assert t.stop_reason is StopReason.MAX_TURNS
    assert t.turn_scores == (0.0,)
    assert "incorrect" not in text_of(t), "feedback that no turn follows is recorded, not encoded"


async def test_max_user_turns_bounds_the_replies_that_are_shown_and_the_turn_after_the_last_is_scored():
    context = scripted_context(["#### 5"], interactions={"gsm8k": Gsm8kInteraction({})}, limits=Limits(max_user_turns=2))
    t = await run_episode(context, task(interaction="gsm8k"), id="e")
    assert len(t.turns) == 3 and t.turn_scores == (0.0, 0.0, 0.0)
    assert text_of(t).count("incorrect") == 2
    assert t.stop_reason is StopReason.MAX_TURNS


class Counting(BaseInteraction):
    """Counts what the framework calls; may fail on request."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self.calls: list[str] = []
        self.fail = config.get("fail")

    async def start_interaction(self, instance_id: str | None = None, **kwargs: Any) -> str:
        self.calls.append("start")
        if self.fail == "start":
            raise ValueError("no")
        return f"own-{instance_id}"

    async def generate_response(self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any) -> Any:
        self.calls.append(f"reply {instance_id} {len(messages)} {kwargs['name']}")
        if self.fail == "reply":
            raise ValueError("broken\nsimulator")
        if self.fail == "hang":
            await asyncio.sleep(60)
        if self.fail == "shape":
            return "not a tuple"
        return False, "again", 0.25, {"seen": len(messages)}

    async def calculate_score(self, instance_id: str = "", **kwargs: Any) -> float:
        self.calls.append(f"score {instance_id}")
        return 0.5

    async def finalize_interaction(self, instance_id: str = "", **kwargs: Any) -> None:
        self.calls.append(f"end {instance_id}")


async def test_the_id_that_start_returns_is_used_and_metadata_and_scores_are_kept():
    user = Counting({})
    context = scripted_context(["hello"], interactions={"user": user}, limits=Limits(max_turns=2))
    t = await run_episode(context, task(interaction="user", data_source=None), id="e")
    assert user.calls == ["start", "reply own-e 2 user", "reply own-e 4 user", "end own-e"]
    assert [turn.info for turn in t.turns] == [{"seen": 2}, {"seen": 4}]
    assert t.reward is not None and t.reward.total == 0.25


async def test_calculate_score_is_called_once_only_for_a_final_turn_that_no_reply_scored():
    user = Counting({})
    context = scripted_context(["a very long answer"], interactions={"user": user}, limits=Limits(max_tokens_per_turn=3))
    t = await run_episode(context, task(interaction="user", data_source=None), id="e")
    assert t.stop_reason is StopReason.LENGTH and t.turns[0].finish_reason is FinishReason.LENGTH
    assert user.calls == ["start", "score own-e", "end own-e"]
    assert t.turn_scores == (0.5,)


@pytest.mark.parametrize(
    ("fail", "says"),
    [
        ("reply", "raised ValueError: broken simulator"),
        ("hang", "took longer than 0.05 s"),
        ("shape", "must return (should_terminate, content, score, metadata)"),
    ],
)
async def test_an_interaction_that_fails_ends_its_trajectory_with_the_error_and_is_finalized_once(fail: str, says: str):
    user = Counting({"fail": fail})
    context = scripted_context(["hello"], interactions={"user": user}, interaction_timeout_s=0.05)
    t = await run_episode(context, task(interaction="user", data_source=None), id="e")
    assert t.is_failed and t.error is not None and says in t.error and "\n" not in t.error
    assert t.reward is None and len(t.turns) == 1
    assert user.calls.count("end own-e") == 1 and context.num_live_interactions == 0


async def test_a_start_that_fails_is_ended_too_because_it_may_have_taken_something():
    user = Counting({"fail": "start"})
    t = await run_episode(scripted_context(["x"], interactions={"user": user}), task(interaction="user"), id="e")
    assert t.is_failed and user.calls == ["start", "end e"]


async def test_a_broken_tool_call_is_an_observation_and_the_episode_goes_on():
    broken = '<tool_call>\n{"name": "add", "arguments": {"a": 2,}\n</tool_call>'
    context = scripted_context([broken, "#### 4"], tools=[add])
    t = await run_episode(context, task(), id="e")
    assert not t.is_failed and len(t.turns) == 2
    assert t.turns[0].tool_results[0].error is not None
    assert t.segments[0].loss_weights.sum() == t.num_sampled_tokens


async def test_an_engine_that_is_lost_fails_the_trajectory_and_keeps_the_turns_so_far():
    context = scripted_context([CALL, OSError("gone")], tools=[add])
    t = await run_episode(context, task(), id="e")
    assert t.is_failed and len(t.turns) == 1 and t.error is not None and "gone" in t.error


async def test_a_reward_that_raises_is_never_zero():
    def reward(trajectory: Trajectory) -> float:
        raise KeyError("missing")

    context = scripted_context(["#### 4"], rewards={"mine": reward})
    t = await run_episode(context, task(data_source="mine"), id="e")
    assert t.is_failed and t.reward is None and t.error is not None and "missing" in t.error


async def test_a_scheduler_that_raises_fails_its_trajectory_and_a_broken_invariant_ends_the_run():
    class Raises(MultiTurnScheduler):
        async def step(self, episode: Any, turn: Any) -> None:
            raise RuntimeError("mine")

    class Misaligned(MultiTurnScheduler):
        async def step(self, episode: Any, turn: Any) -> None:
            episode.weigh(turn, [1.0])

    t = await run_episode(scripted_context(["hello"], scheduler=Raises()), task(), id="e")
    said = "SchedulerError: the scheduler's step raised RuntimeError: mine (test_episode.py, line "
    assert t.is_failed and (t.error or "").startswith(said), "with the line of the scheduler's file"
    with pytest.raises(AlignmentError, match="1 weights for"):
        await run_episode(scripted_context(["hello"], scheduler=Misaligned()), task(), id="e")


async def test_a_scheduler_of_ones_own_is_short():
    class Hint(MultiTurnScheduler):
        def step(self, episode: Any, turn: Any) -> str | None:
            return None if "####" in turn.message.text else "Write #### and the answer."

    t = await run_episode(scripted_context(["it is 4", "#### 4"], scheduler=Hint()), task(), id="e")
    assert [m.role for m in t.messages] == ["user", "assistant", "user", "assistant"]
    assert t.reward is not None and t.reward.total == 1.0


async def test_weights_of_a_turn_can_be_set_and_only_there():
    class FirstTurnOff(MultiTurnScheduler):
        def step(self, episode: Any, turn: Any) -> str | None:
            if turn.index == 0:
                episode.weigh(turn, np.zeros(len(turn.completion.token_ids)))
                return "again"
            return None

    t = await run_episode(scripted_context(["one", "two"], scheduler=FirstTurnOff()), task(), id="e")
    assert t.segments[0].loss_weights.sum() == len(turn_ids("two"))


async def test_a_time_out_is_a_truncation_and_releases_everything():
    user = Counting({"fail": "hang"})
    context = scripted_context(["hello"], interactions={"user": user}, limits=Limits(timeout_s=0.05))
    t = await run_episode(context, task(interaction="user", data_source=None), id="e")
    assert t.stop_reason is StopReason.TIMEOUT and t.stop_reason.is_truncation and not t.is_failed
    assert user.calls.count("end own-e") == 1


async def test_cancelling_releases_everything_and_goes_on_to_the_caller():
    user = Counting({"fail": "hang"})
    context = scripted_context(["hello"], interactions={"user": user})
    running = asyncio.create_task(run_episode(context, task(interaction="user"), id="e"))
    await asyncio.sleep(0.02)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert user.calls[-1] == "end own-e" and context.num_live_interactions == 0


async def test_total_tokens_count_completions_and_observations():
    context = scripted_context(
        ["one two three"], interactions={"user": Counting({})}, limits=Limits(max_tokens=30, max_turns=None)
    )
    t = await run_episode(context, task(interaction="user", data_source=None), id="e")
    assert t.stop_reason is StopReason.MAX_TOKENS
    response = len(t.segments[0].token_ids) - len(t.segments[0].spans[0])
    assert response <= 30


async def test_a_prompt_that_fills_the_context_is_a_truncation_without_turns():
    context = scripted_context(["x"], limits=Limits(max_context=4))
    t = await run_episode(context, task(), id="e")
    assert t.stop_reason is StopReason.CONTEXT_FULL and t.turns == ()


@pytest.mark.parametrize("policy", list(ContextPolicy))
async def test_a_context_that_fills_up_is_a_policy_and_never_a_crash(policy: ContextPolicy):
    class Chatty(BaseInteraction):
        async def generate_response(self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any) -> Any:
            return False, "a long reply " * 8, 0.0, {}

    limits = Limits(max_context=220, max_turns=6, max_tokens_per_turn=20, context_policy=policy)
    context = scripted_context(["an answer of some length"], interactions={"user": Chatty({})}, limits=limits)
    t = await run_episode(context, task(interaction="user", data_source=None), id="e")
    assert not t.is_failed and t.stop_reason.is_truncation
    if policy is ContextPolicy.STOP:
        assert t.stop_reason is StopReason.CONTEXT_FULL and len(t.segments) == 1
    else:
        assert len(t.turns) == {ContextPolicy.COMPACT: 4, ContextPolicy.DROP_OLDEST: 6}[policy]
        assert len(t.segments) > 1
        assert all(turn.finish_reason is FinishReason.STOP for turn in t.turns)
    assert all(len(s) <= 220 for s in t.segments)
    weighted = sum(int((s.loss_weights > 0).sum()) for s in t.segments)
    assert weighted == t.num_sampled_tokens, "each sampled token is trained once, replayed ones weigh 0"


async def test_an_unknown_interaction_fails_with_the_sentence_users_match_on():
    context = scripted_context(["x"], interactions={"gsm8k": Gsm8kInteraction({})})
    with pytest.raises(
        Exception, match=r"Interaction 'gsm9k' not found in interaction_map\. Available interactions: \['gsm8k'\]"
    ):
        Episode(context, task(interaction="gsm9k"), id="e")


def test_engine_error_is_a_runtime_error():
    assert issubclass(EngineError, RuntimeError)


def test_the_first_episode_and_every_so_many_behind_it_are_compared_with_a_full_render():
    context = scripted_context([], sanity_every=3)
    assert [context.is_sanity_due() for _ in range(5)] == [True, False, False, True, False]


def test_only_a_difference_that_nothing_explains_is_warned_of_and_once(caplog: pytest.LogCaptureFixture):
    context = scripted_context([])
    for kind in (*KINDS, *KINDS):
        found = Difference(kind=kind, index=3, full_index=3, block=0, held="a b", full="a  b")
        context.warn_of(found, where="g1/0")
    assert [record.getMessage().partition(": ")[2][:16] for record in caplog.records] == ["other at token 3"]
