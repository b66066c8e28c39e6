"""Estimators that compare the rewards of one group; every trained token of a trajectory gets the same number.

(rewards_G: [G] the rewards of the trajectories of one task, samples_G: for each its training samples)
->  for each trajectory, for each of its samples, [T] advantages
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated

import numpy as np
from pydantic import Field

from polyturn.algorithms.advantages.base import Epsilon, NormByStd, Rewards, centred, declare, divided, on_weighted
from polyturn.core.arrays import Floats
from polyturn.core.errors import TrainingError
from polyturn.core.sample import TrainSample

Samples = Sequence[Sequence[TrainSample]]


@declare(min_group=2, only_compares=True)
def grpo(
    rewards_G: Rewards, samples_G: Samples, *, eps: Epsilon = 1e-6, norm_by_std: NormByStd = True
) -> list[list[Floats]]:
    """Compare each trajectory with its group: A = (r - mean) / (std + eps), the same on all its tokens.

    The variance is the unbiased estimate, with n - 1. A single member gets 0. Source: Shao et al. 2024 (DeepSeekMath),
    section 4.1.2, outcome supervision. Without `norm_by_std` rewards are only centred, as in Liu et al. 2025 (Dr. GRPO);
    this removes the bias towards groups of low variance.
    """
    values = np.asarray(rewards_G, dtype=np.float64)
    scalars = centred(values)
    is_divided = norm_by_std and len(values) > 1
    return _on_all(samples_G, divided(scalars, scalars.std(ddof=1) + eps) if is_divided else scalars)


@declare(min_group=2, only_compares=True)
def dr_grpo(rewards_G: Rewards, samples_G: Samples) -> list[list[Floats]]:
    """Centre the rewards of the group without dividing by their spread: A = r - mean.

    Source: Liu et al. 2025 (Understanding R1-Zero-like Training: Dr. GRPO), equation 3.
    """
    return grpo(rewards_G, samples_G, norm_by_std=False)


@declare(min_group=2, only_compares=True)
def rloo(rewards_G: Rewards, samples_G: Samples) -> list[list[Floats]]:
    """Compare each trajectory with the others of its group: A_i = r_i - mean of r_j over j != i.

    The baseline does not depend on the trajectory itself, so the gradient is unbiased. Source: Ahmadian et al. 2024 (Back to
    Basics); Kool et al. 2019.
    """
    values = np.asarray(rewards_G, dtype=np.float64)
    n = len(values)
    # Equal to the formula above, because (n - 1) (r_i - mean of the others) = n (r_i - mean).
    return _on_all(samples_G, centred(values) * n / max(n - 1, 1))


@declare(min_group=2, only_compares=True)
def opo(rewards_G: Rewards, samples_G: Samples) -> list[list[Floats]]:
    """Subtract the mean weighted by length: A_i = r_i - sum(l_j r_j) / sum(l_j), l the number of trained tokens.

    If the squared norm of a trajectory's gradient is proportional to its length, this baseline has about the lowest variance
    of all scalar baselines. Source: Hao et al. 2025 (On-Policy RL with Optimal Reward Baseline).
    """
    values = centred(np.asarray(rewards_G, dtype=np.float64))
    lengths = np.array([sum(s.num_weighted for s in samples) for samples in samples_G], dtype=np.float64)
    # In a group without a trained token all lengths are 0. Its advantages are used nowhere, so any baseline will do.
    baseline = (lengths * values).sum() / lengths.sum() if lengths.sum() else 0.0
    return _on_all(samples_G, values - baseline)


@declare(min_group=2, draws="k", only_compares=True)
def grpo_passk(
    rewards_G: Rewards,
    samples_G: Samples,
    *,
    eps: Epsilon = 1e-6,
    norm_by_std: NormByStd = True,
    k: Annotated[int | None, Field(ge=1, description="Number of tries; null is the whole group.")] = None,
) -> list[list[Floats]]:
    """Maximise the expected best reward of k tries instead of the expected reward of one.

    If k is given: let S be a set of k of the group's n members, and R_S the maximum of r over S. Then A_i = (mean of R_S
    over the sets that contain i - mean) / (std + eps), with mean and std of R_S over all sets, computed in closed form. A
    group of k or fewer live members has at most one such set, so all its members get 0. Source: Chen et al. 2025 (Pass@k
    Training), analytical derivation, there for rewards of 0 and 1.

    If k is None, the whole group is the set: the best member gets the amount by which it raises the maximum of the group,
    A = (best - second best) / (std of r + eps), and the others get 0. If two members are best, all get 0. Source: Tang et
    al. 2025 (Optimizing Language Models for Inference Time Objectives), leave-one-out, without the division.

    Without `norm_by_std` nothing is divided.
    """
    values = np.asarray(rewards_G, dtype=np.float64)
    n = len(values)
    if n < 2:
        return _on_all(samples_G, np.zeros(n))
    values = values - values.max()  # differences from the best reward keep their precision if rewards are large
    order = np.argsort(values, kind="stable")
    if k is None:
        scalars = np.zeros(n)
        lead = values[order[-1]] - values[order[-2]]
        scalars[order[-1]] = divided(lead, values.std(ddof=1) + eps) if norm_by_std else lead
        return _on_all(samples_G, scalars)
    if k >= n:
        return _on_all(samples_G, np.zeros(n))
    sorted_G = values[order]
    # A set whose best member has rank j (from 0, ascending) consists of it and k - 1 of the j members below it.
    share = np.array([math.comb(j, k - 1) for j in range(n)]) / math.comb(n, k)
    mean = float(share @ sorted_G)
    std = math.sqrt(float(share @ (sorted_G - mean) ** 2))
    holding = np.empty(n)
    for rank in range(n):
        # Of the sets that contain this member, `with_it` counts those whose best is each member above it, and `alone` those
        # whose best is this member.
        with_it = [math.comb(j - 1, k - 2) if k > 1 else 0 for j in range(rank + 1, n)]
        alone = math.comb(rank, k - 1)
        holding[rank] = (alone * sorted_G[rank] + np.dot(with_it, sorted_G[rank + 1 :])) / math.comb(n - 1, k - 1)
    scalars = np.empty(n)
    scalars[order] = divided(holding - mean, std + eps) if norm_by_std else holding - mean
    return _on_all(samples_G, scalars)


@declare(min_group=2, only_compares=True)
def maxrl(rewards_G: Rewards, samples_G: Samples, *, eps: Epsilon = 1e-6) -> list[list[Floats]]:
    """Divide by the mean instead of the standard deviation: A = (r - mean) / (mean + eps), for rewards of 0 and above.

    With rewards of 0 and 1 the mean is the success rate p. Dividing the gradient of p by p gives the gradient of log p, so a
    task has the weight that maximum likelihood gives it, which is larger for a task that rarely succeeds. Source: Tajwar et
    al. 2026 (Maximum Likelihood Reinforcement Learning, arXiv 2602.02710).

    Raises:
        TrainingError: a reward is negative.
    """
    values = np.asarray(rewards_G, dtype=np.float64)
    if values.size and values.min() < 0:
        raise TrainingError(
            f"maxrl divides by the mean reward of a group, and a reward is {values.min():g}; give rewards of 0 and "
            "above (a KL penalty in the reward can make them negative), or choose another algorithm.advantage"
        )
    return _on_all(samples_G, divided(centred(values), values.mean() + eps) if len(values) > 1 else np.zeros(len(values)))


def _on_all(samples_G: Samples, scalars_G: Rewards) -> list[list[Floats]]:
    return [[on_weighted(s, a) for s in samples] for samples, a in zip(samples_G, scalars_G.tolist(), strict=True)]
