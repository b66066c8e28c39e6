"""Estimates of an evaluation: means with intervals, pass@k, maj@k and success by turn budget, overall and by data source.

    {"all": {"num_tasks": 200, "success": {"mean": 0.61, "low": 0.55, "high": 0.67}, "pass@k": {"1": …, "4": …},
             "maj@k": {"4": …}, "within_turns": {"1": …, "2": …}}, "openai/gsm8k": {…}}

Tasks are a sample of a population, and the samples of one task are not independent. So every interval is a percentile
bootstrap over tasks (Efron 1979). A failed trajectory counts as unsuccessful.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polyturn.core.reward import brief
from polyturn.core.trajectory import Trajectory, TrajectoryGroup
from polyturn.evaluation.repeated import MAX_VOTE, PRED, sizes
from polyturn.evaluation.report import is_success

NUM_RESAMPLES = 2000
MAX_SUBSETS = 1000
"""If there are at most this many subsets of k among n, all are used; otherwise this many are drawn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A mean over tasks with its 95 % interval."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:.3f} [{self.low:.3f}, {self.high:.3f}]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Statistics:
    """Statistics of the groups of one data source, or of all groups."""

    num_tasks: int
    num_samples: int
    success: Estimate
    reward: Estimate | None
    """None if no trajectory has a reward."""
    pass_at: dict[int, Estimate]
    """k -> probability that at least one of k samples succeeds."""
    maj_at: dict[int, Estimate]
    """k -> probability that the most common answer of k samples is right; empty if reward functions return no `pred`."""
    within_turns: dict[int, Estimate]
    """t -> share of samples that succeed within t turns: the result of the same episodes with a smaller turn limit."""

    def to_json(self) -> dict[str, Any]:
        """Return the statistics as data for JSON."""
        return asdict(self)


def pass_at_k(num: int, num_correct: int, k: int) -> float:
    """Return the unbiased estimate of pass@k from `num` samples: 1 - C(n - c, k) / C(n, k).

    Source: Chen et al. 2021, "Evaluating Large Language Models Trained on Code", equation 1.
    """
    if not 1 <= k <= num:
        raise ValueError(f"k is {k}, but there are {num} samples; use 1 to {num}")
    return 1.0 - math.comb(num - num_correct, k) / math.comb(num, k)


def maj_at_k(preds: Sequence[Hashable], correct: Sequence[bool], k: int, *, seed: int = 0) -> float:
    """Return the probability that the most common of k answers is right; ties are broken at random.

    It is the mean over all subsets of k samples, or over 1000 drawn subsets if there are more. Source: Wang et al. 2022,
    "Self-Consistency Improves Chain of Thought Reasoning", which votes once over all samples.

    Args:
        preds: The answer of each sample; None means no answer, and wins only if there is no other.
        correct: Whether each answer is right.
        k: The number of voters.
        seed: Seed of the draws.
    """
    num = len(preds)
    if not 1 <= k <= num:
        raise ValueError(f"k is {k}, but there are {num} samples; use 1 to {num}")
    subsets: Iterable[Sequence[int]] = itertools.combinations(range(num), k)
    if math.comb(num, k) > MAX_SUBSETS:
        rng = np.random.default_rng(seed)
        subsets = [rng.choice(num, k, replace=False).tolist() for _ in range(MAX_SUBSETS)]
    rates: dict[Hashable, list[bool]] = defaultdict(list)
    for pred, right in zip(preds, correct, strict=True):
        rates[pred].append(right)
    value = {pred: sum(matches) / len(matches) for pred, matches in rates.items()}
    value[None] = 0.0
    results = []
    for subset in subsets:
        votes = Counter(preds[i] for i in subset if preds[i] is not None) or Counter({None: 1})
        most = max(votes.values())
        winners = [pred for pred, count in votes.items() if count == most]
        results.append(sum(value[w] for w in winners) / len(winners))
    return float(np.mean(results))


def bootstrap(values_P: Sequence[float] | NDArray[np.float64], *, seed: int = 0, level: float = 0.95) -> Estimate:
    """Return the mean of one value per task with its percentile interval over resampled tasks."""
    data = np.asarray(values_P, np.float64)
    rng = np.random.default_rng(seed)
    means = np.concatenate(
        [data[rng.integers(0, len(data), (100, len(data)))].mean(axis=1) for _ in range(NUM_RESAMPLES // 100)]
    )
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return Estimate(mean=float(data.mean()), low=float(low), high=float(high))


def statistics(groups: Sequence[TrajectoryGroup], *, success_at: float = 1.0, seed: int = 0) -> dict[str, Statistics]:
    """Return the statistics of "all" groups, and of each data source if there are several.

    Args:
        groups: One per task, with its samples.
        success_at: The smallest outcome that counts as success.
        seed: Seed of the resampling.
    """
    by_source: dict[str, list[TrajectoryGroup]] = defaultdict(list)
    for group in groups:
        if group.trajectories:
            by_source[group.task.data_source or "unknown"].append(group)
    everything = [g for groups_of_source in by_source.values() for g in groups_of_source]
    if not everything:
        return {}
    out = {"all": _of(everything, success_at=success_at, seed=seed)}
    if len(by_source) > 1:
        out |= {
            name: _of(groups_of_source, success_at=success_at, seed=seed)
            for name, groups_of_source in sorted(by_source.items())
        }
    return out


def _of(groups: Sequence[TrajectoryGroup], *, success_at: float, seed: int) -> Statistics:
    won_P_G = [[is_success(t, at=success_at) for t in g.trajectories] for g in groups]
    least = min(len(won) for won in won_P_G)
    longest = max((len(t.turns) for g in groups for t in g.trajectories), default=0)
    rewards = [[t.reward.total for t in g.trajectories if t.reward is not None] for g in groups]
    preds_P_G = [[_pred(t) for t in g.trajectories] for g in groups]
    votes = least > 1 and any(p is not None for preds in preds_P_G for p in preds)

    def within(budget: int) -> Estimate:
        measured = [
            np.mean([w and len(t.turns) <= budget for w, t in zip(won, g.trajectories, strict=True)])
            for won, g in zip(won_P_G, groups, strict=True)
        ]
        return bootstrap([float(f) for f in measured], seed=seed)

    ks = [1, *(k for k in sizes(least) if k > 1)]
    return Statistics(
        num_tasks=len(groups),
        num_samples=sum(len(won) for won in won_P_G),
        success=bootstrap([sum(won) / len(won) for won in won_P_G], seed=seed),
        reward=bootstrap([sum(r) / len(r) for r in rewards if r], seed=seed) if any(rewards) else None,
        pass_at={k: bootstrap([pass_at_k(len(won), sum(won), k) for won in won_P_G], seed=seed) for k in ks},
        maj_at={
            k: bootstrap([maj_at_k(p, w, k, seed=seed) for p, w in zip(preds_P_G, won_P_G, strict=True)], seed=seed)
            for k in (ks[1:] if votes else [])
        },
        within_turns={budget: within(budget) for budget in range(1, longest + 1)},
    )


def _pred(trajectory: Trajectory) -> str | None:
    """Return the answer that the reward function parsed, or None."""
    pred = None if trajectory.reward is None else trajectory.reward.info.get(PRED)
    return None if pred is None else brief(pred, MAX_VOTE)
