"""Plays an environment with scripted actions: a real episode in which only the model is replaced.

    played = await play(find_adapter("textarena:Nim-v0"), seed=3, actions=["[0 3]", "[1 4]", "[2 5]"])
    played.earned          {"seat 0": 1.0, "seat 1": -1.0}

Tests use it to compare an episode's reward with the package's own for the same seed and actions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from polyturn.core.errors import EngineError
from polyturn.core.generation import GenerateRequest
from polyturn.core.trajectory import Trajectory
from polyturn.environments.base import Adapter, at_stage
from polyturn.environments.players import seat_players
from polyturn.environments.scheduler import EnvScheduler, Stage
from polyturn.rollout.limits import Limits
from polyturn.rollout.run_episode import run_episode
from polyturn.testing.episodes import scripted_context


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """The result of a scripted episode."""

    trajectory: Trajectory

    @property
    def reward(self) -> float:
        """The reward of the episode."""
        assert self.trajectory.reward is not None, self.trajectory.error
        return self.trajectory.reward.total

    @property
    def earned(self) -> Mapping[str, float]:
        """Agent -> its reward; a game for one player has one agent."""
        assert self.trajectory.reward is not None, self.trajectory.error
        agents = {s.agent for s in self.trajectory.segments}
        return dict(self.trajectory.reward.agents) or dict.fromkeys(agents, self.reward)

    @property
    def is_done(self) -> bool:
        """Whether the environment ended the episode."""
        return not self.trajectory.stop_reason.is_truncation


async def play(
    adapter: Adapter,
    *,
    seed: int,
    actions: Sequence[str],
    seats: Sequence[str | Mapping[str, Any]] = (),
    score: str | None = None,
    limits: Limits | None = None,
    **options: Any,
) -> Played:
    """Run an episode in which the policy writes `actions` in order, over all of its seats.

    Args:
        adapter: Makes the environment.
        seed: The seed of the environment's reset.
        actions: The policy's turns. After the last one the episode ends as at a limit of turns.
        seats: The player of each seat; if empty, the policy plays all of them.
        score: "sum" or "last" of the rewards; None uses the adapter's default.
        limits: Limits of the episode; None allows one turn per action.
        options: Further arguments of `Stage`.
    """
    replies: Iterator[str] = iter(actions)

    def says(request: GenerateRequest) -> str | Exception:
        action = next(replies, None)
        return EngineError(f"the script has no action for turn {request.request_id}") if action is None else action

    players = seat_players(seats, num_seats=adapter.num_seats, name=adapter.name, base=adapter.base)
    context = scripted_context(
        says,
        scheduler=EnvScheduler({adapter.name: Stage(adapter=adapter, players=players, **options)}),
        limits=limits or Limits(max_turns=len(actions), max_context=1 << 20),
    )
    task = adapter.tasks(split="train", seeds=range(seed, seed + 1))[0]
    task = at_stage(split="train", score=score or adapter.score)(task)
    return Played(trajectory=await run_episode(context, task, id=f"{adapter.name}/{seed}"))
