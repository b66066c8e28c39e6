"""Update: compute new parameters from the groups of one step.

    groups -> filters -> samples -> scores (old, reference, values) -> KL in the rewards -> advantages -> teacher ->
    correction -> filters -> critic: value loss, optimizer -> policy: loss, optimizer

Scores precede advantages, because an estimator may read values and a reward may include a KL term. The update never yields
to the event loop.
"""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from polyturn.algorithms.advantages import Estimator, assign_advantages, components_of, traits_of
from polyturn.algorithms.correction import CorrectionSettings, correct
from polyturn.algorithms.entropy_target import EntropyController
from polyturn.algorithms.kl import KlController
from polyturn.algorithms.options import AlgorithmOptions
from polyturn.algorithms.teacher_advantage import AdvantageTeacher
from polyturn.batching.filters import FilteredGroups, filter_groups, filter_samples, has_signal
from polyturn.batching.loss_scale import LossScale
from polyturn.batching.samples import dropped_by_scale, to_samples
from polyturn.core.arrays import Floats
from polyturn.core.errors import CheckpointError, TrainingError
from polyturn.core.metrics import Metrics, Sum, merge, reduce
from polyturn.core.protocols import PassResult, Policy, Stored
from polyturn.core.sample import TrainSample
from polyturn.core.trajectory import TrajectoryGroup
from polyturn.store.schema import Trained
from polyturn.training.critic import Critic, value_metrics
from polyturn.training.options import TrainOptions
from polyturn.training.record import trained_of
from polyturn.training.reward_kl import RewardKl
from polyturn.training.rollout_metrics import greedy_metrics, rollout_metrics

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateSettings:
    """The options of a step, without the options of the loss."""

    train: TrainOptions = field(default_factory=TrainOptions)
    algorithm: AlgorithmOptions = field(default_factory=AlgorithmOptions)
    temperature: float = 1.0
    loss_scale: LossScale | None = None
    """Selects the sampled tokens to train; None trains all that no scheduler masked."""
    min_members: int = 1
    """Smallest number of live members that a group needs for advantages; the estimator's `min_group` applies if it is
    larger."""
    drop_small_groups: bool = True
    """Whether groups with fewer live members are left out of the loss. If not, their advantages are 0, and only other loss
    terms train them."""
    drop_zero_variance: bool = True
    correction: CorrectionSettings | None = None
    """Weights and rejection of off-policy tokens; None applies no correction."""
    needs_rewards: bool = True
    """Whether every live trajectory must have a reward; otherwise those without one have advantages of 0."""


class StepResult(NamedTuple):
    """The result of one step."""

    metrics: dict[str, float]
    trained: dict[str, Trained]
    """Trajectory id -> the step's results for its record."""


class Revised(NamedTuple):
    """Replacements for the groups or the samples of a step; samples are made from groups, so at most one of the two."""

    groups: Sequence[TrajectoryGroup] | None = None
    """New groups, which are filtered, scored and given advantages again."""
    samples: Sequence[TrainSample] | None = None
    """New samples of the step's groups, with advantages."""


Revise = Callable[[int, Sequence[TrajectoryGroup], Sequence[TrainSample], Mapping[str, float]], Revised]
"""(steps taken, groups of this step, their samples, metrics so far) -> replacements."""


class _Credited(NamedTuple):
    kept: FilteredGroups
    samples: list[TrainSample]
    parts: list[Metrics]
    state: dict[str, Any]
    """State of the estimator after this step."""


class Update:
    """Takes the training steps of a run, one per call."""

    def __init__(
        self,
        policy: Policy,
        *,
        estimator: Estimator,
        settings: UpdateSettings | None = None,
        kl: KlController | None = None,
        entropy: EntropyController | None = None,
        critic: Critic | None = None,
        reward_kl: RewardKl | None = None,
        teacher: AdvantageTeacher | None = None,
    ) -> None:
        """Train `policy`.

        Args:
            policy: The policy to train.
            estimator: The advantage estimator, with its options bound.
            settings: Options of filters, scores and corrections.
            kl: Adapts the weight of the KL term to each step's KL.
            entropy: Adapts the weight of the entropy bonus to each step's entropy.
            critic: Computes values for the estimator, and is trained on the estimator's returns.
            reward_kl: Subtracts a KL penalty from rewards; `policy` then needs a reference.
            teacher: Adds a teacher's advantage of the sampled tokens.
        """
        self.policy = policy
        self.critic = critic
        self._kl = kl
        self._entropy = entropy
        self._reward_kl = reward_kl
        self._teacher = teacher
        self.estimator = estimator
        self.revise: Revise | None = None
        """May replace the groups and samples of a step after advantages are computed."""
        self.is_half_done = False
        """Whether only some of a step's optimizer steps are taken, a state from which a run cannot resume."""
        self._settings = settings or UpdateSettings()
        self._has_scored = False
        """Whether an earlier step had the turn scores or states that the estimator needs; a later step may lack them."""
        self._estimator_state: dict[str, Any] = {}

    @property
    def has_baseline(self) -> bool:
        """Whether the estimator needs one more trajectory per group, decoded greedily and never trained."""
        return traits_of(self.estimator).needs_greedy

    def has_signal(self, group: TrajectoryGroup) -> bool:
        """Return whether a group's members differ in a quantity that the estimator reads: rewards, components, scores of
        turns."""
        traits = traits_of(self.estimator)
        by_turns = traits.needs_turn_scores or traits.needs_states
        components = components_of(self.estimator)
        return has_signal(group, min_members=self._min_members, by_turns=by_turns, components=components)

    def run(self, groups: Sequence[TrajectoryGroup], *, step: int) -> StepResult:
        """Take the optimizer steps of one training step on its groups: `minibatches` in each of `passes`.

        Raises:
            TrainingError: the loss or the gradient is not finite, the samples lack arrays that the loss needs, or `revise`
                returned both groups and samples.
        """
        settings = self._settings
        kept, samples, parts, estimator_state = self._credit(groups, step=step)
        if self.revise is not None:
            # Changed groups start again with the filters, because filters, scores and advantages depend on them.
            revised = self.revise(step, groups, samples, reduce(merge(parts)))
            if revised.groups is not None and revised.samples is not None:
                raise TrainingError(
                    f"`revise` returned new groups and new samples for step {step + 1}; samples are made from groups, so "
                    "return only one of the two"
                )
            if revised.groups is not None:
                groups = revised.groups
                kept, samples, parts, estimator_state = self._credit(groups, step=step)
            elif revised.samples is not None:
                samples = list(revised.samples)
        rejected: set[str] = set()
        with _timed("time/prepare_s", parts):
            # After the advantages: `negative_bound` reads them, and rejected tokens still count in their group's statistics.
            if settings.correction is not None:
                before = {s.id.trajectory for s in samples if s.num_weighted}
                samples, correction_metrics = correct(samples, settings.correction, version=step)
                rejected = before - {s.id.trajectory for s in samples if s.num_weighted}
                parts.append(correction_metrics)
            filtered = filter_samples(samples, kept.groups, drop_truncated=settings.algorithm.drop_truncated)
        parts += [kept.metrics, filtered.metrics]
        # While the critic warms up, its values, and so the advantages, are meaningless: only the critic is trained.
        is_warm = self.critic is None or step >= self.critic.settings.warmup
        passes: list[PassResult] = []
        shares = _shares(filtered.samples, settings.train.minibatches)
        if filtered.samples:
            with _timed("time/train_s", parts):
                parts += self._train_critic(shares)
                if is_warm:
                    trained, passes = self._train_policy(shares)
                    parts += trained
        else:
            why = _nothing_left(kept.metrics)
            logger.warning("step %d: no group can teach anything (%s); the weights do not change", step + 1, why)
        order = [sample for share in shares for sample in share]
        metrics, cuts = reduce(merge(parts)), settings.algorithm.drop_truncated
        self._adapt(metrics, order)  # only after the passes, so that the metrics report the coefficients that they used
        least = self._kept_members
        records = trained_of(groups, kept.groups, order, passes, rejected=rejected, drops_truncated=cuts, min_members=least)
        self._estimator_state = estimator_state
        # Last: the caller counts the step only after this returns. A run that resumes from a state saved before that would
        # take the optimizer steps a second time.
        self.is_half_done = False
        return StepResult(metrics, records)

    def _adapt(self, metrics: dict[str, float], samples: Sequence[TrainSample]) -> None:
        """Add the coefficients that a step on `samples` used to its `metrics`, and adapt them for the next step."""
        if self._reward_kl is not None:
            self._reward_kl.adapt()
        if self._kl is not None and (kl := metrics.get("policy/kl_to_reference")) is not None:
            metrics["policy/kl_coef"] = self._kl.coef
            self._kl.update(kl, num_trajectories=len({(s.id.group, s.id.trajectory) for s in samples}))
        if self._entropy is not None and (entropy := metrics.get("policy/entropy")) is not None:
            metrics["policy/entropy_coef"] = self._entropy.coef
            self._entropy.update(entropy)

    def _credit(self, groups: Sequence[TrajectoryGroup], *, step: int) -> _Credited:
        """Return the samples, with advantages, of the groups that can teach."""
        settings, parts = self._settings, list[Metrics]()
        with _timed("time/prepare_s", parts):
            parts += [rollout_metrics(groups, version=step), greedy_metrics(groups)]
            kept = filter_groups(groups, min_members=self._kept_members, zero_variance=settings.drop_zero_variance)
            samples_of = partial(
                to_samples,
                temperature=settings.temperature,
                loss_scale=settings.loss_scale,
                observed=settings.algorithm.observation_coef > 0,
            )
            samples = [s for g in kept.groups for s in samples_of(g)]
            parts.append(dropped_by_scale(kept.groups, samples))
        with _timed("time/train_s", parts):
            samples = self._with_scores(samples)
        with _timed("time/prepare_s", parts):
            if self._reward_kl is not None:
                samples, credit_metrics = self._reward_kl.apply(samples)
                parts.append(credit_metrics)
            # A copy, so that a step that fails or is computed twice counts its rewards once.
            state = copy.deepcopy(self._estimator_state)
            samples = assign_advantages(
                kept.groups,
                samples,
                estimator=self.estimator,
                min_members=self._min_members,
                has_scored=self._has_scored,
                needs_rewards=settings.needs_rewards,
                state=state,
            )
        if self._teacher is not None and samples:
            with _timed("time/train_s", parts):
                samples, credit_metrics = self._teacher.apply(kept.groups, samples, score=self.policy.score)
                parts.append(credit_metrics)
        self._has_scored |= bool(samples)
        return _Credited(kept, samples, parts, state)

    def _with_scores(self, samples: list[TrainSample]) -> list[TrainSample]:
        """Add the log-probabilities and values that the loss needs and the training forward pass does not compute.

        With one update per step and no staleness, the trained policy sampled the tokens itself, and the loss takes its own
        detached log-probabilities as the old ones.
        """
        settings = self._settings
        if not samples:
            return samples
        is_on_policy = settings.train.updates_per_step == 1 and not settings.train.max_staleness
        needs_old = not is_on_policy or settings.correction is not None
        if needs_old or self._reward_kl is not None or self._teacher is not None:
            # Score all samples before the first optimizer step: the old policy is the policy at the start of the step.
            from_engine = settings.algorithm.old_logprobs == "engine"
            scores = self._engine_logprobs(samples) if from_engine else self.policy.score(samples)
            samples = [s.replace(old_logprobs=lp) for s, lp in zip(samples, scores, strict=True)]
        if settings.algorithm.kl_in("loss").coef or self._reward_kl is not None:
            scores = self.policy.score(samples, reference=True)
            samples = [s.replace(ref_logprobs=lp) for s, lp in zip(samples, scores, strict=True)]
        if self.critic is not None:
            values = self.critic.score(samples)
            samples = [s.replace(values=v) for s, v in zip(samples, values, strict=True)]
        return samples

    def state_dict(self) -> dict[str, Any]:
        """Return the unsharded part of a checkpoint: the weight of the KL penalty and the estimator's state."""
        return {
            "reward_kl": None if self._reward_kl is None else self._reward_kl.state_dict(),
            "has_scored": self._has_scored,
            "estimator": self._estimator_state,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the result of `state_dict`."""
        self._has_scored = bool(state.get("has_scored", False))
        self._estimator_state = dict(state.get("estimator", {}))
        if self._reward_kl is not None:
            self._reward_kl.load_state_dict(state.get("reward_kl") or {})

    def load(self, folder: Path) -> None:
        """Load the sharded parts from a checkpoint.

        Raises:
            CheckpointError: the checkpoint lacks the run's critic, or is of another model.
        """
        if self.critic is not None and (folder / "policy").is_dir() and not (folder / "critic").is_dir():
            raise CheckpointError(
                "the checkpoint has no critic and this run trains one; resume with the algorithm.advantage that wrote it"
            )
        for name, one in self.stored.items():
            one.load(folder / name)

    @property
    def stored(self) -> dict[str, Stored]:
        """Folder in a checkpoint -> part that is stored there in shards."""
        return {"policy": self.policy} if self.critic is None else {"policy": self.policy, "critic": self.critic}

    @property
    def _min_members(self) -> int:
        return max(self._settings.min_members, traits_of(self.estimator).min_group)

    @property
    def _kept_members(self) -> int:
        """Number of live members that a group needs to stay in the loss."""
        return self._min_members if self._settings.drop_small_groups else 1

    def _train_critic(self, shares: Sequence[Sequence[TrainSample]]) -> list[Metrics]:
        """Take the critic's optimizer steps, one per share and pass."""
        if self.critic is None:
            return []
        parts = [value_metrics([s for share in shares for s in share])]
        for share in [*shares] * self._settings.train.passes:
            parts += [self.critic.forward_backward(share), self.critic.optim_step()]
            self.is_half_done = True
        return parts

    def _train_policy(self, shares: Sequence[Sequence[TrainSample]]) -> tuple[list[Metrics], list[PassResult]]:
        """Take the policy's optimizer steps, one per share and pass; return the metrics, and the results of the first
        pass."""
        parts: list[Metrics] = []
        first: list[PassResult] = []
        for number, share in enumerate([*shares] * self._settings.train.passes):
            result = self.policy.forward_backward(share)
            if number < len(shares):
                first.append(result)
            metrics = result.metrics
            if number and self._settings.algorithm.old_logprobs == "engine":
                # After an update these metrics include the update, so they no longer compare trainer and engine.
                metrics = {name: value for name, value in metrics.items() if not name.startswith("policy/rollout_")}
            parts += [metrics, self.policy.optim_step()]
            self.is_half_done = True
        return parts, first

    def _engine_logprobs(self, samples: Sequence[TrainSample]) -> list[Floats]:
        missing = next((s.id for s in samples if s.rollout_logprobs is None), None)
        if missing is not None:
            raise TrainingError(
                f"algorithm.old_logprobs is 'engine' and sample {missing} has no logprobs; set it to 'trainer'"
            )
        return [s.rollout_logprobs for s in samples if s.rollout_logprobs is not None]


@contextmanager
def _timed(name: str, parts: list[Metrics]) -> Iterator[None]:
    """Time a block, and append the seconds to the metrics of a step."""
    began = time.perf_counter()
    yield
    parts.append({name: Sum(time.perf_counter() - began)})


def _nothing_left(counts: Metrics) -> str:
    """Return the reasons why a step trains nothing, with their counts."""
    names = ("groups", "groups_zero_variance", "groups_all_failed", "groups_one_left")
    of = {name: int(counts[f"buffer/{name}"].value) for name in names}
    rest = of["groups"] - sum(of[name] for name in names[1:])
    reason = {
        "with equal rewards": of["groups_zero_variance"],
        "in which every trajectory failed": of["groups_all_failed"],
        "with too few live trajectories": of["groups_one_left"],
        "truncated, rejected or of weight 0": rest,
    }
    return ", ".join([f"groups: {of['groups']}", *(f"{number} {what}" for what, number in reason.items() if number)])


def _shares(samples: Sequence[TrainSample], count: int) -> list[list[TrainSample]]:
    """Cut samples into `count` shares; the samples of a trajectory stay together."""
    if not samples:
        return []
    # A split trajectory would be averaged as a separate sequence in each of two optimizer steps.
    keys = list(dict.fromkeys((s.id.group, s.id.trajectory) for s in samples))
    share_of = {key: index * count // len(keys) for index, key in enumerate(keys)}
    shares: list[list[TrainSample]] = [[] for _ in range(count)]
    for sample in samples:
        shares[share_of[sample.id.group, sample.id.trajectory]].append(sample)
    return [s for s in shares if s]
