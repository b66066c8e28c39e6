"""Generalised advantage estimation with a critic, over tokens, over turns, and over both.

    stream of trained tokens    a0 a1 | a2 a3 a4 |       observations between the turns are not part of the stream
    rewards                      .  r0   .  .  r1        on the last trained token of each turn
    values                      v0 v1   v2 v3 v4         v_t is the value of the state in which token t is sampled

delta_t = r_t + gamma v_next - v_t;  A_t = delta_t + gamma lam A_next, where "next" is the next token of the stream;  the
critic's target is A_t + v_t. The critic's output at observations is not used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from polyturn.algorithms.advantages.base import (
    BatchAdvantages,
    GroupView,
    MemberView,
    Outcome,
    Stream,
    TurnDiscount,
    declare,
    discounted,
    rewards_at_ends,
    stream,
    whiten,
)
from polyturn.algorithms.advantages.batch import check_outcome

Numbers = NDArray[np.float64]
_Gamma = Annotated[float, Field(ge=0, le=1, description="Discount of later rewards, per token; for turn_gae per turn.")]
_Lam = Annotated[float, Field(ge=0, le=1, description="Weight of later steps, per token or turn like `gamma`.")]
_Whiten = Annotated[bool, Field(description="Normalise over the step's trained tokens.")]


@declare(scope="batch", needs_values=True)
def gae(
    batch: Sequence[GroupView],
    *,
    gamma: _Gamma = 1.0,
    lam: _Lam = 1.0,
    outcome: Outcome = "rest",
    whiten_batch: _Whiten = True,
) -> BatchAdvantages:
    """Estimate the advantage of each token: A_t = sum over l of (gamma lam)^l delta_{t+l}, over trained tokens only.

    After a turn's last token, v_next is the value at the next turn's first trained token. Advantages are normalised over the
    batch's trained tokens unless `whiten_batch` is false. Source: Schulman et al. 2016 (GAE), equation 16.
    """

    def one(member: MemberView, at: Stream, values_N: Numbers) -> _Estimates:
        rewards_N = at.gather([s.rewards for s in member.samples])
        rewards_N[at.ends] += rewards_at_ends(member, at, outcome)
        advantages_N = _gae(rewards_N, values_N, gamma, lam)
        return _Estimates(advantages_N, advantages_N + values_N)

    return _estimate(batch, one, outcome, whiten_batch)


@declare(scope="batch", needs_values=True)
def turn_gae(
    batch: Sequence[GroupView],
    *,
    gamma: _Gamma = 1.0,
    lam: _Lam = 1.0,
    outcome: Outcome = "rest",
    whiten_batch: _Whiten = True,
) -> BatchAdvantages:
    """Estimate the advantage of each turn by the recursion of `gae` over turns: a whole completion is one action.

    The value of a turn is the value at its first trained token, that is, of the state before the completion. The critic is
    trained only at these tokens. gamma and lam apply per turn, not per token. All tokens of a turn get its advantage.
    Source: Li et al. 2025 (Turn-PPO); the recursion is Schulman et al. 2016, equation 16.
    """

    def one(member: MemberView, at: Stream, values_N: Numbers) -> _Estimates:
        ends = at.ends
        starts = np.append(0, ends[:-1] + 1) if len(ends) else ends  # [U] the first trained token of each turn
        rewards_U = rewards_at_ends(member, at, outcome)
        if len(ends):
            rewards_U = rewards_U + np.add.reduceat(at.gather([s.rewards for s in member.samples]), starts)
        advantages_U = _gae(rewards_U, values_N[starts], gamma, lam)
        returns_N = np.full(len(values_N), np.nan)  # the critic is trained only where its value was read
        returns_N[starts] = advantages_U + values_N[starts]
        return _Estimates(np.repeat(advantages_U, ends - starts + 1), returns_N)

    return _estimate(batch, one, outcome, whiten_batch)


@declare(scope="batch", needs_values=True)
def bilevel_gae(
    batch: Sequence[GroupView],
    *,
    gamma: _Gamma = 1.0,
    lam: _Lam = 1.0,
    outcome: Outcome = "rest",
    whiten_batch: _Whiten = True,
    turn_gamma: TurnDiscount = 1.0,
    turn_lam: Annotated[float, Field(ge=0, le=1, description="Weight of later turns.")] = 1.0,
) -> BatchAdvantages:
    """Estimate the advantages of turns first, then those of the tokens within each turn.

    So the discount per token does not reduce the credit that a turn gets from later turns.

    Turns: delta_k = r_k + turn_gamma V_{k+1} - V_k and A_k = delta_k + turn_gamma turn_lam A_{k+1}, V_k the value at the
    last trained token of turn k. Tokens of a turn: the last one has A_k, and before it A_i = delta_i + gamma lam A_{i+1},
    delta_i = r_i + gamma v_{i+1} - v_i. Source: Wang et al. 2025 (VAGEN), Bi-Level GAE; its code has one lambda for both.
    """

    def one(member: MemberView, at: Stream, values_N: Numbers) -> _Estimates:
        ends = at.ends
        rewards_N = at.gather([s.rewards for s in member.samples])
        turn_U = _gae(rewards_at_ends(member, at, outcome) + rewards_N[ends], values_N[ends], turn_gamma, turn_lam)
        deltas_N = rewards_N + gamma * np.append(values_N[1:], 0.0) - values_N
        # The last token of a turn has the turn's advantage. The recursion over earlier tokens starts there, so it does not
        # cross into the next turn.
        deltas_N[ends] = turn_U
        decay_N = np.full(len(values_N), gamma * lam)
        decay_N[ends] = 0.0
        advantages_N = discounted(deltas_N, decay_N)
        return _Estimates(advantages_N, advantages_N + values_N)

    return _estimate(batch, one, outcome, whiten_batch)


class _Estimates(NamedTuple):
    """Advantages and critic targets of one trajectory, over its stream of trained tokens."""

    advantages_N: Numbers
    returns_N: Numbers


def _gae(rewards_U: Numbers, values_U: Numbers, gamma: float, lam: float) -> Numbers:
    """Return [U] the advantages of consecutive actions (tokens or turns); the value after the last action is 0."""
    deltas_U = rewards_U + gamma * np.append(values_U[1:], 0.0) - values_U
    return discounted(deltas_U, np.full(len(values_U), gamma * lam))


def _estimate(
    batch: Sequence[GroupView], one: Callable[[MemberView, Stream, Numbers], _Estimates], outcome: Outcome, is_whitened: bool
) -> BatchAdvantages:
    check_outcome(outcome)
    advantages: list[list[list[NDArray[np.float32]]]] = []
    targets: list[list[list[NDArray[np.float32]]]] = []
    for group in batch:
        advantages.append([])
        targets.append([])
        for member in group.members:
            at = stream(member.samples)
            advantages_N, returns_N = one(member, at, at.gather([s.values for s in member.samples]))
            advantages[-1].append(at.scatter(advantages_N, member.samples))
            targets[-1].append(at.scatter(returns_N, member.samples))
    # The critic's targets were computed from the advantages before whitening, so they keep the scale of the rewards.
    estimate = BatchAdvantages(advantages, targets)
    return whiten(batch, estimate) if is_whitened else estimate
