"""What a scheduler's author may return from `step` and `check_finished`, and what the loop makes of it."""

from __future__ import annotations

from typing import Any

import pytest

import polyturn
from polyturn.core.errors import SchedulerError
from polyturn.core.lifecycle import StopReason
from polyturn.core.messages import Message
from polyturn.interactions.base import BaseInteraction
from polyturn.rollout.run_episode import run_episode
from polyturn.rollout.scheduler import MultiTurnScheduler, Reply
from polyturn.testing.episodes import scripted_context, task

CALL = '<tool_call>\n{"name": "echo", "arguments": {"text": "hi"}}\n</tool_call>'


@polyturn.tool
def echo(text: str) -> str:
    """Say it back.

    Args:
        text: What to say.
    """
    return text


class Friendly(BaseInteraction):
    async def generate_response(self, instance_id: str, messages: Any, **kwargs: Any) -> Any:
        return True, "bye", 1.0, {}


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
    ],
)
def test_a_step_may_return_nothing_a_text_messages_or_a_reply(returned: Any, messages: tuple[Message, ...]):
    assert Reply.of(returned).messages == messages


def test_anything_else_is_refused_with_what_is_possible():
    with pytest.raises(
        SchedulerError, match="step returned 3; return None, a text, a message, a list of messages, or a Reply"
    ):
        Reply.of(3)


async def test_the_default_answers_tool_calls_first_then_asks_the_interaction_then_ends():
    context = scripted_context([CALL, "done"], tools=[echo], interactions={"friend": Friendly({})})
    t = await run_episode(context, task(interaction="friend", data_source=None), id="e")
    assert [turn.observation[0].role for turn in t.turns] == ["tool", "user"]
    assert t.stop_reason is StopReason.ENV_DONE
    alone = await run_episode(scripted_context(["done"], tools=[echo]), task(), id="e")
    assert alone.stop_reason is StopReason.STOP and alone.turns[0].observation == ()


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
async def test_check_finished_ends_the_episode_before_anything_answers(answer: Any, reason: StopReason):
    class Ends(MultiTurnScheduler):
        async def check_finished(self, episode: Any, turn: Any) -> Any:
            return answer

    t = await run_episode(scripted_context([CALL], tools=[echo], scheduler=Ends()), task(), id="e")
    assert t.stop_reason is reason and len(t.turns) == 1 and t.turns[0].tool_results == ()
    assert t.is_failed == reason.is_failure and (t.reward is None) == reason.is_failure


async def test_a_reply_that_is_done_is_recorded_and_not_encoded():
    class OneHint(MultiTurnScheduler):
        def step(self, episode: Any, turn: Any) -> Reply:
            return Reply(messages=(USER,), is_done=True, info={"hint": 1})

    t = await run_episode(scripted_context(["x"], scheduler=OneHint()), task(), id="e")
    assert t.stop_reason is StopReason.ENV_DONE and t.turns[0].observation == (USER,) and t.turns[0].info == {"hint": 1}
    assert len(t.segments[0].spans) == 2


async def test_a_scheduler_is_copied_for_every_trajectory_unless_it_is_shared():
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


async def test_asking_for_a_partner_that_the_task_does_not_have_is_a_mistake_of_the_scheduler():
    class Asks(MultiTurnScheduler):
        async def step(self, episode: Any, turn: Any) -> Any:
            return await episode.ask_partner(turn)

    with pytest.raises(polyturn.PolyturnError, match="task 't0' has no interaction; ask `has_partner` first"):
        await run_episode(scripted_context(["x"], scheduler=Asks()), task(), id="e")


async def test_messages_may_be_rewritten_by_a_step_and_a_new_segment_starts():
    class Forgets(MultiTurnScheduler):
        def step(self, episode: Any, turn: Any) -> Any:
            if turn.index == 2:
                return None
            episode.rewrite([*episode.task.prompt, Message(role="user", content=f"note {turn.index}")])
            return "go on"

    t = await run_episode(scripted_context(["first", "second", "third"], scheduler=Forgets()), task(), id="e")
    assert not t.is_failed and len(t.segments) == 3
    assert all(int((s.loss_weights > 0).sum()) > 0 for s in t.segments)
    assert sum(int((s.loss_weights > 0).sum()) for s in t.segments) == t.num_sampled_tokens


def test_a_reply_may_hold_messages_as_dicts() -> None:
    returned = Reply(messages=({"role": "user", "content": "Go on."},), is_done=True, info={"hint": 1})  # type: ignore[arg-type]
    found = Reply.of(returned)
    assert found.messages == (Message(role="user", content="Go on."),) and found.is_done and found.info == {"hint": 1}
