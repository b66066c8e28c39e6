"""Shortening a history for a full context: which messages go, and which always stay."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyturn.core.messages import Message, Origin
from polyturn.rollout.edits import LEFT_OUT, shorten, with_known_origin
from polyturn.rollout.limits import ContextPolicy

LONG = "a reply that is longer than the note that takes its place"


def history(num_turns: int, reply: str = LONG) -> list[Message]:
    messages = [Message(role="system", content="s"), Message(role="user", content="u")]
    for i in range(num_turns):
        messages += [Message(role="assistant", content=f"a{i}"), Message(role="user", content=reply)]
    return messages


def at_most(num: int):
    return lambda messages: sum(len(m.text) for m in messages) <= num


def test_drop_oldest_leaves_out_whole_turns() -> None:
    assert shorten(history(3), policy=ContextPolicy.STOP, num_prompt=2, fits=at_most(10_000)) is None
    found = shorten(history(4), policy=ContextPolicy.DROP_OLDEST, num_prompt=2, fits=at_most(2 * 60 + 10))
    assert found is not None
    assert [m.text for m in found] == ["s", "u", "a2", LONG, "a3", LONG]


def test_compact_replaces_long_old_observations():
    found = shorten(history(3), policy=ContextPolicy.COMPACT, num_prompt=2, fits=at_most(2 * 60 + 40))
    assert found is not None
    assert [m.text for m in found] == ["s", "u", "a0", LEFT_OUT, "a1", LONG, "a2", LONG]
    found = shorten(history(2, "short"), policy=ContextPolicy.COMPACT, num_prompt=2, fits=at_most(10_000))
    assert found is not None
    assert [m.text for m in found] == ["s", "u", "a0", "short", "a1", "short"]


@pytest.mark.parametrize("policy", [ContextPolicy.COMPACT, ContextPolicy.DROP_OLDEST])
def test_nothing_helps_if_the_newest_turn_does_not_fit(policy: ContextPolicy):
    assert shorten(history(3), policy=policy, num_prompt=2, fits=at_most(3)) is None
    assert shorten(history(0), policy=policy, num_prompt=2, fits=at_most(10_000)) is None, "there is no turn to shorten"


@given(
    num_turns=st.integers(1, 8),
    room=st.integers(0, 600),
    policy=st.sampled_from([ContextPolicy.COMPACT, ContextPolicy.DROP_OLDEST]),
)
def test_prompt_and_newest_observation_stay_and_the_rest_fits(num_turns: int, room: int, policy: ContextPolicy):
    messages = history(num_turns)
    found: Sequence[Message] | None = shorten(messages, policy=policy, num_prompt=2, fits=at_most(room))
    if found is not None:
        assert at_most(room)(found)
        assert list(found[:2]) == messages[:2]
        assert found[-1] == messages[-1]
        assert found[-2] == messages[-2]


def test_message_has_the_origin_of_its_equal_or_the_environments():
    owner, model, other = Origin.OWNER, Origin.MODEL, Origin.ENVIRONMENT
    held = [
        Message(role="user", content="a", origin=owner),
        Message(role="assistant", content="b", origin=model),
        Message(role="user", content="c", origin=owner),
        Message(role="user", content="c", origin=other),
    ]

    def origins(*said: Message) -> list[Origin | None]:
        return [m.origin for m in with_known_origin(said, held)]

    a, b, c = (Message(role=m.role, content=m.content) for m in held[:3])
    assert origins(a, b, Message(role="user", content="new")) == [owner, model, other]
    assert origins(a, a) == [owner, other], "each of those held is one message"
    assert origins(c, c) == [other, other], "of two that say the same, the less trusted"
    assert origins(Message(role="user", content="a", origin=model), a) == [model, owner], "what is said stays"
