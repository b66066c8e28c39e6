"""Converts an estimator with verl's signature, on padded tensors [B, R], to a native one over the batch of a step.

groups of trajectories of samples  ->  a row per trajectory: the tokens of all its samples, a mask of weighted tokens, the
reward on the last weighted token, penalties on their tokens  ->  fn(...)  ->  advantages (and returns) split again
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polyturn.algorithms.advantages import BatchAdvantages, Estimator, GroupView, MemberView, declare
from polyturn.compat.verl.code_constants import names_in
from polyturn.core.arrays import Floats
from polyturn.core.sample import TrainSample
from polyturn.infra.plugin_shape import has_parameter, takes_any_keyword

AdvFn = Callable[..., tuple[Tensor, Tensor]]
"""(token_level_rewards [B, R], response_mask [B, R], …) -> (advantages [B, R], returns [B, R])."""


class Options(dict[str, Any]):
    """Options with the interface of verl's configs: `config.gamma`, `config.get("gamma", 1.0)`; missing keys are None."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self.get(name)


def as_estimator(fn: AdvFn) -> Estimator:
    """Return a native estimator that calls `fn` with all groups of a step as one padded batch.

    `index` is the group of each row, `reward_baselines` the reward of its task's greedy rollout, `values` the critic's
    values. The run has a greedy rollout or a critic if `fn` has such a parameter. A function with the parameter `index`
    compares the members of a group.
    """

    @declare(
        scope="batch",
        compares=has_parameter(fn, "index") or "index" in names_in(fn),
        needs_values=has_parameter(fn, "values"),
        needs_greedy=has_parameter(fn, "reward_baselines"),
    )
    def estimate(
        batch: Sequence[GroupView], *, gamma: float = 1.0, lam: float = 1.0, norm_by_std: bool = True, **options: Any
    ) -> BatchAdvantages:
        members = [m for g in batch for m in g.members]
        mask_BR = _rows(members, lambda s: (s.loss_weights != 0).astype(np.float32))
        rewards_BR = _rows(members, lambda s: s.rewards) * mask_BR
        for b, member in enumerate(members):
            weighted = mask_BR[b].nonzero()
            rewards_BR[b, int(weighted[-1]) if len(weighted) else 0] += member.reward
        known = {"gamma": gamma, "lam": lam, "norm_adv_by_std_in_grpo": norm_by_std, **options}
        offered = {
            "index": np.array([g.id for g in batch for _ in g.members], dtype=object),
            "config": Options(known),
            "values": _rows(members, lambda s: s.values),
            "reward_baselines": torch.tensor([_baseline(g) for g in batch for _ in g.members]),
            **known,
        }
        own = ("index", "config", *options) if takes_any_keyword(fn) else ()
        wanted = {k: v for k, v in offered.items() if has_parameter(fn, k) or k in own}
        advantages_BR, returns_BR = fn(token_level_rewards=rewards_BR, response_mask=mask_BR, **wanted)
        returns = _cut(batch, returns_BR * mask_BR) if has_parameter(fn, "values") else None
        return BatchAdvantages(_cut(batch, advantages_BR * mask_BR), returns)

    return estimate


def _baseline(group: GroupView) -> float:
    """Return the reward of the greedy rollout; if there is none, the mean reward of the members."""
    return float(group.totals.mean()) if group.greedy_reward is None else group.greedy_reward


def _rows(members: Sequence[MemberView], of: Callable[[TrainSample], Floats | None]) -> Tensor:
    """Return [B, R]: a row per member with the arrays of its samples, concatenated and padded with 0."""
    width = max([1, *(sum(map(len, m.samples)) for m in members)])
    rows = torch.zeros(len(members), width)
    for b, member in enumerate(members):
        at = 0
        for sample in member.samples:
            array = of(sample)
            if array is not None:
                rows[b, at : at + len(sample)] = torch.from_numpy(np.asarray(array, np.float32).copy())
            at += len(sample)
    return rows


def _cut(batch: Sequence[GroupView], rows_BR: Tensor) -> list[list[list[Floats]]]:
    """Cut the rows into parts per sample, in nested lists [group][member][sample]."""
    rows = iter(rows_BR.detach().numpy().astype(np.float32))
    out: list[list[list[Floats]]] = []
    for group in batch:
        out.append([])
        for member in group.members:
            row = next(rows)
            ends = np.cumsum([len(s) for s in member.samples])
            out[-1].append([row[end - len(s) : end].copy() for s, end in zip(member.samples, ends, strict=True)])
    return out
