"""The metrics of an evaluation under verl's names, so that existing dashboards keep working.

    val-core/openai/gsm8k/reward/mean@4     the reward, or `acc` if the function returned one: mean, best, vote of N
    val-aux/openai/gsm8k/reward/best@2/std  everything else
    val-aux/num_turns/mean                  messages of a conversation

A float result has no `acc`; return {"score": …, "acc": …} to get it.
"""

from __future__ import annotations

from collections.abc import Sequence

from polyturn.core.trajectory import TrajectoryGroup
from polyturn.evaluation.repeated import repeated_metrics

_CORE = ("mean@", "best@", "maj@")


def validation_metrics(groups: Sequence[TrajectoryGroup], *, seed: int = 42) -> dict[str, float]:
    """Return the metrics of an evaluation.

    Args:
        groups: One group per task, with its N trajectories.
        seed: Seed of the bootstrap.
    """
    out: dict[str, float] = {}
    num = max((len(group.trajectories) for group in groups), default=0)
    for source, names in repeated_metrics(groups, seed=seed).items():
        core = "acc" if "acc" in names else "reward"
        for name, metrics in names.items():
            for metric, value in metrics.items():
                is_core = name == core and metric.startswith(_CORE) and metric.partition("/")[0].endswith(f"@{num}")
                out[f"{'val-core' if is_core else 'val-aux'}/{source}/{name}/{metric}"] = value
    turns = [1 + sum(1 + bool(turn.observation) for turn in t.turns) for g in groups for t in g.trajectories]
    if turns:
        out |= {
            "val-aux/num_turns/min": float(min(turns)),
            "val-aux/num_turns/max": float(max(turns)),
            "val-aux/num_turns/mean": sum(turns) / len(turns),
        }
    return out
