"""Explains a trajectory's advantage: its group, and the estimator's formula with the group's numbers.

    rewards 1, 0, 0, 1, grpo   ->   A = (r - mean) / (std + eps) = (1 - 0.5) / (0.5774 + 1e-06) = 0.866

Estimators that use more than one group, or single turns, have their formula in symbols only. The recorded advantage is shown
next to the formula, with a note if they differ. The run's own code is never loaded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from polyturn.core.reward import as_score
from polyturn.store.schema import StoredTrajectory
from polyturn.viewer.run_config import reward_weights, section
from polyturn.viewer.tokens import DROPPED, is_trained
from polyturn.viewer.trajectory_page import plain

MAX_MEMBERS = 256
"""Largest number of members of a group to read."""
TOLERANCE = 2e-3
"""Largest relative difference between a recorded advantage, a float32, and the formula's value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupComparison:
    """The values of a group that an estimator compares."""

    own: float
    rewards_G: NDArray[np.float64]
    """[G] rewards of the members that did not fail."""
    lengths_G: NDArray[np.float64]
    """[G] number of trained tokens of each of these members."""
    is_scaled: bool
    """Whether the difference is divided by the standard deviation."""
    eps: float

    @property
    def mean(self) -> float:
        return float(self.rewards_G.mean())

    @property
    def std(self) -> float:
        """Unbiased standard deviation of the rewards; 0 for a single member."""
        return float(self.rewards_G.std(ddof=1)) if len(self.rewards_G) > 1 else 0.0


class Derivation(NamedTuple):
    """A formula in symbols and in numbers, and its value."""

    formula: str
    numbers: str | None = None
    value: float | None = None


def _scaled(group: GroupComparison) -> Derivation:
    if not group.is_scaled or len(group.rewards_G) < 2:
        return _centred(group)
    value = _quotient(group.own - group.mean, group.std + group.eps)
    numbers = f"({_n(group.own)} − {_n(group.mean)}) / ({_n(group.std)} + {group.eps:g})"
    return Derivation("A = (r − mean) / (std + eps)", numbers, value)


def _centred(group: GroupComparison) -> Derivation:
    return Derivation("A = r − mean", f"{_n(group.own)} − {_n(group.mean)}", group.own - group.mean)


def _leave_one_out(group: GroupComparison) -> Derivation:
    count = max(len(group.rewards_G) - 1, 1)
    others = (float(group.rewards_G.sum()) - group.own) / count
    return Derivation("A = r − mean of the other members", f"{_n(group.own)} − {_n(others)}", group.own - others)


def _by_length(group: GroupComparison) -> Derivation:
    whole = float(group.lengths_G.sum())
    baseline = float((group.lengths_G * group.rewards_G).sum()) / whole if whole else group.mean
    formula = "A = r − Σ l·r / Σ l, l the trained tokens of a member"
    return Derivation(formula, f"{_n(group.own)} − {_n(baseline)}", group.own - baseline)


def _by_mean(group: GroupComparison) -> Derivation:
    difference = group.own - group.mean
    numbers = f"({_n(group.own)} − {_n(group.mean)}) / ({_n(group.mean)} + {group.eps:g})"
    return Derivation("A = (r − mean) / (mean + eps)", numbers, _quotient(difference, group.mean + group.eps))


def _quotient(difference: float, divisor: float) -> float | None:
    """Return the quotient; None if the divisor is 0, for equal rewards and an eps of 0."""
    return difference / divisor if divisor else None


_OF_GROUP: dict[str, Callable[[GroupComparison], Derivation]] = {
    "grpo": _scaled,
    "dr_grpo": _centred,
    "rloo": _leave_one_out,
    "opo": _by_length,
    "maxrl": _by_mean,
}
_IN_SYMBOLS = {
    "grpo_passk": "A = (mean best of k over the draws with this member − mean best of k over all draws) / (std + eps)",
    "reinforce_plus_plus": "A_t = (G_t − mean) / sqrt(var + eps), over all trained tokens of the step",
    "reinforce_plus_plus_baseline": "A = (d − mean) / sqrt(var + eps), d = r − mean of the group; mean, var over the step",
    "gpg": "A = α (r − mean) / f_norm, α = trajectories of the step / those in groups whose rewards differ",
    "hierarchical_grpo": "A = r − mean of the agents that did the same work, in the trajectory or over the group",
    "rae": "A = r − the running mean of the rewards of its data source and agent, as the step began",
    "remax": "A = r − r_greedy, the reward of the task decoded greedily",
    "gdpo": "A = Σ w_c (r_c − mean_c) / (std_c + eps) over the parts c of the reward, then normalised over the step",
    "return_to_go": "A_k = G_k − mean of G_k over the other members, G_k the scores from turn k on",
    "mt_grpo": "A_k = standardised score among the group's turns k + weight × standardised reward (at the last turn 1 ×)",
    "gigpo": "A_k = standardised reward + weight × standardised return among turns in the same state",
    "gae": "A_t = Σ (γλ)^l δ_(t+l), δ_t = r_t + γ V_(t+1) − V_t, V the critic's values",
    "turn_gae": "A_k = Σ (γλ)^l δ_(k+l) over turns, δ_k = r_k + γ V_(k+1) − V_k, V the critic's values",
    "bilevel_gae": "A_t = advantage over turns, then over the tokens inside the turn, from the critic's values",
}


def why_advantage(
    chosen: StoredTrajectory, members: Iterable[StoredTrajectory], config: Mapping[str, Any]
) -> dict[str, Any]:
    """Return a trajectory's group, and the inputs and formula of its advantage.

    Args:
        chosen: The trajectory.
        members: The members of its group at its step, including itself.
        config: The run's configuration; parts may be missing or invalid.
    """
    group = [member for member, _ in zip(members, range(MAX_MEMBERS), strict=False)]
    rows = [_member(member) for member in group]
    counted = [row for row in rows if row["reward"] is not None and not row["is_failed"]]
    rewards_G = np.array([row["reward"] for row in counted], np.float64)
    name, options = _estimator(section(config, "algorithm"))
    own = _member(chosen)
    derivation = Derivation("") if name is None else _derive(name, own, counted, options)
    advantage_text = {
        **{key: own[key] for key in ("id", "reward", "advantage", "low", "high")},
        "group": chosen.group,
        "step": chosen.step,
        "split": chosen.split,
        "task_id": chosen.trajectory.task.id,
        "estimator": None if name is None else name[:200],
        **derivation._asdict(),
        "mean": float(rewards_G.mean()) if len(rewards_G) else None,
        "std": float(rewards_G.std(ddof=1)) if len(rewards_G) > 1 else None,
        "members": rows,
        "parts": _parts(chosen, group, config),
        "turns": _turns(chosen),
        "note": _note(chosen, own, derivation, known=name is not None),
    }
    return {key: plain(value) for key, value in advantage_text.items()}


def _estimator(algorithm: Mapping[str, Any]) -> tuple[str | None, Mapping[str, Any]]:
    """Return the name of the estimator and its options; in older runs the options are next to the name."""
    estimator = algorithm.get("advantage")
    if isinstance(estimator, Mapping):
        name, options = estimator.get("name"), estimator
    else:
        name, options = estimator, {**algorithm, **section(algorithm, "advantage_kwargs")}
    return (name if isinstance(name, str) else None), options


def _derive(
    name: str, own: Mapping[str, Any], counted: Sequence[Mapping[str, Any]], options: Mapping[str, Any]
) -> Derivation:
    if name not in _OF_GROUP:
        return Derivation(_IN_SYMBOLS.get(name, "a custom estimator"))
    if own not in counted:
        return Derivation("")
    eps = as_score(options.get("eps"))
    comparison = GroupComparison(
        own=own["reward"],
        rewards_G=np.array([row["reward"] for row in counted], np.float64),
        lengths_G=np.array([row["num_trained_tokens"] for row in counted], np.float64),
        is_scaled=bool(options.get("norm_by_std", True)),
        eps=1e-6 if eps is None else eps,
    )
    return _OF_GROUP[name](comparison)


def _note(chosen: StoredTrajectory, own: Mapping[str, Any], derivation: Derivation, *, known: bool) -> str:
    """Return a remark on the formula; "" if none is necessary."""
    dropped = chosen.trained.dropped
    if not chosen.split.startswith("train"):
        return "Evaluations do not train, so their trajectories have no advantage."
    if chosen.trajectory.reward is None and not own["is_failed"]:
        return "It has no reward: only a teacher or its observations train it."
    if own["is_failed"] or own["reward"] is None:
        return "It failed and is left out of the loss and of its group's statistics."
    if dropped is not None:
        return f"It was left out of training: {DROPPED.get(dropped, dropped)}."
    if own["advantage"] is None:
        return "The run recorded no advantage for it."
    if not known:
        return "The run's configuration does not name its estimator."
    if chosen.trajectory.reward is not None and chosen.trajectory.reward.agents:
        return "Each agent has a separate reward, which is compared with the same agent's in the other members."
    value = derivation.value
    if value is not None and not math.isclose(value, own["advantage"], rel_tol=TOLERANCE, abs_tol=TOLERANCE):
        return (
            "The recorded advantage differs: it was computed from more than these rewards, for example from a penalty on "
            "single tokens, members that are not recorded, or a value set by hand."
        )
    return ""


def _member(record: StoredTrajectory) -> dict[str, Any]:
    one = record.trajectory
    on_tokens = _advantages(record)
    return {
        "id": one.id,
        "reward": None if one.reward is None else as_score(one.reward.total),
        "advantage": float(on_tokens.mean()) if len(on_tokens) else None,
        "low": float(on_tokens.min()) if len(on_tokens) else None,
        "high": float(on_tokens.max()) if len(on_tokens) else None,
        "num_trained_tokens": int(np.count_nonzero(_weights(record))),
        "num_turns": len(one.turns),
        "stop_reason": one.stop_reason.value,
        "is_failed": one.is_failed,
        "dropped": record.trained.dropped,
    }


def _weights(record: StoredTrajectory) -> NDArray[np.float32]:
    """Return [N] the loss weight of each sampled token."""
    if not is_trained(record.trajectory, record.trained, split=record.split):
        return np.zeros(record.trajectory.num_sampled_tokens, np.float32)
    if record.trained.weights is not None:
        return np.asarray(record.trained.weights, np.float32)
    parts = [segment.loss_weights[segment.sampled_mask] for segment in record.trajectory.segments]
    return np.concatenate([*parts, np.empty(0, np.float32)])


def _advantages(record: StoredTrajectory) -> NDArray[np.float64]:
    """Return the recorded advantages of the trained tokens; empty if none were recorded."""
    values, weights = record.trained.advantages, _weights(record)
    if values is None or len(values) != len(weights):
        return np.empty(0)
    used = np.asarray(values, np.float64)[weights != 0]
    return used[np.isfinite(used)]


def _turns(record: StoredTrajectory) -> list[dict[str, Any]]:
    """Return the score of each turn and the mean advantage of its trained tokens."""
    parts = [segment.turn_ids[segment.sampled_mask] for segment in record.trajectory.segments]
    turn_ids, weights = np.concatenate([*parts, np.empty(0, np.int32)]), _weights(record)
    values = record.trained.advantages
    rows = []
    for number, turn in enumerate(record.trajectory.turns):
        mine = (turn_ids == number) & (weights != 0) if len(turn_ids) == len(weights) else np.zeros(0, np.bool_)
        is_known = values is not None and len(values) == len(mine) and bool(mine.any())
        advantage = float(np.asarray(values, np.float64)[mine].mean()) if is_known else None
        tools = [{"name": r.name, "reward": r.reward, "error": r.error} for r in turn.tool_results]
        rows.append({"turn": number, "score": turn.score, "advantage": advantage, "tokens": int(mine.sum()), "tools": tools})
    return rows


def _parts(chosen: StoredTrajectory, group: Sequence[StoredTrajectory], config: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return each reward component: its value, its mean in the group, and its weight if the config has one."""
    if chosen.trajectory.reward is None:
        return []
    weights = reward_weights(config)
    rewards = [m.trajectory.reward for m in group if m.trajectory.reward is not None]
    rows = []
    for name, value in chosen.trajectory.reward.components.items():
        others = [v for r in rewards if (v := as_score(r.components.get(name))) is not None]
        mean = math.fsum(others) / len(others) if others else None
        rows.append({"name": name, "value": value, "mean": mean, "weight": weights.get(name, 0.0) if config else None})
    return rows


def _n(value: float) -> str:
    return f"{value:.4g}".replace("-", "−")
