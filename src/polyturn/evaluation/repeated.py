"""Statistics of an evaluation with N samples per task: mean, best, worst and majority vote of n out of N.

    {"openai/gsm8k": {"reward": {"mean@4": 0.5, "std@4": 0.3, "best@2/mean": 0.7, "best@4/mean": 0.9, …}}}

best@n is the expected best of n samples, estimated by bootstrap: n of a task's N samples are drawn with replacement, a
thousand times. maj@n is the value of the most common answer among the n, if the reward function returned the answer as
`pred`. All tasks use the same seeded draws, so equal values give equal results.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polyturn.core.reward import as_score, brief
from polyturn.core.trajectory import Trajectory, TrajectoryGroup

MAX_VOTE = 10_000
"""Number of characters of an answer that are compared."""
PRED = "pred"
"""The key under which a reward function returns the answer that it parsed."""
NUM_DRAWS = 1000

Table = dict[str, dict[str, dict[str, float]]]
"""data_source -> variable -> metric -> value."""


def repeated_metrics(groups: Iterable[TrajectoryGroup], *, seed: int = 42) -> Table:
    """Return the metrics of every variable, averaged over the tasks of each data source.

    The variables are the reward and all other numbers that reward functions returned. Failed trajectories are left out, but
    N remains the intended number.

    Args:
        groups: One per task, with its N trajectories.
        seed: Seed of the draws.
    """
    values_by_metric: dict[str, dict[str, dict[str, list[float]]]] = defaultdict(
        lambda: defaultdict(lambda: defaultdict(list))
    )
    for group in groups:
        scored = [t for t in group.trajectories if t.reward is not None]
        rows = [variables(t) for t in scored]
        votes = [None if t.reward is None else t.reward.info.get(PRED) for t in scored]
        for name in dict.fromkeys(key for row in rows for key in row):
            values = [(row[name], vote) for row, vote in zip(rows, votes, strict=True) if name in row]
            of_task = task_metrics(
                [v for v, _ in values], num=len(group.trajectories), votes=[vote for _, vote in values], seed=seed
            )
            for metric, value in of_task.items():
                values_by_metric[group.task.data_source or "unknown"][name][metric].append(value)
    return {
        source: {name: {m: float(np.mean(v)) for m, v in metrics.items()} for name, metrics in names.items()}
        for source, names in values_by_metric.items()
    }


def variables(trajectory: Trajectory) -> dict[str, float]:
    """Return the numbers of a trajectory's reward: `reward`, and the further numbers of its reward function."""
    assert trajectory.reward is not None  # callers pass scored trajectories only
    info = trajectory.reward.info
    numbers = {k: as_score(v) for k, v in info.items() if isinstance(v, bool | int | float | np.number)}
    return {"reward": trajectory.reward.total, **{k: v for k, v in numbers.items() if v is not None and k != "reward"}}


def task_metrics(
    values: Sequence[float], *, num: int, votes: Sequence[Any] | None = None, seed: int = 42
) -> dict[str, float]:
    """Return the metrics of one task's values.

    Args:
        values: One per sample; at least one.
        num: The intended number of samples N.
        votes: The answer of each sample; without them, or if one is None, there is no maj@n.
        seed: Seed of the draws.
    """
    data = np.asarray(values, np.float64)
    out = {f"mean@{num}": float(data.mean())}
    if num == 1:
        return out
    out[f"std@{num}"] = float(data.std())
    can_vote = bool(votes) and all(vote is not None for vote in votes or ())
    for n in sizes(num):
        drawn = _draws(len(data), n, seed)
        metrics = {"best": data[drawn].max(axis=1), "worst": data[drawn].min(axis=1)}
        if can_vote:
            metrics["maj"] = _majority(data, votes or (), drawn)
        for name, sample in metrics.items():
            out[f"{name}@{n}/mean"], out[f"{name}@{n}/std"] = float(sample.mean()), float(sample.std())
    return out


def sizes(num: int) -> list[int]:
    """Return the values of n to report: the powers of two below N, and N."""
    return [*(2**i for i in range(1, num.bit_length()) if 2**i < num), num]


def flat(table: Mapping[str, Mapping[str, Mapping[str, float]]]) -> dict[str, float]:
    """Return a table as `source/variable/metric` -> value."""
    return {
        f"{s}/{name}/{m}": v for s, names in table.items() for name, metrics in names.items() for m, v in metrics.items()
    }


def _majority(data: NDArray[np.float64], votes: Sequence[Any], drawn: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return [draws] the value of the winning answer; among equally common answers, the first drawn wins."""
    numbers: dict[str, int] = {}
    codes = np.array([numbers.setdefault(brief(vote, MAX_VOTE), len(numbers)) for vote in votes])[drawn]
    counts = (codes[:, :, None] == codes[:, None, :]).sum(axis=2)
    winners: NDArray[np.float64] = data[drawn[np.arange(len(drawn)), counts.argmax(axis=1)]]
    return winners


@functools.lru_cache(maxsize=64)
def _draws(num_values: int, n: int, seed: int) -> NDArray[np.int64]:
    """Return [NUM_DRAWS, n] indices, drawn with replacement."""
    drawn: NDArray[np.int64] = np.random.RandomState(seed).choice(num_values, size=(NUM_DRAWS, n), replace=True)
    return drawn
