"""The table of episode states and the kinds of stop reasons; `tests/property` walks through the table."""

from __future__ import annotations

import pytest

from polyturn.core.errors import LifecycleError
from polyturn.core.lifecycle import TRANSITIONS, EpisodeState, Lifecycle, StopReason
from support.refusals import refuses

S = EpisodeState
LIVE = [s for s in S if TRANSITIONS[s]]


def test_table_has_three_ends_that_each_live_state_reaches() -> None:
    assert set(TRANSITIONS) == set(S)
    assert set(S) - set(LIVE) == {S.COMPLETED, S.FAILED, S.ABORTED}
    assert all({S.COMPLETED, S.FAILED, S.ABORTED} <= TRANSITIONS[s] for s in LIVE)


def test_episode_with_tool_and_interaction_goes_through() -> None:
    life = Lifecycle()
    path = [S.GENERATING, S.TOOL_CALLING, S.GENERATING, S.INTERACTING, S.GENERATING, S.COMPLETED]
    for state in path:
        life.move(state)
    assert life.history == [S.PENDING, *path]


def test_illegal_move_changes_nothing() -> None:
    life = Lifecycle()
    refuses(lambda: life.move(S.TOOL_CALLING), LifecycleError, "pending to tool_calling; ", " generating")
    assert life.history == [S.PENDING]
    life.move(S.ABORTED)
    with pytest.raises(LifecycleError):
        life.move(S.GENERATING)


def test_truncations_and_failures_are_apart() -> None:
    truncations = {r for r in StopReason if r.is_truncation}
    failures = {r for r in StopReason if r.is_failure}
    assert truncations == {StopReason(v) for v in ("length", "max_turns", "max_tokens", "context_full", "timeout")}
    assert failures == {StopReason.ERROR, StopReason.ABORTED}
