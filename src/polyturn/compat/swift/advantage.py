"""ms-swift's advantages: an estimator (grpo, rloo, reinforce_plus_plus) and a scale (group, batch, none, gdpo).

    groups with rewards [1, 1] and [0, 1], reinforce_plus_plus  ->  advantages 0, 0, -a, a
        a = 0.5 with scale none, 0.70701 with group, 1.22444 with batch

    algorithm:
      advantage: {name: "polyturn.compat.swift.advantage:estimate", estimator: reinforce_plus_plus, scale_rewards: batch}

Standard deviations are over trajectories, with Bessel's correction. A trajectory with several samples counts once, and all
its tokens get its advantage. Native estimators use other constants, and some of them normalise over tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from polyturn.algorithms.advantages import BatchAdvantages, GroupView, declare
from polyturn.algorithms.advantages.base import Rewards, centred, spread
from polyturn.core.errors import ConfigError, did_you_mean

ESTIMATORS = ("grpo", "rloo", "reinforce_plus_plus")
SCALES = ("group", "batch", "none", "gdpo")
_EPS = 1e-4
_GDPO_EPS = 1e-8


@declare(scope="batch", compares=True, min_group=2)
def estimate(
    batch: Sequence[GroupView],
    *,
    estimator: str = "grpo",
    scale_rewards: str = "group",
    reward_weights: Mapping[str, float] | None = None,
) -> BatchAdvantages:
    """Return one advantage per trajectory: A = b (r - mean of the group) / (std + 1e-4).

    b is K / (K - 1) for rloo in a group of K, else 1. `std` is taken over the group or the batch, for reinforce_plus_plus
    of the centred rewards, else of r. Scale none does not divide. Scale gdpo normalises each reward function within the
    group and their weighted sum over the batch, for both grpo and rloo; with reinforce_plus_plus it does the same as none.
    A function without a score for a trajectory adds nothing to that trajectory's sum.

    Args:
        batch: The groups of a step.
        estimator: One of `ESTIMATORS`.
        scale_rewards: One of `SCALES`.
        reward_weights: Reward function -> weight, for gdpo.

    Raises:
        ConfigError: a name is unknown, or gdpo has no weights.
    """
    for name, known, key in ((estimator, ESTIMATORS, "estimator"), (scale_rewards, SCALES, "scale_rewards")):
        if name not in known:
            raise ConfigError(f"algorithm.advantage.{key} is {name!r}.{did_you_mean(name, known)}")
    if scale_rewards == "gdpo" and estimator != "reinforce_plus_plus":
        if not reward_weights:
            raise ConfigError("algorithm.advantage.reward_weights is missing; gdpo needs the weight of each reward function")
        return spread(batch, [a.tolist() for a in _gdpo(batch, reward_weights)])
    totals = [group.totals for group in batch]
    advantages = [_centred(r, is_rloo=estimator == "rloo") for r in totals]
    measured = advantages if estimator == "reinforce_plus_plus" else totals
    if scale_rewards == "batch":
        std = _std(np.concatenate([*measured, np.empty(0)]))
        advantages = [a / (std + _EPS) for a in advantages]
    elif scale_rewards == "group":
        advantages = [a / (_std(m) + _EPS) for a, m in zip(advantages, measured, strict=True)]
    return spread(batch, [a.tolist() for a in advantages])


def _centred(rewards_G: Rewards, *, is_rloo: bool) -> Rewards:
    num = len(rewards_G)
    return centred(rewards_G) * (num / (num - 1) if is_rloo and num > 1 else 1.0)


def _std(values: Rewards) -> float:
    return float(centred(values).std(ddof=1)) if len(values) > 1 else 0.0


def _gdpo(batch: Sequence[GroupView], weights: Mapping[str, float]) -> list[Rewards]:
    sums = []
    for group in batch:
        sum_G = np.zeros(len(group.members))
        for name, weight in weights.items():
            values_G = np.array([m.components.get(name, np.nan) for m in group.members])
            is_known = ~np.isnan(values_G)
            if is_known.any():
                known = centred(values_G[is_known])
                sum_G[is_known] += weight * known / (_std(known) + _GDPO_EPS)
        sums.append(sum_G)
    flat = np.concatenate([*sums, np.empty(0)])
    return [(s - flat.mean()) / (_std(flat) + _GDPO_EPS) for s in sums]
