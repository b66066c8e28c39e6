"""The results of `step` and `check_finished` of a scheduler, and their effects."""

from __future__ import annotations

from typing import Any

import pytest

import polyturn
from polyturn.core.errors import SchedulerError
from polyturn.core.lifecycle import StopReason
from polyturn.core.messages import Message
from polyturn.rollout.run_episode import run_episode
from polyturn.rollout.scheduler import GivenReward, MultiTurnScheduler, Reply
from polyturn.testing.episodes import scripted_context, task
from support.parts import Steps, add, call
from support.refusals import refuses

CALL = call("add", a=1, b=1)


USER = Message(role="user", content="go on")


@pytest.mark.parametrize(
    ("returned", "messages"),
    [
        (None, ()),
        ("go on", (USER,)),
        ({"role": "user", "content": "go on"}, (USER,)),
        (USER, (USER,)),
        ([{"role": "user", "content": "go on"}, USER], (USER, USER)),
        (Reply(messages=(USER,)), (USER,)),
        (Reply(messages=({"role": "user", "content": "go on"},)), (USER,)),  # type: ignore[arg-type]
    ],
)
def test_step_may_return_text_messages_or_a_reply(returned: Any, messages: tuple[Message, ...]) -> None:
    assert Reply.of(returned).messages == messages
    for wrong in (3, [3], ["go on"], Reply(messages=(3,))):  # type: ignore[arg-type]
        refuses(lambda wrong=wrong: Reply.of(wrong), SchedulerError, "returned", "3" if wrong != ["go on"] else "['go on']")


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (True, StopReason.STOP),
        (StopReason.ENV_DONE, StopReason.ENV_DONE),
        (StopReason.MAX_TOKENS, StopReason.MAX_TOKENS),
        (StopReason.ABORTED, StopReason.ABORTED),
        (StopReason.ERROR, StopReason.ERROR),
    ],
)
async def test_check_finished_ends_the_episode_before_any_answer(answer: Any, reason: StopReason):
    class Ends(MultiTurnScheduler):
        async def check_finished(self, episode: Any, turn: Any) -> Any:
            return answer

    t = await run_episode(scripted_context([CALL], tools=[add], scheduler=Ends()), task(), id="e")
    assert t.stop_reason is reason
    assert len(t.turns) == 1
    assert t.turns[0].tool_results == ()
    assert t.is_failed == reason.is_failure and (t.reward is None) == reason.is_failure


async def test_reply_that_is_done_is_recorded_and_not_encoded() -> None:
    scheduler = Steps(lambda episode, turn: Reply(messages=(USER,), is_done=True, info={"hint": 1}))
    t = await run_episode(scripted_context(["x"], scheduler=scheduler), task(), id="e")
    assert t.stop_reason is StopReason.ENV_DONE
    assert t.turns[0].observation == (USER,)
    assert t.turns[0].info == {"hint": 1}
    assert len(t.segments[0].spans) == 2


async def test_scheduler_is_copied_for_every_trajectory_unless_shared():
    class Counts(MultiTurnScheduler):
        num_turns = 0

        def step(self, episode: Any, turn: Any) -> str | None:
            self.num_turns += 1
            return "again" if self.num_turns < 3 else None

    own, shared = Counts(), Counts()
    shared.shared = True
    for scheduler, lengths in ((own, [3, 3]), (shared, [3, 1])):
        context = scripted_context(["x"], scheduler=scheduler)
        turns = [len((await run_episode(context, task(), id=f"e{i}")).turns) for i in range(2)]
        assert turns == lengths
    assert own.num_turns == 0 and shared.num_turns == 4


@pytest.mark.parametrize("reward", [0.5, GivenReward(score="good"), GivenReward(score=float("nan"))])  # type: ignore[arg-type]
async def test_invalid_reward_of_a_scheduler_fails_its_trajectory(reward: Any) -> None:
    def step(episode: Any, turn: Any) -> None:
        episode.given_reward = reward

    t = await run_episode(scripted_context(["x"], scheduler=Steps(step)), task(), id="e")
    assert t.is_failed and "episode.given_reward" in str(t.error)


async def test_asking_a_missing_interaction_is_an_error() -> None:
    scheduler = Steps(lambda episode, turn: episode.ask_partner(turn))
    with pytest.raises(polyturn.PolyturnError, match=r"'t0'.*`has_partner`"):
        await run_episode(scripted_context(["x"], scheduler=scheduler), task(), id="e")
