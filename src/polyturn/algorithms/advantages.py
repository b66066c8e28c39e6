"""Advantage estimators: from a group's rewards to one number per token.

    rewards_G = [1, 0, 0, 1]  ->  grpo: [+0.87, -0.87, -0.87, +0.87], the same on every weighted token of a trajectory

NumPy only, because no gradient passes through an advantage. An estimator sees one group at a time: the rewards of its
trajectories and, for each, its training samples (per-token rewards and turn ids included), and answers with an array per
sample; so per-turn estimators fit the same signature. Failed trajectories never reach an estimator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from polyturn.core.arrays import Floats
from polyturn.core.errors import AlignmentError
from polyturn.core.registry import Registry
from polyturn.core.sample import SampleId, TrainSample
from polyturn.core.trajectory import TrajectoryGroup

Rewards = NDArray[np.float64]
"""[G] the scalar reward of each trajectory of a group."""
Estimator = Callable[..., list[list[Floats]]]
"""(rewards_G, samples_G, **options) -> for each trajectory, for each of its samples, [T] advantages, 0 where nothing is
weighted. A trajectory may have no sample (no turn fitted) and still counts in the group's statistics."""

advantages: Registry[Estimator] = Registry("advantages")


@advantages.register("grpo")
def grpo(
    rewards_G: Rewards, samples_G: Sequence[Sequence[TrainSample]], *, norm_by_std: bool = True, eps: float = 1e-6
) -> list[list[Floats]]:
    """Compare each trajectory with its group: A = (r - mean) / (std + eps), the same on all its tokens.

    The standard deviation is the unbiased one (n - 1). A group of one has nothing to compare with: mean 0 and std 1.
    Source: Shao et al. 2024 (DeepSeekMath), section 4.1.2, outcome supervision. Without `norm_by_std` it is only centred:
    Liu et al. 2025 (Dr. GRPO), which removes the bias towards groups of low variance.
    """
    values = np.asarray(rewards_G, dtype=np.float64)
    mean, std = (values.mean(), values.std(ddof=1)) if len(values) > 1 else (0.0, 1.0)
    scalars = (values - mean) / (std + eps) if norm_by_std else values - mean
    return [[_on_weighted(s, a) for s in samples] for samples, a in zip(samples_G, scalars.tolist(), strict=True)]


@advantages.register("dr_grpo")
def dr_grpo(rewards_G: Rewards, samples_G: Sequence[Sequence[TrainSample]]) -> list[list[Floats]]:
    """Centre the rewards of the group without dividing by their spread (Liu et al. 2025, Dr. GRPO, equation 3)."""
    return grpo(rewards_G, samples_G, norm_by_std=False)


def assign_advantages(
    groups: Sequence[TrajectoryGroup], samples: Sequence[TrainSample], *, estimator: Estimator
) -> list[TrainSample]:
    """Return `samples`, in their order, with `advantages` set by `estimator` group by group.

    Args:
        groups: The groups the samples come from. Failed trajectories are left out of the statistics.
        samples: Samples of these groups; those of failed trajectories must have been left out.
        estimator: One of the registry `advantages`, its options bound (`functools.partial`).

    Raises:
        AlignmentError: a sample belongs to no trajectory here, or a trajectory has no finite reward.
    """
    places: dict[tuple[str, str], list[int]] = {}
    for index, sample in enumerate(samples):
        places.setdefault((sample.id.group, sample.id.trajectory), []).append(index)
    arrays: dict[int, Floats] = {}
    for group in groups:
        kept = [t for t in group.trajectories if not t.is_failed]
        if not kept:
            continue
        rewards = np.array([float("nan") if t.reward is None else t.reward.total for t in kept], dtype=np.float64)
        if not np.isfinite(rewards).all():
            bad = kept[int(np.flatnonzero(~np.isfinite(rewards))[0])]
            raise AlignmentError(
                f"trajectory {bad.id!r} of group {group.id!r} has the reward {bad.reward}; every trajectory that did not "
                "fail needs a finite one before advantages are computed"
            )
        owned = [places.pop((group.id, t.id), []) for t in kept]
        found = estimator(rewards, [[samples[i] for i in indices] for indices in owned])
        for indices, per_sample in zip(owned, found, strict=True):
            arrays.update(zip(indices, per_sample, strict=True))
    if places:
        lost: SampleId = samples[next(iter(places.values()))[0]].id
        raise AlignmentError(
            f"sample {lost} belongs to no live trajectory of these groups; filter samples and groups together"
        )
    return [s.replace(advantages=arrays[i]) for i, s in enumerate(samples)]


def _on_weighted(sample: TrainSample, value: float) -> Floats:
    """[T] `value` on every weighted token, 0 elsewhere."""
    return np.where(sample.loss_weights != 0, np.float32(value), np.float32(0.0))
