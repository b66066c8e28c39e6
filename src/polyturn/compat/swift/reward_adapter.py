"""Runs reward functions in ms-swift's form as the reward function of a native run.

    reward:
      function:
        name: polyturn.compat.swift.reward_adapter:score
        names: [accuracy, format]
        weights: [1.0, 0.2]

Each function is called once per trajectory, with lists that have an item for each output of the scheduler, usually one. All
outputs must have the same reward, because a trajectory has one reward for all its tokens.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from polyturn.compat.swift.orm import orms
from polyturn.core.code_origin import defined_at
from polyturn.core.errors import ConfigError, RewardError, one_line
from polyturn.core.reward import as_score
from polyturn.core.trajectory import Trajectory
from polyturn.infra.deadline import CallWithDeadline
from polyturn.infra.plugin_shape import has_parameter, takes_any_keyword
from polyturn.serving.outputs import reward_rows

GYM = "gym_reward"
"""The reward component for an environment's `total_reward`."""

_threads = functools.cache(lambda: CallWithDeadline(name="swift-rewards", timeout_s=math.inf))


async def score(
    trajectory: Trajectory,
    names: Sequence[str] = (),
    weights: Sequence[float] | None = None,
    use_gym_env: bool = False,
    options: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the weighted sum of the named functions' scores, and each score.

    Args:
        trajectory: A finished trajectory.
        names: Names in `orms`.
        weights: One per name, then one for the environment's reward; None uses 1 for each.
        use_gym_env: Whether to add the `total_reward` of the scheduler's infos.
        options: Attributes of `args` for the functions' constructors, such as cosine_max_len.

    Raises:
        ConfigError: a name is unknown, or the number of weights is wrong.
        RewardError: a function returned too few scores, all returned None, or the outputs have different rewards.
    """
    functions = make(tuple(names), json.dumps(dict(options or {}), sort_keys=True, default=str))
    of = check_weights(names, weights, use_gym_env=use_gym_env)
    rows = reward_rows(trajectory)
    if not rows:
        return {"score": 0.0}
    keyword_columns = _arguments(trajectory, rows)
    columns: list[list[float | None]] = []
    for name, function in zip(names, functions, strict=True):
        columns.append(_checked(await _call(function, keyword_columns), function, name=name, num=len(rows)))
    if use_gym_env:
        columns.append([_total(row) for row in rows])
    totals = [_sum([column[i] for column in columns], of) for i in range(len(rows))]
    if any(total is None for total in totals):
        raise RewardError(f"no reward function has a score for request_id={trajectory.id}; each returned None")
    if not all(math.isclose(t or 0.0, totals[0] or 0.0, abs_tol=1e-6) for t in totals):
        raise RewardError(
            f"Inconsistent rewards detected for request_id={trajectory.id}: its {len(rows)} outputs have the rewards "
            f"{totals}; a trajectory has one reward, so score its last output (kwargs['trajectory_inputs'][request_id][-1])"
        )
    named = zip((*names, GYM), columns, strict=False)
    return {**{name: column[-1] for name, column in named if column[-1] is not None}, "score": totals[-1]}


def make(names: tuple[str, ...], options: str) -> tuple[Any, ...]:
    """Create the named reward functions, once for the same classes and options.

    Raises:
        ConfigError: a name is unknown, or its function cannot be created.
    """
    return _make(names, tuple(id(orms.find(name)) for name in names), options)


@functools.cache
def _make(names: tuple[str, ...], entries: tuple[int, ...], options: str) -> tuple[Any, ...]:
    args = SimpleNamespace(**json.loads(options))
    return tuple(_create(orms.find(name), name=name, args=args) for name in names)


def check_weights(names: Sequence[str], weights: Sequence[float] | None, *, use_gym_env: bool) -> list[float]:
    """Return one weight per function and for the environment.

    Raises:
        ConfigError: the number of weights is wrong.
    """
    num = len(names) + use_gym_env
    if num == 0:
        raise ConfigError("there is no reward: name a function in reward_funcs, or use an environment (use_gym_env)")
    if weights is None:
        return [1.0] * num
    if len(weights) != num:
        raise ConfigError(
            f"reward_weights has {len(weights)} entries for {len(names)} reward functions"
            f"{' and the environment' if use_gym_env else ''}; give {num}"
        )
    return [float(w) for w in weights]


def _create(entry: Any, *, name: str, args: Any) -> Any:
    if not isinstance(entry, type):
        return entry
    offered = {"args": args}
    arguments = offered if has_parameter(entry, "args") or takes_any_keyword(entry) else {}
    try:
        return entry(**arguments)
    except Exception as problem:
        raise ConfigError(f"the reward function {name!r} cannot be created: {one_line(problem)}") from problem


def _arguments(trajectory: Trajectory, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the arguments of reward functions: `completions`, and each column as a list."""
    names = dict.fromkeys(name for row in rows for name in row)
    versions = [int(s.versions.max(initial=-1)) for s in trajectory.segments]
    return {
        "completions": [row["messages"][-1]["content"] if row["messages"] else "" for row in rows],
        **{name: [row.get(name) for row in rows] for name in names},
        "trajectory_inputs": {trajectory.id: [dict(row) for row in rows]},
        "trainer_state": SimpleNamespace(global_step=max(versions, default=0)),
    }


async def _call(function: Any, arguments: Mapping[str, Any]) -> Any:
    takes_all = takes_any_keyword(function)
    takes = {k: v for k, v in arguments.items() if k != "completions" and (takes_all or has_parameter(function, k))}
    return await _threads().call(functools.partial(function, arguments["completions"], **takes))


def _checked(returned: Any, function: Any, *, name: str, num: int) -> list[float | None]:
    values = returned.tolist() if hasattr(returned, "tolist") else returned
    values = list(values) if isinstance(values, Iterable) and not isinstance(values, str | bytes | Mapping) else None
    if values is None or len(values) != num:
        raise RewardError(
            f"the reward function {name!r} returned {returned!r:.100} for {num} completions; return a list of {num} scores"
            f"{defined_at(function)}"
        )
    scores = [None if value is None else as_score(value) for value in values]
    if odd := [v for v, score in zip(values, scores, strict=True) if score is None and v is not None and not _is_nan(v)]:
        raise RewardError(
            f"the reward function {name!r} returned the score {odd[0]!r:.40}; return finite numbers, or None for a "
            f"completion that it does not score{defined_at(function)}"
        )
    return scores


def _is_nan(value: Any) -> bool:
    try:
        return math.isnan(value)
    except (TypeError, ValueError):
        return False


def _total(row: Mapping[str, Any]) -> float:
    infos = row["rollout_infos"]
    if "total_reward" not in infos:
        raise RewardError(
            f"rollout_infos of request_id={row['request_id']} has no total_reward, only {sorted(infos)}; let the scheduler "
            "set it, or remove use_gym_env"
        )
    if (total := as_score(infos["total_reward"])) is None:
        written = f"{infos['total_reward']!r:.40}"
        raise RewardError(f"total_reward of request_id={row['request_id']} is {written}; it must be a finite number")
    return total


def _sum(values: Sequence[float | None], weights: Sequence[float]) -> float | None:
    """Return the weighted sum of the scores that are not None; None if all are."""
    known = [weight * value for weight, value in zip(weights, values, strict=True) if value is not None]
    return math.fsum(known) if known else None
