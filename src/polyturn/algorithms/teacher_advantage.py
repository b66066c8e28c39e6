"""An advantage from a teacher's log-probabilities of the tokens that the policy sampled.

    gap_t        = log teacher(y_t | its prompt, y_<t) - log policy(y_t | x, y_<t)
    advantage_t <- advantage_coef * advantage_t + coef * clip(gap_t, -clip, clip)

With advantage_coef 0 the policy gradient is that of coef * KL(policy || teacher) on the states that the policy visits. At
each position, E_{y ~ policy}[-gap] is that KL, and its gradient is E[-gap * grad log policy], because the gradient of log
policy is 0 on average. The gradient through later positions is left out, as in the sources.

Sources: On-Policy Distillation (Thinking Machines Lab 2025; tinker-cookbook's `kl_penalty_coef`) for a separate teacher;
SDPO (Hübotter et al. 2026, arXiv 2601.20802) for the policy with privileged text. SDPO mixes A = λ A_GRPO + (1 - λ) A_SDPO,
which is advantage_coef λ and coef 1 - λ. Both also have a form that compares whole distributions; this module compares only
the sampled token. `clip` follows the point-wise clipping of OPSD's published code (Zhao et al. 2026, arXiv 2601.18734).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from polyturn.algorithms.options import TeacherAdvantageOptions
from polyturn.core.arrays import Floats
from polyturn.core.errors import TrainingError
from polyturn.core.metrics import Metrics
from polyturn.core.sample import TrainSample
from polyturn.core.trajectory import TrajectoryGroup

Score = Callable[[Sequence[TrainSample]], list[Floats]]
"""Samples -> for each [T] the policy's log-probability of each weighted token, 0 elsewhere."""


class AdvantageTeacher(Protocol):
    """Adds a teacher's advantage of sampled tokens to the estimator's."""

    def apply(
        self, groups: Sequence[TrajectoryGroup], samples: Sequence[TrainSample], *, score: Score
    ) -> tuple[list[TrainSample], Metrics]:
        """Return the samples, in their order, with changed advantages, and the metrics of the step.

        Args:
            groups: The groups that the samples come from.
            samples: Samples with advantages and `old_logprobs`.
            score: Computes the policy's log-probabilities.
        """
        ...


class Taught(NamedTuple):
    """A sample with a teacher's advantage."""

    sample: TrainSample
    gap_sum: float
    """Sum over the trained tokens of gap_t (see the head of this file), before clipping."""


def taught(sample: TrainSample, teacher_T: Floats, options: TeacherAdvantageOptions) -> Taught:
    """Return the sample with the teacher's advantage added.

    Args:
        sample: A sample with advantages and `old_logprobs`.
        teacher_T: [T] the teacher's log-probability of each trained token; ignored elsewhere.
        options: The weights, the level and the clip.

    Raises:
        TrainingError: the sample has no advantages or no log-probabilities of the policy.
    """
    if sample.advantages is None or sample.old_logprobs is None:
        raise TrainingError(f"sample {sample.id} has no advantages or no old_logprobs, which the teacher's advantage needs")
    is_trained = sample.loss_weights != 0
    gap_T = np.where(is_trained, teacher_T.astype(np.float64) - sample.old_logprobs, 0.0)
    judged_T = gap_T if options.clip is None else gap_T.clip(-options.clip, options.clip)
    if options.level == "turn":
        judged_T = _turn_means(judged_T, sample)
    advantages_T = options.advantage_coef * sample.advantages.astype(np.float64) + options.coef * judged_T
    return Taught(sample.replace(advantages=advantages_T), float(gap_T.sum()))


def untaught(sample: TrainSample, options: TeacherAdvantageOptions) -> TrainSample:
    """Return a sample for which there is no teacher: its advantage is the estimator's, times `advantage_coef`.

    Raises:
        TrainingError: the sample has no advantages.
    """
    if sample.advantages is None:
        raise TrainingError(f"sample {sample.id} has no advantages; run an advantage estimator first")
    return sample.replace(advantages=options.advantage_coef * sample.advantages.astype(np.float64))


def _turn_means(values_T: np.ndarray, sample: TrainSample) -> np.ndarray:
    """Return [T] at each trained token the mean over the trained tokens of its turn, 0 elsewhere."""
    is_trained = sample.loss_weights != 0
    turns_T = np.maximum(sample.turn_ids, 0)
    sums_K = np.bincount(turns_T, weights=values_T)
    counts_K = np.bincount(turns_T[is_trained], minlength=len(sums_K))
    return np.where(is_trained, (sums_K / np.maximum(counts_K, 1))[turns_T], 0.0)
