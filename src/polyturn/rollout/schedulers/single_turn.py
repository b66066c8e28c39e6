"""SingleTurn: the model answers once; nothing answers it. Tools are not run and an interaction only scores."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from polyturn.core.lifecycle import StopReason
from polyturn.rollout.scheduler import MultiTurnScheduler
from polyturn.rollout.schedulers.registry import schedulers

if TYPE_CHECKING:
    from polyturn.rollout.episode import Episode
    from polyturn.rollout.open_turn import OpenTurn


@schedulers.register("single_turn")
class SingleTurn(MultiTurnScheduler):
    """One turn."""

    stateless = True

    async def check_finished(self, episode: Episode, turn: OpenTurn) -> Any:
        """End here; a completion that was cut says by which limit."""
        return super().check_finished(episode, turn) or StopReason.STOP
