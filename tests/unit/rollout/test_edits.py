"""Shortening a history, the kept part of a continued message, and the limits of an episode in their order."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyturn.core.errors import ConfigError, SchedulerError
from polyturn.core.lifecycle import StopReason
from polyturn.core.messages import Message, Origin
from polyturn.rollout.edits import LEFT_OUT, kept_of, shorten, with_known_origin
from polyturn.rollout.limits import ContextPolicy, EpisodeProgress, Limits, budget, reached
from polyturn.testing.episodes import tiny_codec, turn_ids
from support.refusals import refuses

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


SAID = "The answer is eight, grüße."


def test_text_keeps_whole_tokens_and_the_rest_as_text() -> None:
    said, codec = turn_ids(SAID), tiny_codec()
    for length in range(len(SAID) + 1):
        wanted = SAID[:length]
        kept = kept_of(codec, said, wanted)
        assert kept.text + kept.rest == wanted
        assert codec.decode(said[: kept.num_tokens]) == kept.text
        assert kept.rest == "" or not wanted.startswith(codec.decode(said[: kept.num_tokens + 1]))


def test_other_text_cannot_be_kept():
    refuses(lambda: kept_of(tiny_codec(), turn_ids(SAID), "Another"), SchedulerError, "'Another'")
    refuses(lambda: kept_of(tiny_codec(), turn_ids("Hi"), 99), SchedulerError, "99")


AT = EpisodeProgress(elapsed_s=9, turns=9, user_turns=9, has_user_reply=True, response_tokens=9, context_tokens=9)


def test_first_limit_in_the_documented_order_is_the_reason():
    every = {"timeout_s": 1.0, "max_turns": 1, "max_user_turns": 1, "max_tokens": 1, "max_context": 2}
    order = [StopReason.TIMEOUT, StopReason.MAX_TURNS, StopReason.MAX_TURNS, StopReason.MAX_TOKENS, StopReason.CONTEXT_FULL]
    for reason in order:
        assert reached(Limits(**{"max_turns": None, **every}), AT) is reason
        every.pop(next(iter(every)))
    assert reached(Limits(max_turns=None), AT) is None


def test_user_turns_count_only_behind_an_interactions_reply():
    limits = Limits(max_turns=None, max_user_turns=8)
    assert reached(limits, AT) is StopReason.MAX_TURNS
    assert reached(limits, AT._replace(has_user_reply=False)) is None
    assert reached(limits, AT._replace(user_turns=8)) is None


def test_tightest_limit_is_the_budget():
    limits = Limits(max_tokens_per_turn=50, max_tokens=40, max_context=100)
    assert budget(limits, AT, ceiling=1000) == (31, StopReason.MAX_TOKENS)
    assert budget(limits, AT._replace(context_tokens=95), ceiling=1000) == (5, StopReason.CONTEXT_FULL)
    assert budget(limits, AT, ceiling=7) == (7, StopReason.LENGTH)


def test_limit_that_allows_nothing_is_refused():
    refuses(lambda: Limits(max_turns=0), ConfigError, "max_turns is 0")
