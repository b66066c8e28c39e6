"""Compares two evaluations on the same tasks with a paired test.

    task      A     B     B - A          the test ignores tasks with equal results, and asks
    gsm8k-0   1.0   1.0    0             whether B wins the others more often than by chance
    gsm8k-1   0.0   1.0   +1

For success with one sample per task, the test is McNemar's exact test (McNemar 1947): the sign test on the tasks that
differ. For several samples, or for rewards, the signs of the differences are flipped at random (Fisher's randomization
test), which also uses their sizes. Data sources are also tested separately, with Holm's correction (Holm 1979).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from polyturn.core.errors import DataError
from polyturn.core.trajectory import TrajectoryGroup
from polyturn.evaluation.report import is_success
from polyturn.evaluation.statistics import Estimate, bootstrap

NUM_FLIPS = 10_000


class TaskKey(NamedTuple):
    """The identity of a task across runs."""

    data_source: str
    id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Paired:
    """The difference between A and B in one quantity, over their common tasks."""

    num_tasks: int
    a: float
    b: float
    difference: Estimate
    """B minus A, with a 95 % interval over tasks."""
    num_better: int
    """Number of tasks on which B is better."""
    num_worse: int
    test: str
    """Name of the test that gave `p`."""
    p: float
    """p-value in [0, 1]; for a data source, corrected for the number of sources."""

    def is_significant(self, level: float = 0.05) -> bool:
        """Return whether `p` is below `level`."""
        return self.p < level


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The comparison of two evaluations."""

    table: Mapping[str, Mapping[str, Paired]]
    num_only_a: int
    """Number of tasks that only A has; they are left out."""
    num_only_b: int

    def to_json(self) -> dict[str, Any]:
        """Return the comparison as data for JSON, with a verdict for each quantity."""
        data = {
            source: {name: {**asdict(p), "significant": p.is_significant()} for name, p in values.items()}
            for source, values in self.table.items()
        }
        return {"only_a": self.num_only_a, "only_b": self.num_only_b, "table": data}


def compare(
    a: Iterable[TrajectoryGroup], b: Iterable[TrajectoryGroup], *, success_at: float = 1.0, seed: int = 0
) -> Comparison:
    """Compare two evaluations of the same tasks.

    Args:
        a: The groups of the baseline.
        b: The groups of the other evaluation.
        success_at: The smallest outcome that counts as success.
        seed: Seed of the resampling.

    Raises:
        DataError: the evaluations have no common task.
    """
    of_a, of_b = _by_task(a, success_at=success_at), _by_task(b, success_at=success_at)
    common = sorted(of_a.keys() & of_b.keys())
    if not common:
        examples = [min(of, default=None) for of in (of_a, of_b)]
        raise DataError(
            f"the evaluations have no common task; they have {len(of_a)} and {len(of_b)} tasks, and the first ones are "
            f"{examples[0]} and {examples[1]}"
        )
    sources: dict[str, list[TaskKey]] = defaultdict(list)
    for key in common:
        sources[key.data_source].append(key)
    table = {"all": _paired(of_a, of_b, common, seed=seed)}
    if len(sources) > 1:
        pairs = {name: _paired(of_a, of_b, keys, seed=seed) for name, keys in sources.items()}
        for number in ("success", "reward"):
            having = [name for name in pairs if number in pairs[name]]
            for name, p in zip(having, holm([pairs[n][number].p for n in having]), strict=True):
                pairs[name][number] = replace(pairs[name][number], p=p)
        table |= pairs
    return Comparison(table=table, num_only_a=len(of_a) - len(common), num_only_b=len(of_b) - len(common))


def sign_test(num_better: int, num_worse: int) -> float:
    """Return the exact two-sided p-value of `num_better` heads and `num_worse` tails of a fair coin (McNemar 1947)."""
    num = num_better + num_worse
    tail = sum(math.comb(num, i) for i in range(min(num_better, num_worse) + 1))
    return min(1.0, 2 * tail / 2**num)


def flip_test(differences_P: Sequence[float], *, seed: int = 0) -> float:
    """Return the two-sided p-value of the mean difference under random signs; the observed signs count as one draw."""
    data = np.asarray([d for d in differences_P if d], np.float64)
    if not len(data):
        return 1.0
    rng = np.random.default_rng(seed)
    reached = abs(data.sum()) - 1e-9 * np.abs(data).sum()  # less the rounding of a sum, which grows with its terms
    hits = sum(
        int((np.abs((rng.integers(0, 2, (500, len(data))) * 2 - 1) @ data) >= reached).sum())
        for _ in range(NUM_FLIPS // 500)
    )
    return (hits + 1) / (NUM_FLIPS + 1)


def holm(ps: Sequence[float]) -> list[float]:
    """Return p-values corrected for multiple tests, in the order of `ps` (Holm 1979)."""
    out, highest = [0.0] * len(ps), 0.0
    for rank, index in enumerate(sorted(range(len(ps)), key=lambda i: ps[i])):
        highest = max(highest, min(1.0, ps[index] * (len(ps) - rank)))
        out[index] = highest
    return out


class _Of(NamedTuple):
    """The results of one task in one evaluation."""

    wins: list[float]
    rewards: list[float]


def _by_task(groups: Iterable[TrajectoryGroup], *, success_at: float) -> dict[TaskKey, _Of]:
    tasks: dict[TaskKey, _Of] = {}
    for group in groups:
        of = tasks.setdefault(TaskKey(group.task.data_source or "unknown", group.task.id), _Of([], []))
        of.wins.extend(float(is_success(t, at=success_at)) for t in group.trajectories)
        of.rewards.extend(t.reward.total for t in group.trajectories if t.reward is not None)
    return tasks


def _paired(
    of_a: Mapping[TaskKey, _Of], of_b: Mapping[TaskKey, _Of], keys: Sequence[TaskKey], *, seed: int
) -> dict[str, Paired]:
    out = {}
    for number, index in (("success", 0), ("reward", 1)):
        both = [(of_a[k][index], of_b[k][index]) for k in keys if of_a[k][index] and of_b[k][index]]
        if not both:
            continue
        is_once = index == 0 and all(len(x) == 1 for pair in both for x in pair)
        means_2P = np.array([[sum(x) / len(x) for x in pair] for pair in both]).T
        differences = means_2P[1] - means_2P[0]
        better, worse = int((differences > 0).sum()), int((differences < 0).sum())
        out[number] = Paired(
            num_tasks=len(both),
            a=float(means_2P[0].mean()),
            b=float(means_2P[1].mean()),
            difference=bootstrap(differences, seed=seed),
            num_better=better,
            num_worse=worse,
            test="McNemar, exact" if is_once else "sign flips",
            p=sign_test(better, worse) if is_once else flip_test(differences.tolist(), seed=seed),
        )
    return out
