"""Estimators that give each turn its own advantage, from the scores of turns and the states in which they were taken.

    turn        0     1     2
    score       0.2   none  1.0        the trajectory's reward is 1.2
    return      1.2   1.0   1.0        the sum of the scores from this turn on

All tokens of a turn get the same advantage.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from polyturn.algorithms.advantages.base import (
    BatchAdvantages,
    Epsilon,
    GroupView,
    MemberView,
    NormByStd,
    Outcome,
    TurnDiscount,
    centred,
    declare,
    divided,
    on_turns,
    turn_penalties,
    turn_rewards,
)
from polyturn.algorithms.advantages.batch import check_outcome


@declare(scope="batch", compares="baseline", needs_turn_scores=True)
def return_to_go(
    batch: Sequence[GroupView],
    *,
    eps: Epsilon = 1e-6,
    norm_by_std: Annotated[
        bool, Field(description="Divide the group's advantages by their standard deviation, which biases them.")
    ] = False,
    outcome: Outcome = "rest",
    gamma: TurnDiscount = 1.0,
    baseline: Annotated[bool, Field(description="Subtract the mean of the group's other members.")] = True,
) -> BatchAdvantages:
    """Credit each turn with the rewards from it on: A_k = G_k - b_k, G_k = sum over l >= k of gamma^(l-k) r_l.

    r_l is the reward of turn l (`outcome`). The baseline b_k is the mean of G_k over the group's other members that have a
    turn k, or 0 if there are none. It does not depend on the trajectory itself, so the gradient stays unbiased. With
    `outcome` rest and gamma 1 the gradient is unbiased for the trajectory's reward whatever the scores are, because G_k is
    then that reward minus the scores before turn k. `norm_by_std` divides by the standard deviation of A over the group's
    turns, unless that is 0. Source: Sutton et al. 2000 (policy gradient theorem, reward to go); Schulman et al. 2016,
    section 2, for a gamma below 1, which lowers the variance and adds a bias.
    """
    check_outcome(outcome)
    returns_of_turns = []
    for group in batch:
        returns = [_returns(m, gamma, outcome) for m in group.members]
        credits = [g.copy() for g in returns]  # a copy, because the baselines of other members still read the returns
        for index, mine in enumerate(credits):
            for k in range(len(mine) if baseline else 0):
                others = [g[k] for j, g in enumerate(returns) if j != index and len(g) > k]
                if others:  # the mean of the differences, which is exactly 0 for equal returns
                    mine[k] = np.mean(mine[k] - np.array(others))
        flat = np.concatenate([*credits, np.empty(0)])
        std = centred(flat).std(ddof=1) if norm_by_std and len(flat) > 1 else 0.0
        scale = std + eps if std else 1.0  # not eps alone, because equal credits need not be 0
        returns_of_turns.append([_on_members(m, c / scale) for m, c in zip(group.members, credits, strict=True)])
    return BatchAdvantages(returns_of_turns)


@declare(scope="batch", min_group=2, needs_turn_scores=True)
def mt_grpo(
    batch: Sequence[GroupView],
    *,
    eps: Epsilon = 1e-6,
    norm_by_std: NormByStd = True,
    outcome: Outcome = "end",
    outcome_weight: Annotated[float, Field(description="Weight of the outcome relative to the turn.")] = 1.0,
) -> BatchAdvantages:
    """Add the normalised score of a turn and the normalised reward of its trajectory: A_k = T_k + outcome_weight O.

    The last turn gets the whole O: A_K = T_K + O. T_k = (s_k - mean) / (std + eps), with mean and std of the scores of turn
    k in the group; 0 if the turn has no score or no other member's turn k has one. O is computed in the same way from the
    rewards of the trajectories; with `outcome` rest, from the rewards minus the scores of the turns; with ignore, O is 0.
    Source: Zeng et al. 2025 (Turn-Level Credit Assignment, MT-GRPO, first version), where there are two turns, the last has
    no score, and the outcome's reward does not include the first turn's score. If a reward is the sum of all scores, use
    rest, which counts each score only once.
    """
    check_outcome(outcome)
    advantages = []
    for group in batch:
        counted_G = group.totals
        if outcome == "rest":
            counted_G = counted_G - np.array([np.nan_to_num(m.turn_scores_K).sum() for m in group.members])
        outcome_G = _standing(counted_G, norm_by_std, eps) * (outcome != "ignore")
        num_turns = [m.num_turns for m in group.members]
        credits = [np.zeros(k) for k in num_turns]
        # Normalise each turn index separately: a mean over all turns would compare first turns with last turns.
        for k in range(max([0, *num_turns])):
            scored = [i for i, m in enumerate(group.members) if len(m.turn_scores_K) > k and np.isfinite(m.turn_scores_K[k])]
            values = np.array([group.members[i].turn_scores_K[k] for i in scored], dtype=np.float64)
            for i, standing in zip(scored, _standing(values, norm_by_std, eps), strict=True):
                credits[i][k] = standing
        for mine, of_outcome in zip(credits, outcome_G, strict=True):
            mine[:-1] += outcome_weight * of_outcome
            mine[-1:] += of_outcome  # the last turn gets the whole outcome, without `outcome_weight`
        advantages.append([_on_members(m, c) for m, c in zip(group.members, credits, strict=True)])
    return BatchAdvantages(advantages)


@declare(scope="batch", min_group=2, needs_states=True)
def gigpo(
    batch: Sequence[GroupView],
    *,
    eps: Epsilon = 1e-6,
    norm_by_std: NormByStd = True,
    outcome: Outcome = "rest",
    step_weight: Annotated[float, Field(description="Weight of the comparison of turns.")] = 1.0,
    gamma: TurnDiscount = 0.95,
) -> BatchAdvantages:
    """Compare trajectories in their group, and turns that were taken in the same state: A_k = E + step_weight S_k.

    E = (R - mean) / (std + eps) over the rewards R of the group. The turns of the group with equal state keys, also those of
    one trajectory, form an anchor group. S_k = (G_k - mean) / (std + eps) over the anchor group, with G_k = sum over l >= k
    of gamma^(l-k) r_l; S_k is 0 for a state that occurs once. Without `norm_by_std` E and S_k are only centred, which is the
    default of the authors' code. The key of a state is the `state_key` in the previous turn's info, else the text of that
    turn's observation; all first turns have the same key. Source: Feng et al. 2025 (GiGPO), equations 3 and 5 to 8.
    """
    check_outcome(outcome)
    advantages = []
    for group in batch:
        of_group = _standing(group.totals, norm_by_std, eps)
        returns = [_returns(m, gamma, outcome) for m in group.members]
        anchors: dict[Hashable, list[tuple[int, int]]] = {}
        for i, member in enumerate(group.members):
            for k, state in enumerate(member.states_K[: len(returns[i])]):
                if state is not None:
                    anchors.setdefault(state, []).append((i, k))
        credits = [np.full(len(g), e) for g, e in zip(returns, of_group, strict=True)]
        # For a state that occurs once `_standing` returns 0, so the turn keeps only the trajectory's E.
        for indices in anchors.values():
            values = np.array([returns[i][k] for i, k in indices])
            for (i, k), standing in zip(indices, _standing(values, norm_by_std, eps), strict=True):
                credits[i][k] += step_weight * standing
        advantages.append([_on_members(m, c) for m, c in zip(group.members, credits, strict=True)])
    return BatchAdvantages(advantages)


def _returns(member: MemberView, gamma: float, outcome: Outcome) -> NDArray[np.float64]:
    """Return [K] the discounted sum of rewards from each turn on, including penalties on tokens."""
    returns_K = turn_rewards(member, outcome) + turn_penalties(member)
    for k in reversed(range(len(returns_K) - 1)):
        returns_K[k] += gamma * returns_K[k + 1]
    return returns_K


def _standing(values: NDArray[np.float64], norm_by_std: bool, eps: float) -> NDArray[np.float64]:
    """Return each value minus the mean, divided by the standard deviation if `norm_by_std`; 0 for a single value."""
    if len(values) < 2:
        return np.zeros(len(values))
    scalars = centred(values)
    return divided(scalars, scalars.std(ddof=1) + eps) if norm_by_std else scalars


def _on_members(member: MemberView, credits_K: NDArray[np.float64]) -> list[NDArray[np.float32]]:
    return [on_turns(s, credits_K) for s in member.samples]
