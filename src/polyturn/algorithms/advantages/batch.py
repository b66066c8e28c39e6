"""Estimators that use the whole batch of a step.

Batch statistics are over all trained tokens if they are in the source of the estimator. They never depend on how
trajectories are cut into samples or micro-batches.
"""

from __future__ import annotations

import fnmatch
import logging
import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from polyturn.algorithms.advantages.base import (
    OUTCOMES,
    BatchAdvantages,
    Epsilon,
    GroupView,
    NormByStd,
    Outcome,
    centred,
    declare,
    discounted,
    divided,
    rewards_at_ends,
    spread,
    stream,
    whiten,
)
from polyturn.core.errors import ConfigError, UnknownNameError, did_you_mean

logger = logging.getLogger(__name__)


@declare(scope="batch")
def reinforce_plus_plus(
    batch: Sequence[GroupView],
    *,
    eps: Epsilon = 1e-8,
    gamma: Annotated[float, Field(ge=0, le=1, description="Discount of later rewards, per token.")] = 1.0,
    outcome: Outcome = "end",
) -> BatchAdvantages:
    """Take each token's return, normalised over all trained tokens of the batch: A_t = (G_t - mean) / sqrt(var + eps).

    G_t = sum over the trained tokens i >= t of gamma^(i-t) r_i. The trajectory's reward is on its last trained token; with
    another `outcome` than end, rewards of turns are on the last tokens of the turns. A penalty, such as a KL term, is on the
    token that it penalises. Groups may have one member. Source: Hu et al. 2025 (REINFORCE++).
    """
    check_outcome(outcome)
    advantages = []
    for group in batch:
        of_group = []
        for member in group.members:
            at = stream(member.samples)
            rewards_N = at.gather([s.rewards for s in member.samples])
            rewards_N[at.ends] += rewards_at_ends(member, at, outcome)
            returns_N = discounted(rewards_N, np.full(len(rewards_N), gamma))
            of_group.append(at.scatter(returns_N, member.samples))
        advantages.append(of_group)
    return whiten(batch, BatchAdvantages(advantages), eps=eps)


@declare(scope="batch", min_group=2)
def reinforce_plus_plus_baseline(batch: Sequence[GroupView], *, eps: Epsilon = 1e-8) -> BatchAdvantages:
    """Centre rewards in their group, then normalise over all trained tokens of the batch.

    A = (d - mean) / sqrt(var + eps) with d = r - mean of the group's rewards, and with mean and var of d over all trained
    tokens. Source: Hu et al. 2025 (REINFORCE++), the form with a group baseline.
    """
    return whiten(batch, spread(batch, [centred(g.totals).tolist() for g in batch]), eps=eps)


@declare(scope="batch", min_group=2)
def gpg(
    batch: Sequence[GroupView],
    *,
    f_norm: Annotated[float, Field(gt=0, description="The divisor of the differences.")] = 1.0,
) -> BatchAdvantages:
    """Centre rewards in their group and compensate for groups of equal rewards: A = alpha (r - mean) / f_norm.

    alpha = B / (B - M), where M of the batch's B trajectories are in groups of equal rewards. The tokens of such groups have
    a gradient of 0 but count in the mean of the loss, and alpha compensates for that. Source: Chu et al. 2025 (GPG),
    accurate gradient estimation, and its code.
    """
    totals = [g.totals for g in batch]
    num_all = sum(len(t) for t in totals)
    num_live = sum(len(t) for t in totals if np.ptp(t) > 0)
    # With this factor, a mean over all trajectories equals a mean over the trajectories of groups with different rewards.
    alpha = num_all / num_live if num_live else 1.0
    return spread(batch, [(alpha * centred(t) / f_norm).tolist() for t in totals])


@declare(scope="batch", needs_greedy=True)
def remax(batch: Sequence[GroupView]) -> BatchAdvantages:
    """Compare each trajectory with a greedy one of the same task: A = r - r_greedy.

    For each task one more trajectory is decoded greedily; it is never trained. If it failed, the baseline is the mean of the
    other members' rewards, which is unbiased too. If there are no other members either, A is 0. Source: Li et al. 2023
    (ReMax).
    """
    scalars = []
    for group in batch:
        totals_G, n = group.totals, len(group.members)
        if group.greedy_reward is not None:
            scalars.append((totals_G - group.greedy_reward).tolist())
        else:
            scalars.append((centred(totals_G) * n / max(n - 1, 1)).tolist())  # leave-one-out, as in rloo
    return spread(batch, scalars)


@declare(scope="batch", keeps_state=True)
def rae(
    batch: Sequence[GroupView],
    *,
    state: dict[str, Any],
    decay: Annotated[float, Field(ge=0, lt=1, description="Weight of the old mean when rewards are added.")] = 0.95,
) -> BatchAdvantages:
    """Subtract a running mean of the rewards of the same game and role: A = r - b, then b <- decay b + (1 - decay) r.

    A game is the task's data source, and a role is an agent with a separate reward. All rewards of a step are compared with
    the b at its start, so the baseline does not depend on the trajectory or on the order in which episodes end. After the
    step, b is updated as if all of the role's n rewards were equal to their mean m: b <- decay^n b + (1 - decay^n) m. b
    starts at 0. Source: Liu et al. 2025 (SPIRAL, arXiv 2506.24119), role-conditioned advantage estimation, where b is
    updated after every trajectory.
    """
    scalars, earned = [], dict[str, list[float]]()
    for group in batch:
        role = f"{group.data_source}/{group.agent or ''}"
        scalars.append((group.totals - state.get(role, 0.0)).tolist())
        earned.setdefault(role, []).extend(group.totals.tolist())
    for role, rewards in earned.items():
        share = decay ** len(rewards)
        state[role] = share * state.get(role, 0.0) + (1 - share) * math.fsum(rewards) / len(rewards)
    return spread(batch, scalars)


_Within = Annotated[
    tuple[str, ...],
    Field(description="Names of agents, with wildcards, that are compared within their trajectory; null takes solver*."),
]


@declare(scope="batch")
def hierarchical_grpo(batch: Sequence[GroupView], *, within: _Within = ("solver*",)) -> BatchAdvantages:
    """Subtract from an agent's reward the mean reward of the agents that did the same work: A = r - mean of the peers.

    Agents whose names match a pattern of `within` (`fnmatch`) are compared with the other matching agents of their
    trajectory, such as several solvers of the problem that the trajectory's proposer wrote. Other agents are compared with
    those of the same name in the group, such as the proposers of one task. The mean includes the agent itself, so an agent
    without peers gets 0. If no agent of a step matches, a warning is logged. Source: prime-rl, `hierarchical_grpo`.
    """
    agents = sorted({group.agent or "" for group in batch})
    if not any(fnmatch.fnmatchcase(agent, pattern) for agent in agents for pattern in within):
        logger.warning(
            "hierarchical_grpo: no agent of this step matches within: %s, so all are compared over their groups; agents: %s",
            ", ".join(within),
            ", ".join(filter(None, agents)) or "none with a separate reward",
        )
    peers: dict[tuple[str, ...], list[tuple[int, int]]] = {}
    for g, group in enumerate(batch):
        pattern = next((one for one in within if fnmatch.fnmatchcase(group.agent or "", one)), None)
        for m, member in enumerate(group.members):
            key = (group.id,) if pattern is None else (group.group, member.id, pattern)
            peers.setdefault(key, []).append((g, m))
    scalars = [[0.0] * len(group.members) for group in batch]
    for indices in peers.values():
        advantages = centred(np.array([batch[g].members[m].total for g, m in indices]))
        for (g, m), advantage in zip(indices, advantages.tolist(), strict=True):
            scalars[g][m] = advantage
    return spread(batch, scalars)


_RARE = ("interaction", "turns", "overlong")
"""Components that may be missing in all trajectories of a step, for example because no episode had an interaction."""


@declare(scope="batch", min_group=2, takes_penalties=False)
def gdpo(
    batch: Sequence[GroupView],
    *,
    eps: Epsilon = 1e-6,
    norm_by_std: NormByStd = True,
    weights: Annotated[
        Mapping[str, float] | None, Field(description="Weight of each named score; null takes the reward's weights.")
    ] = None,
    whiten_batch: Annotated[bool, Field(description="Normalise the sum over the batch.")] = True,
) -> BatchAdvantages:
    """Normalise each reward component separately, then add them up: A = sum of w_c (r_c - mean_c) / (std_c + eps).

    So a component with a large spread does not outweigh the others. mean_c and std_c are taken over r_c in the group. The
    sums are then normalised over the trajectories of the batch. A component is one of `Reward.components`, or another
    number that the reward function returned. It is 0 for a trajectory without it. `weights` names the components that count;
    a run sets it to `reward.weights` by default. Source: Liu et al. 2026 (GDPO). Batch statistics are over trajectories, as
    in the paper and one of its two published trainers. The other one takes them over tokens, which gives long answers more
    weight.

    Raises:
        UnknownNameError: no trajectory has a component of this name, and it is not one of `_RARE`.
    """
    known = dict.fromkeys(name for g in batch for m in g.members for name in m.components)
    if weights is None:
        weights = dict.fromkeys(known, 1.0)
    for name in weights:
        is_rare = name in _RARE or name.startswith(("tool/", "agent/"))
        if known and weights[name] and name not in known and not is_rare:
            raise UnknownNameError(
                f"gdpo weighs the reward {name!r}, which no trajectory of this step has.{did_you_mean(name, known)}"
            )
    sums = []
    for group in batch:
        sum_G = np.zeros(len(group.members))
        for name, weight in weights.items():
            values = np.array([m.components.get(name, 0.0) for m in group.members], dtype=np.float64)
            if len(values) > 1:
                scalars = centred(values)
                sum_G += weight * (divided(scalars, scalars.std(ddof=1) + eps) if norm_by_std else scalars)
        sums.append(sum_G)
    flat = np.concatenate([*sums, np.empty(0)])
    if whiten_batch and len(flat) > 1:
        sums = [divided(s - flat.mean(), flat.std(ddof=1) + eps) for s in sums]
    return spread(batch, [s.tolist() for s in sums])


def check_outcome(outcome: str) -> None:
    """Raise for an unknown combination of reward and turn scores.

    Raises:
        ConfigError: it is not one of `OUTCOMES`.
    """
    if outcome not in OUTCOMES:
        raise ConfigError(f"algorithm.advantage.outcome is {outcome!r}.{did_you_mean(outcome, OUTCOMES)}")
