"""The interface of an advantage estimator: its inputs, its results, and its declared traits.

    scope "group"    (rewards_G, samples_G, **options) -> for each member, for each of its samples, [T] advantages
    scope "batch"    (batch, **options) -> BatchAdvantages; `batch` is a list of `GroupView`, each with its `MemberView`s

An estimator is a plain function. Its traits (`declare`) tell the trainer which inputs to provide (a critic's values, a
greedy rollout), whether a group of equal rewards can be dropped, and which group sizes to reject before sampling.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Annotated, Any, Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from polyturn.core.arrays import Floats
from polyturn.core.sample import TrainSample
from polyturn.infra.plugins import Registry

Rewards = NDArray[np.float64]
"""[G] the scalar reward of each trajectory of a group."""
Estimator = Callable[..., Any]
"""(rewards_G, samples_G, **options) -> for each trajectory, for each of its samples, [T] advantages, 0 at tokens without
weight. A trajectory may have no sample (if no turn fitted); its reward still counts in the group's statistics. An estimator
with `scope="batch"` has the form (batch, **options) -> BatchAdvantages."""

advantages: Registry[Estimator] = Registry("estimators")


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """The inputs that an estimator needs, and the work that the trainer may skip for it."""

    scope: Literal["group", "batch"] = "group"
    min_group: int = 1
    """Smallest number of members of a group."""
    compares: bool | str = False
    """For an estimator that also accepts groups of one: whether it compares the members of larger groups. A string names an
    option of the estimator, true by default, that decides this. An estimator with a `min_group` of 2 or more always compares
    members and need not set this."""
    draws: str | None = None
    """Name of the option that sets the size of the subsets that are drawn from a group, as the k of pass@k. Its value must
    be at least 1 and less than the group's size."""
    only_compares: bool = False
    """Whether a group of equal rewards has only advantages of 0 and does not affect the advantages of other groups. If so,
    the trainer may drop such a group before it computes advantages."""
    needs_turn_scores: bool = False
    needs_values: bool = False
    """Whether it reads a critic's values at the trained tokens (`TrainSample.values`)."""
    needs_states: bool = False
    """Whether it reads the keys of the states in which turns were taken (`MemberView.states_K`)."""
    needs_greedy: bool = False
    """Whether it needs one more rollout of each task, decoded greedily and never trained (`GroupView.greedy_reward`)."""
    keeps_state: bool = False
    """Whether it takes `state`, a dict of numbers that it updates and that checkpoints contain. Its changes are discarded if
    the step fails."""
    takes_penalties: bool = True
    """Whether it uses rewards on single tokens (`TrainSample.rewards`), such as a KL penalty."""

    def __call__(self, estimator: Estimator) -> Estimator:
        """Record these traits for `estimator`, and return it: `@declare(needs_values=True)`."""
        _traits[estimator] = self
        return estimator


declare = Traits
_traits: dict[Estimator, Traits] = {}


def traits_of(estimator: Estimator) -> Traits:
    """Return the declared traits of `estimator`, with or without bound options; the defaults if it declared none."""
    while isinstance(estimator, functools.partial):  # bound options change no trait
        estimator = estimator.func
    return _traits.get(estimator, Traits())


def members_needed(estimator: Estimator, *, group_size: int) -> int:
    """Return the smallest number of live members with which a group is useful: 1 for an estimator without a group baseline.

    An estimator with a group baseline has nothing to compare a single live member with. Its advantage would be its raw
    reward, on another scale than the advantages of other groups. With `group_size` 1 all groups have one member, so these
    are kept if the estimator accepts them.
    """
    traits = traits_of(estimator)
    compares = traits.compares if isinstance(traits.compares, bool) else _option(estimator, traits.compares, True)
    return max(traits.min_group, 2 if compares and group_size > 1 else 1)


def components_of(estimator: Estimator) -> frozenset[str]:
    """Return the reward components that `estimator` weighs one by one; empty if it uses the total."""
    weights: Mapping[str, float] | None = _option(estimator, "weights", None)
    return frozenset(name for name, weight in (weights or {}).items() if weight)


def _option(estimator: Estimator, name: str, default: Any) -> Any:
    """Return the bound value of an option of `estimator`; the outermost binding wins."""
    while isinstance(estimator, functools.partial):
        if name in estimator.keywords:
            return estimator.keywords[name]
        estimator = estimator.func
    return default


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberView:
    """One trajectory as an estimator of a batch sees it."""

    id: str
    reward: float
    """The reward of the trajectory; of one agent, if the agents of a trajectory are separate members."""
    samples: tuple[TrainSample, ...]
    components: Mapping[str, float] = field(default_factory=dict)
    """The named scores of the reward, and the other numbers that the reward function returned."""
    turn_scores_K: NDArray[np.float64] = field(default_factory=lambda: np.empty(0))
    """[K] the score of each turn, NaN for a turn without one."""
    states_K: tuple[Hashable, ...] = ()
    """[K] a key of the state in which each turn was taken; None if unknown."""

    @property
    def num_turns(self) -> int:
        """K: the number of turns."""
        of_tokens = [int(s.turn_ids.max()) + 1 for s in self.samples if len(s)]
        return max([len(self.turn_scores_K), *of_tokens])

    @property
    def penalty(self) -> float:
        """Sum of the rewards on single trained tokens."""
        return float(sum(_penalties(s).sum() for s in self.samples))

    @property
    def total(self) -> float:
        """The reward plus the penalties on its tokens."""
        return self.reward + self.penalty


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupView:
    """The members that an estimator compares: the live trajectories of one task, or one agent's part of each."""

    id: str
    members: tuple[MemberView, ...]
    data_source: str = ""
    """The data source of the task."""
    agent: str | None = None
    """The agent of the members; None if each trajectory has one reward."""
    group: str = ""
    """Id of the group of trajectories; it is the same in the views of all agents of these trajectories."""
    greedy_reward: float | None = None
    """The reward of a greedily decoded rollout of the task; None without one, or if it failed."""

    @property
    def totals(self) -> Rewards:
        """[G] the reward of each member, penalties included."""
        return np.array([m.total for m in self.members], dtype=np.float64)


class BatchAdvantages(NamedTuple):
    """The result of an estimator that sees a whole batch."""

    advantages: list[list[list[Floats]]]
    """For each group, member and sample [T], 0 at tokens without weight."""
    returns: list[list[list[Floats]]] | None = None
    """The critic's targets, in the same shape; NaN where no value was used. None without a critic."""


class Stream(NamedTuple):
    """The trained tokens of a trajectory in the order of time (axis N), across all of its samples."""

    sample_N: NDArray[np.int64]
    token_N: NDArray[np.int64]
    turn_N: NDArray[np.int64]

    def gather(self, arrays: Sequence[Floats | None]) -> NDArray[np.float64]:
        """Return [N] the entries of per-sample arrays [T] at the tokens of the stream; an array that is None counts as 0."""
        out = np.zeros(len(self.token_N))
        for index, array in enumerate(arrays):
            if array is not None:
                mine = self.sample_N == index
                out[mine] = np.asarray(array, dtype=np.float64)[self.token_N[mine]]
        return out

    def scatter(self, values_N: NDArray[np.float64], samples: Sequence[TrainSample]) -> list[Floats]:
        """Return for each sample [T] the values at its trained tokens, 0 elsewhere."""
        out = [np.zeros(len(s), dtype=np.float32) for s in samples]
        for index, array in enumerate(out):
            mine = self.sample_N == index
            array[self.token_N[mine]] = values_N[mine]
        return out

    @property
    def ends(self) -> NDArray[np.int64]:
        """[U] the index in the stream of the last token of each turn with trained tokens."""
        return np.flatnonzero(np.append(self.turn_N[1:] != self.turn_N[:-1], True)) if len(self.turn_N) else self.turn_N


def stream(samples: Sequence[TrainSample]) -> Stream:
    """Return the trained tokens of one trajectory in the order of time: by turn, then in the order of its samples."""
    tokens = [np.flatnonzero(s.loss_weights) for s in samples]
    sample_N = np.repeat(np.arange(len(samples)), [len(t) for t in tokens])
    token_N = np.concatenate([*tokens, np.empty(0, np.int64)]).astype(np.int64)
    turns = [s.turn_ids[t] for s, t in zip(samples, tokens, strict=True)]
    turn_N = np.maximum(np.concatenate([*turns, np.empty(0, np.int64)]), 0).astype(np.int64)
    # Sorted by turn, because segments may interleave in time; stable, to keep the order of tokens within a turn.
    order = np.argsort(turn_N, kind="stable")
    return Stream(sample_N[order], token_N[order], turn_N[order])


# Annotations of arguments that several estimators have: ranges and descriptions of the keys of `algorithm.advantage`.
Epsilon = Annotated[float, Field(ge=0, description="Added to the divisor.")]
NormByStd = Annotated[
    bool,
    Field(description="Divide the group's advantages by their standard deviation; false makes grpo Dr. GRPO."),
]
TurnDiscount = Annotated[float, Field(ge=0, le=1, description="Discount per turn.")]
Outcome = Annotated[
    Literal["rest", "add", "ignore", "end"], Field(description="The combination of the reward and the scores of turns.")
]
"""How the reward of each turn is made from the trajectory's reward and the scores of its turns.

rest      a turn gets its score; the last turn also gets the trajectory's reward minus all scores, so that the rewards of the
          turns sum to the trajectory's reward
add       a turn gets its score; the last turn also gets the trajectory's reward
ignore    a turn gets its score; the trajectory's reward is not used
end       the last turn gets the trajectory's reward; all others get 0, and scores are not used
"""
OUTCOMES: tuple[str, ...] = get_args(get_args(Outcome)[0])


def turn_rewards(member: MemberView, outcome: Outcome) -> NDArray[np.float64]:
    """Return [K] the reward of each turn, without penalties on single tokens."""
    rewards_K = np.zeros(member.num_turns)
    scores_K = np.nan_to_num(np.asarray(member.turn_scores_K, dtype=np.float64))
    if outcome != "end":
        rewards_K[: len(scores_K)] = scores_K
    if len(rewards_K) and outcome != "ignore":
        rewards_K[-1] += member.reward - (scores_K.sum() if outcome == "rest" else 0.0)
    return rewards_K


def turn_penalties(member: MemberView) -> NDArray[np.float64]:
    """Return [K] the sum of the penalties on each turn's trained tokens."""
    at = stream(member.samples)
    penalties_K = np.zeros(member.num_turns)
    # `add.at`, because an indexed += would add the penalty of only one token of each turn.
    np.add.at(penalties_K, at.turn_N, at.gather([s.rewards for s in member.samples]))
    return penalties_K


def rewards_at_ends(member: MemberView, at: Stream, outcome: Outcome) -> NDArray[np.float64]:
    """Return [U] the reward at the last token of each trained turn (`at.ends`).

    The reward of a turn without trained tokens is added to the reward of the last trained turn before it. If there is none,
    the reward is dropped, because no trained token contributed to it.
    """
    rewards_K = turn_rewards(member, outcome)
    # The difference of the running sums at two successive trained turns is the reward of the first one plus the rewards of
    # the untrained turns between them.
    summed = np.concatenate([[0.0], np.cumsum(rewards_K)])
    turns = at.turn_N[at.ends]
    until = np.append(turns[1:], len(rewards_K))
    return summed[until] - summed[turns]


def centred(values_G: Rewards) -> Rewards:
    """Return [G] the values minus their mean.

    The first value is subtracted before the mean, so equal values give exactly 0, and small differences between large values
    keep their precision.
    """
    differences = values_G - values_G[:1]
    return differences - differences.mean()


def divided(differences_G: Rewards, divisor: float) -> Rewards:
    """Return [G] the differences over `divisor`; unchanged if it is 0, as for equal values and an eps of 0."""
    return differences_G / (divisor or 1.0)


def discounted(values_N: NDArray[np.float64], decay_N: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return [N] the sums x_n = v_n + decay_n x_{n+1}, computed backwards from x_N = 0."""
    pairs = zip(reversed(values_N.tolist()), reversed(decay_N.tolist()), strict=True)
    sums = accumulate(pairs, lambda later, pair: pair[0] + pair[1] * later, initial=0.0)
    return np.array([*sums][:0:-1], dtype=np.float64)


def spread(batch: Sequence[GroupView], scalars: Sequence[Sequence[float]]) -> BatchAdvantages:
    """Return advantages in which all trained tokens of a member have the member's scalar; `scalars` has one per member."""
    return BatchAdvantages(
        [
            [[on_weighted(s, a) for s in m.samples] for m, a in zip(g.members, of_group, strict=True)]
            for g, of_group in zip(batch, scalars, strict=True)
        ]
    )


def on_weighted(sample: TrainSample, value: float) -> Floats:
    """Return [T] `value` at every weighted token, 0 elsewhere."""
    return np.where(sample.loss_weights != 0, np.float32(value), np.float32(0.0))


def on_turns(sample: TrainSample, values_K: NDArray[np.float64]) -> Floats:
    """Return [T] at every weighted token the value of its turn, 0 elsewhere."""
    weighted = sample.loss_weights != 0
    out = np.zeros(len(sample), dtype=np.float32)
    out[weighted] = values_K[sample.turn_ids[weighted]]
    return out


def whiten(batch: Sequence[GroupView], estimate: BatchAdvantages, *, eps: float = 1e-8) -> BatchAdvantages:
    """Normalise the advantages to mean 0 and variance 1 over all trained tokens of the batch; keep the returns unchanged."""
    samples = [s for g in batch for m in g.members for s in m.samples]
    arrays = [a for g in estimate.advantages for m in g for a in m]
    picked = [a[s.loss_weights != 0].astype(np.float64) for s, a in zip(samples, arrays, strict=True)]
    flat = np.concatenate([*picked, np.empty(0)])
    if not len(flat):
        return estimate
    # Mean and variance are over tokens, not trajectories, as in the papers of the estimators that call this.
    first, flat = flat[0], flat - flat[0]  # as in `centred`
    mean, scale = flat.mean(), np.sqrt(flat.var(ddof=1) + eps) if len(flat) > 1 else 1.0
    done = iter(
        [
            np.where(s.loss_weights != 0, divided(a - first - mean, scale), 0.0).astype(np.float32)
            for s, a in zip(samples, arrays, strict=True)
        ]
    )
    return estimate._replace(advantages=[[[next(done) for _ in m] for m in g] for g in estimate.advantages])


def _penalties(sample: TrainSample) -> NDArray[np.float64]:
    if sample.rewards is None:
        return np.zeros(0)
    return sample.rewards[sample.loss_weights != 0].astype(np.float64)
