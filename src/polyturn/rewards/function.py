"""RewardFunction: one reward function, of any form, called safely.

    def score(trajectory): ...                                                     the whole trajectory
    def score(data_source, solution_str, ground_truth, extra_info=None): ...       its last answer, told by the names

Both may be async; a plain one runs in a thread, unless it is a shipped one that takes microseconds. Both return a number,
or a mapping with a "score" whose other keys are kept. A function that raises, is late or returns no finite number is a
`RewardError`, never 0.0.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from polyturn.core.errors import ConfigError, RewardError, one_line
from polyturn.core.trajectory import Trajectory
from polyturn.rewards.registry import QUICK, last_answer
from polyturn.tools.bounded import Bounded
from polyturn.tools.outcome import finite


class Score(NamedTuple):
    """What a reward function returned."""

    value: float
    info: Mapping[str, Any]


class RewardFunction:
    """A reward function with its name and a deadline."""

    def __init__(self, function: Callable[..., Any], *, name: str, timeout_s: float = 60.0) -> None:
        """Read the function's form off its parameters.

        Raises:
            ConfigError: it is no function, or its parameters fit neither form.
        """
        if not callable(function) or isinstance(function, type):
            raise ConfigError(f"reward {name!r} is {function!r:.100}; it must be a function")
        self.name = name
        self._function = function
        self._is_quick = any(function is quick for quick in QUICK)
        self._bounded = Bounded(name=f"reward-{name}", timeout_s=timeout_s)
        self._accepted = _answer_parameters(function, name=name)

    async def __call__(self, trajectory: Trajectory, *, tool_rewards: Mapping[str, float | None]) -> Score:
        """Score a finished trajectory.

        Raises:
            RewardError: the function raised, was late, or returned no finite number.
        """
        where = f"reward {self.name!r} of trajectory {trajectory.id!r}"
        try:
            returned = await self._call(trajectory, tool_rewards)
        except Exception as problem:
            raise RewardError(f"{where}: it failed with {one_line(problem)}") from problem
        info: dict[str, Any] = {}
        if isinstance(returned, Mapping):
            if "score" not in returned:
                raise RewardError(f"{where}: it returned a mapping with {sorted(map(str, returned))}; it needs a 'score'")
            info = {str(k): v for k, v in returned.items() if k != "score"}
            returned = returned["score"]
        try:
            return Score(finite(returned, what="outcome"), info)
        except RewardError as problem:
            raise RewardError(f"{where}: {problem}") from problem

    async def _call(self, trajectory: Trajectory, tool_rewards: Mapping[str, float | None]) -> Any:
        if self._is_quick:
            return self._function(trajectory)
        if self._accepted is None:
            return await self._bounded.run(self._function, trajectory)
        given = {
            "data_source": trajectory.task.data_source,
            "solution_str": last_answer(trajectory),
            "ground_truth": trajectory.task.ground_truth,
            "extra_info": extra_info(trajectory, tool_rewards),
        }
        return await self._bounded.run(self._function, **{k: v for k, v in given.items() if k in self._accepted})


def extra_info(trajectory: Trajectory, tool_rewards: Mapping[str, float | None]) -> dict[str, Any]:
    """Return the rest of the row, and what happened in the episode under the names that such functions read.

    num_turns counts the prompt, every completion and every observation; turn_scores are the interaction's, tool_rewards
    the step rewards, rollout_reward_scores the tools' rewards for the episode with the turn scores.
    """
    turn_scores = [t.scores["interaction"] for t in trajectory.turns if "interaction" in t.scores]
    steps = [r.reward for t in trajectory.turns for r in t.tool_results if r.reward is not None]
    return {
        **trajectory.task.extra,
        "num_turns": 1 + sum(1 + bool(t.observation) for t in trajectory.turns),
        "turn_scores": turn_scores,
        "tool_rewards": steps,
        "rollout_reward_scores": {**tool_rewards, "user_turn_rewards": turn_scores},
    }


def _answer_parameters(function: Callable[..., Any], *, name: str) -> frozenset[str] | None:
    """Return which arguments of the answer's form a function takes; None if it takes a trajectory."""
    known = ("data_source", "solution_str", "ground_truth", "extra_info")
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError as problem:
        raise ConfigError(f"reward {name!r}: its parameters cannot be read; wrap it in a function") from problem
    named = {p.name for p in parameters}
    required = [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if "solution_str" in named:
        if unknown := [n for n in required if n not in known]:
            raise ConfigError(
                f"reward {name!r}: it needs the parameter {unknown[0]!r}, which nothing fills; give it a default "
                f"(filled are {', '.join(known)})"
            )
        takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
        return frozenset(known if takes_all else named)
    takes_one = any(p.kind not in (p.KEYWORD_ONLY, p.VAR_KEYWORD) for p in parameters)
    if len(required) > 1 or not takes_one:
        raise ConfigError(
            f"reward {name!r}: it takes ({', '.join(p.name for p in parameters)}); write it as (trajectory), or as "
            "(data_source, solution_str, ground_truth, extra_info=None)"
        )
    return None
