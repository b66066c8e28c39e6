"""SingleTurn: ends the episode after one completion.

Tools are not called. An interaction does not answer, but its `calculate_score` scores the turn.
"""

from __future__ import annotations

from typing import Any

from polyturn.core.lifecycle import StopReason
from polyturn.rollout.calls import keeps_deadlines
from polyturn.rollout.episode import Episode
from polyturn.rollout.open_turn import OpenTurn
from polyturn.rollout.scheduler import MultiTurnScheduler
from polyturn.rollout.schedulers.registry import schedulers


@schedulers.register("single_turn")
@keeps_deadlines
class SingleTurn(MultiTurnScheduler):
    """Ends every episode after its first turn."""

    stateless = True
    scores_turns = False

    async def check_finished(self, episode: Episode, turn: OpenTurn) -> Any:
        """End the episode; the stop reason names the limit if the completion was cut."""
        return super().check_finished(episode, turn) or StopReason.STOP
