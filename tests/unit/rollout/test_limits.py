"""Limits are checked in one documented order, and a budget says which of them cut a completion."""

from __future__ import annotations

from polyturn.core.errors import ConfigError
from polyturn.core.lifecycle import StopReason
from polyturn.rollout.limits import EpisodeProgress, Limits, budget, reached
from support.refusals import refuses

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
