"""The table of request states and the kinds of stop reasons; `tests/property` walks through the table."""

from __future__ import annotations

import pytest

from polyturn.core.errors import LifecycleError
from polyturn.core.lifecycle import TRANSITIONS, Lifecycle, RequestState, StopReason

S = RequestState
LIVE = [s for s in S if TRANSITIONS[s]]


def test_table_covers_every_state_and_has_three_ends() -> None:
    assert set(TRANSITIONS) == set(S)
    assert set(S) - set(LIVE) == {S.COMPLETED, S.FAILED, S.ABORTED}
    assert all({S.FAILED, S.ABORTED} <= TRANSITIONS[s] for s in LIVE)
    assert [s for s in S if S.SUSPENDED in TRANSITIONS[s]] == [S.GENERATING]
    assert [s for s in S if S.COMPLETED in TRANSITIONS[s]] == [S.SCORING]


def test_episode_with_tool_and_interaction_goes_through() -> None:
    life = Lifecycle()
    path = [S.GENERATING, S.TOOL_CALLING, S.GENERATING, S.INTERACTING, S.GENERATING, S.SCORING, S.COMPLETED]
    for state in path:
        assert life.is_live
        life.move(state)
    assert not life.is_live
    assert life.history == [S.PENDING, *path]


def test_illegal_move_changes_nothing() -> None:
    life = Lifecycle()
    with pytest.raises(LifecycleError, match=r"pending to completed; .* generating, scoring"):
        life.move(S.COMPLETED)
    assert life.state is S.PENDING
    assert life.history == [S.PENDING]
    life.move(S.ABORTED)
    with pytest.raises(LifecycleError):
        life.move(S.GENERATING)


def test_truncations_and_failures_are_apart() -> None:
    truncations = {r for r in StopReason if r.is_truncation}
    failures = {r for r in StopReason if r.is_failure}
    assert truncations == {StopReason(v) for v in ("length", "max_turns", "max_tokens", "context_full", "timeout")}
    assert failures == {StopReason.ERROR, StopReason.ABORTED}
