"""The table of request states, and what each stop reason means."""

from __future__ import annotations

import pytest

from polyturn.core.errors import LifecycleError
from polyturn.core.lifecycle import TRANSITIONS, Lifecycle, RequestState, StopReason

S = RequestState
LIVE = [s for s in S if TRANSITIONS[s]]


def test_the_table_covers_every_state_and_three_are_ends() -> None:
    assert set(TRANSITIONS) == set(S)
    assert set(S) - set(LIVE) == {S.COMPLETED, S.FAILED, S.ABORTED}


@pytest.mark.parametrize("state", LIVE)
def test_failed_and_aborted_follow_every_live_state(state: RequestState) -> None:
    assert {S.FAILED, S.ABORTED} <= TRANSITIONS[state]


def test_only_a_generation_can_be_suspended_and_only_scoring_completes() -> None:
    assert [s for s in S if S.SUSPENDED in TRANSITIONS[s]] == [S.GENERATING]
    assert [s for s in S if S.COMPLETED in TRANSITIONS[s]] == [S.SCORING]


def test_an_episode_with_a_tool_and_a_partner_goes_through() -> None:
    life = Lifecycle()
    path = [S.GENERATING, S.TOOL_CALLING, S.GENERATING, S.INTERACTING, S.GENERATING, S.SCORING, S.COMPLETED]
    for state in path:
        assert life.is_live
        life.move(state)
    assert not life.is_live
    assert life.history == [S.PENDING, *path]


def test_an_illegal_move_says_what_is_allowed_and_changes_nothing() -> None:
    life = Lifecycle()
    with pytest.raises(LifecycleError, match=r"from pending to completed; allowed: aborted, failed, generating, scoring"):
        life.move(S.COMPLETED)
    assert life.state is S.PENDING
    assert life.history == [S.PENDING]


def test_nothing_follows_an_end() -> None:
    life = Lifecycle()
    life.move(S.ABORTED)
    with pytest.raises(LifecycleError, match="it has ended"):
        life.move(S.GENERATING)


def test_a_truncation_is_never_a_failure_and_a_plain_end_is_neither() -> None:
    truncations = {r for r in StopReason if r.is_truncation}
    failures = {r for r in StopReason if r.is_failure}
    assert truncations == {StopReason(v) for v in ("length", "max_turns", "max_tokens", "context_full", "timeout")}
    assert failures == {StopReason.ERROR, StopReason.ABORTED}
