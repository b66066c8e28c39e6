"""EvalReport: exactly defined statistics of new or stored trajectories."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from polyturn.core.lifecycle import StopReason
from polyturn.core.trajectory import Trajectory

SERVER_TOKENS = "server_completion_tokens"
"""The trajectory metric in which a server that returns only text reports its token count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalReport:
    """Statistics of trajectories. Shares are of all trajectories unless stated; a share or mean of nothing is NaN."""

    num_trajectories: int
    success: float
    """Share of trajectories whose `outcome` reached the threshold."""
    first_turn_success: float
    """Share of trajectories that succeeded in their first turn."""
    mean_turns: float
    valid_tool_calls: float
    """Share of all tool calls that ran without an error."""
    repaired: float
    """Success rate of the `num_repairable` trajectories."""
    num_repairable: int
    """Number of trajectories in which the interaction rejected a turn before the last one."""
    mean_reward: float
    failed: float
    """Share of trajectories that ended with an error."""
    cut: float
    """Share of trajectories that were cut by a limit on tokens, context or time."""
    out_of_turns: float
    """Share of trajectories that reached the turn limit."""
    mean_sampled_tokens: float

    def to_metrics(self, prefix: str) -> dict[str, float]:
        """Return the statistics as `prefix/name` -> value."""
        return {f"{prefix}/{name}": float(value) for name, value in asdict(self).items()}


def is_success(trajectory: Trajectory, *, at: float = 1.0) -> bool:
    """Return whether the trajectory's outcome is at least `at`."""
    reward = trajectory.reward
    return reward is not None and reward.components.get("outcome", reward.total) >= at


def report(trajectories: Sequence[Trajectory], *, success_at: float = 1.0) -> EvalReport:
    """Return the report of `trajectories`.

    Args:
        trajectories: Finished trajectories.
        success_at: The smallest outcome that counts as success.
    """
    won = [is_success(t, at=success_at) for t in trajectories]
    calls = [r for t in trajectories for turn in t.turns for r in turn.tool_results]
    corrected = [_was_corrected(t, at=success_at) for t in trajectories]
    repaired = [w for w, c in zip(won, corrected, strict=True) if c]
    return EvalReport(
        num_trajectories=len(trajectories),
        success=_share(won),
        first_turn_success=_share([w and len(t.turns) == 1 for w, t in zip(won, trajectories, strict=True)]),
        mean_turns=_mean([len(t.turns) for t in trajectories]),
        valid_tool_calls=_share([c.error is None for c in calls]),
        repaired=_share(repaired),
        num_repairable=len(repaired),
        mean_reward=_mean([t.reward.total for t in trajectories if t.reward is not None]),
        failed=_share([t.is_failed for t in trajectories]),
        cut=_share([t.stop_reason.is_cut for t in trajectories]),
        out_of_turns=_share([t.stop_reason is StopReason.MAX_TURNS for t in trajectories]),
        mean_sampled_tokens=_mean([t.metrics.get(SERVER_TOKENS, t.num_sampled_tokens) for t in trajectories]),
    )


def _was_corrected(trajectory: Trajectory, *, at: float) -> bool:
    """Return whether the interaction rejected an attempt before the last turn."""
    return any("interaction" in t.scores and t.scores["interaction"] < at for t in trajectory.turns[:-1])


def _share(flags: Sequence[bool]) -> float:
    return sum(flags) / len(flags) if flags else float("nan")


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else float("nan")
