"""Update: from the groups of one step to new parameters. What is computed, in which order, and nothing about when.

    groups -> filters -> samples -> scores (old, reference, values) -> KL in the rewards -> advantages -> teacher ->
    correction -> filters -> critic: value loss, optimizer -> policy: loss, optimizer

Scores come before advantages, because an estimator may read values and a reward may hold a KL term. Everything runs in one
go, without giving up the event loop.
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
    """The options of a step beside the loss itself."""

    train: TrainOptions = field(default_factory=TrainOptions)
    algorithm: AlgorithmOptions = field(default_factory=AlgorithmOptions)
    temperature: float = 1.0
    loss_scale: LossScale | None = None
    """Which sampled tokens are trained; None is all but those that a scheduler masked."""
    min_members: int = 1
    """Number of members with a reward that a group needs to teach anything; never fewer than the estimator declares."""
    drop_small_groups: bool = True
    """Whether a smaller group leaves the loss; else its advantages are 0 and what else the loss holds is trained."""
    drop_zero_variance: bool = True
    correction: CorrectionSettings | None = None
    """The weights and rejection of tokens that were sampled off the policy; None takes them as they are."""


class StepResult(NamedTuple):
    """The result of one step."""

    metrics: dict[str, float]
    trained: dict[str, Trained]
    """Trajectory id -> what the step made of it, for the records."""


class Revised(NamedTuple):
    """The groups, samples and advantages that a step is to train on."""

    groups: Sequence[TrajectoryGroup]
    """Others than those of the step are credited again."""
    samples: Sequence[TrainSample]
    """Of the groups of the step, with their advantages."""


Revise = Callable[[int, Sequence[TrajectoryGroup], Sequence[TrainSample], Mapping[str, float]], Revised]
"""Is shown the number of steps taken, the groups of this one, their samples, and the metrics so far."""


class _Credited(NamedTuple):
    kept: FilteredGroups
    samples: list[TrainSample]
    parts: list[Metrics]
    state: dict[str, Any]
    """Of the estimator, behind this step."""


class Update:
    """Takes the optimizer steps of a run, one call for each."""

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
            policy: What is trained.
            estimator: From rewards to advantages, its options bound.
            settings: What else a step computes.
            kl: Gets each step's KL to the reference, and adapts its weight.
            entropy: Gets each step's entropy, and adapts the weight of the bonus.
            critic: Gives the estimator values, and is trained on the returns that it answers with.
            reward_kl: Takes a KL penalty off the rewards; `policy` needs a reference then.
            teacher: Adds its judgement of the sampled tokens to advantages.
        """
        self.policy = policy
        self.critic = critic
        self._kl = kl
        self._entropy = entropy
        self._reward_kl = reward_kl
        self._teacher = teacher
        self.estimator = estimator
        self.revise: Revise | None = None
        """May change what a step trains on, once its advantages are known."""
        self.is_half_done = False
        """Whether some of a step's optimizer steps are taken and others are not: no state to go on from."""
        self._settings = settings or UpdateSettings()
        self._has_scored = False
        """Whether a step has brought what the estimator needs of turns; one that does not is not a mistake afterwards."""
        self._estimator_state: dict[str, Any] = {}

    @property
    def has_baseline(self) -> bool:
        """Whether each group has one more trajectory, decoded greedily and never trained, for the estimator."""
        return traits_of(self.estimator).needs_greedy

    def has_signal(self, group: TrajectoryGroup) -> bool:
        """Return whether a group's members differ in what the estimator reads: rewards, their parts, scores of turns."""
        traits = traits_of(self.estimator)
        by_turns = traits.needs_turn_scores or traits.needs_states
        components = components_of(self.estimator)
        return has_signal(group, min_members=self._min_members, by_turns=by_turns, components=components)

    def run(self, groups: Sequence[TrajectoryGroup], *, step: int) -> StepResult:
        """Take the optimizer steps of a training step, `minibatches` in each of `passes`, on its groups.

        Raises:
            TrainingError: the loss or the gradient is not finite, or the samples lack what the loss needs.
        """
        settings = self._settings
        kept, samples, parts, estimator_state = self._credit(groups, step=step)
        if self.revise is not None:
            # Changed groups are credited from the start: filters, scores and advantages all look at them.
            revised = self.revise(step, groups, samples, reduce(merge(parts)))
            if revised.groups is not groups:
                groups = revised.groups
                kept, samples, parts, estimator_state = self._credit(groups, step=step)
            else:
                samples = list(revised.samples)
        rejected: set[str] = set()
        with _timed("time/prepare_s", parts):
            # Behind the advantages: `negative_bound` reads them, and what is rejected counts in the statistics of its group.
            if settings.correction is not None:
                before = {s.id.trajectory for s in samples if s.num_weighted}
                samples, correction_metrics = correct(samples, settings.correction, version=step)
                rejected = before - {s.id.trajectory for s in samples if s.num_weighted}
                parts.append(correction_metrics)
            filtered = filter_samples(samples, kept.groups, drop_truncated=settings.algorithm.drop_truncated)
        parts += [kept.metrics, filtered.metrics]
        # While the critic warms up its values, and so the advantages, mean nothing yet.
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
            logger.warning("step %d: no group has anything to learn from (%s); the weights stay as they are", step + 1, why)
        order = [sample for share in shares for sample in share]
        metrics, cuts = reduce(merge(parts)), settings.algorithm.drop_truncated
        # Behind the passes, so that the metrics name the weights that this step was trained with.
        if self._reward_kl is not None:
            self._reward_kl.adapt()
        if self._kl is not None and (kl := metrics.get("policy/kl_to_reference")) is not None:
            metrics["policy/kl_coef"] = self._kl.coef
            self._kl.update(kl, num_trajectories=len({(s.id.group, s.id.trajectory) for s in order}))
        if self._entropy is not None and (entropy := metrics.get("policy/entropy")) is not None:
            metrics["policy/entropy_coef"] = self._entropy.coef
            self._entropy.update(entropy)
        least = self._kept_members
        records = trained_of(groups, kept.groups, order, passes, rejected=rejected, drops_truncated=cuts, min_members=least)
        self._estimator_state = estimator_state
        # Last: the caller counts the step only once this returns, and a checkpoint of a step half counted repeats it.
        self.is_half_done = False
        return StepResult(metrics, records)

    def _credit(self, groups: Sequence[TrajectoryGroup], *, step: int) -> _Credited:
        """Make samples of the groups that have something to learn from, each with its advantages."""
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
            # A copy, so that a step that fails, or is credited twice, counts its rewards once.
            state = copy.deepcopy(self._estimator_state)
            samples = assign_advantages(
                kept.groups,
                samples,
                estimator=self.estimator,
                min_members=self._min_members,
                has_scored=self._has_scored,
                state=state,
            )
        if self._teacher is not None and samples:
            with _timed("time/train_s", parts):
                samples, credit_metrics = self._teacher.apply(kept.groups, samples, score=self.policy.score)
                parts.append(credit_metrics)
        self._has_scored |= bool(samples)
        return _Credited(kept, samples, parts, state)

    def _with_scores(self, samples: list[TrainSample]) -> list[TrainSample]:
        """Add the log-probabilities that the loss needs and that the forward pass of training does not give.

        With one update in each step and no staleness, the policy that is trained is the one that sampled, and the loss takes
        its own log-probabilities, detached, as the old ones.
        """
        settings = self._settings
        if not samples:
            return samples
        is_on_policy = settings.train.updates_per_step == 1 and not settings.train.max_staleness
        needs_old = not is_on_policy or settings.correction is not None
        if needs_old or self._reward_kl is not None or self._teacher is not None:
            # All are scored before the first optimizer step: the old policy is that of the start of the step.
            is_given = settings.algorithm.old_logprobs == "engine"
            scores = self._engine_logprobs(samples) if is_given else self.policy.score(samples)
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
        """Continue from what `state_dict` returned."""
        self._has_scored = bool(state.get("has_scored", False))
        self._estimator_state = dict(state.get("estimator", {}))
        if self._reward_kl is not None:
            self._reward_kl.load_state_dict(state.get("reward_kl") or {})

    def load(self, folder: Path) -> None:
        """Continue from what lies in a checkpoint in shards.

        Raises:
            CheckpointError: it lacks the critic that the run trains, or is of another model.
        """
        if self.critic is not None and (folder / "policy").is_dir() and not (folder / "critic").is_dir():
            raise CheckpointError(
                "the checkpoint has no critic and this run trains one; resume with the algorithm.advantage that wrote it"
            )
        for name, one in self.stored.items():
            one.load(folder / name)

    @property
    def stored(self) -> dict[str, Stored]:
        """The parts that checkpoints keep in shards, each in a folder of its name."""
        return {"policy": self.policy} if self.critic is None else {"policy": self.policy, "critic": self.critic}

    @property
    def _min_members(self) -> int:
        return max(self._settings.min_members, traits_of(self.estimator).min_group)

    @property
    def _kept_members(self) -> int:
        """The members that a group must have left to stay in the loss."""
        return self._min_members if self._settings.drop_small_groups else 1

    def _train_critic(self, shares: Sequence[Sequence[TrainSample]]) -> list[Metrics]:
        """Take the critic's optimizer steps: one for each share, in each pass."""
        if self.critic is None:
            return []
        parts = [value_metrics([s for share in shares for s in share])]
        for share in [*shares] * self._settings.train.passes:
            parts += [self.critic.forward_backward(share), self.critic.optim_step()]
            self.is_half_done = True
        return parts

    def _train_policy(self, shares: Sequence[Sequence[TrainSample]]) -> tuple[list[Metrics], list[PassResult]]:
        """Take the policy's optimizer steps: one for each share, in each pass; return the results of the first pass too."""
        parts: list[Metrics] = []
        first: list[PassResult] = []
        for number, share in enumerate([*shares] * self._settings.train.passes):
            result = self.policy.forward_backward(share)
            if number < len(shares):
                first.append(result)
            metrics = result.metrics
            if number and self._settings.algorithm.old_logprobs == "engine":
                # Behind an update they say how far that went, and not whether trainer and engine agree.
                metrics = {name: value for name, value in metrics.items() if not name.startswith("policy/rollout_")}
            parts += [metrics, self.policy.optim_step()]
            self.is_half_done = True
        return parts, first

    def _engine_logprobs(self, samples: Sequence[TrainSample]) -> list[Floats]:
        missing = next((s.id for s in samples if s.rollout_logprobs is None), None)
        if missing is not None:
            raise TrainingError(
                f"algorithm.old_logprobs is 'engine' and sample {missing} came without logprobs; set it to 'trainer'"
            )
        return [s.rollout_logprobs for s in samples if s.rollout_logprobs is not None]


@contextmanager
def _timed(name: str, parts: list[Metrics]) -> Iterator[None]:
    """Add the seconds of a block to the metrics of a step."""
    began = time.perf_counter()
    yield
    parts.append({name: Sum(time.perf_counter() - began)})


def _nothing_left(counts: Metrics) -> str:
    """Return why each group of a step was left out, where the whole step trains nothing."""
    names = ("groups", "groups_zero_variance", "groups_all_failed", "groups_one_left")
    of = {name: int(counts[f"buffer/{name}"].value) for name in names}
    rest = of["groups"] - sum(of[name] for name in names[1:])
    reason = {
        "with the same reward for every member": of["groups_zero_variance"],
        "in which every trajectory failed": of["groups_all_failed"],
        "with one trajectory left that did not fail": of["groups_one_left"],
        "truncated, rejected or of weight 0": rest,
    }
    return ", ".join([f"groups: {of['groups']}", *(f"{number} {what}" for what, number in reason.items() if number)])


def _shares(samples: Sequence[TrainSample], count: int) -> list[list[TrainSample]]:
    """Cut samples into `count` shares; those of one trajectory stay together."""
    if not samples:
        return []
    # One that was split would be averaged as a sequence of its own in each of two optimizer steps.
    keys = list(dict.fromkeys((s.id.group, s.id.trajectory) for s in samples))
    share_of = {key: index * count // len(keys) for index, key in enumerate(keys)}
    shares: list[list[TrainSample]] = [[] for _ in range(count)]
    for sample in samples:
        shares[share_of[sample.id.group, sample.id.trajectory]].append(sample)
    return [s for s in shares if s]
