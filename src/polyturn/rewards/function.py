"""RewardFunction: one reward function, of any form, called safely.

    def score(trajectory): ...                                                          the whole trajectory
    def score(data_source, solution_str, ground_truth, extra_info=None): ...            the model's text and the row
    def score(data_sources, solution_strs, ground_truths, extra_infos=None): ...        lists, for several trajectories

The names of the parameters decide which form a function has. A function may be async, and may take further keyword arguments
from the config. A function that is not async runs in a thread, except the built-in ones in `QUICK`. The first two forms
return a number, or a mapping with a "score" whose other keys are recorded; the last form returns a list of these. If a
function raises, is late or returns no finite number, the result is a `RewardError`, never 0.0.
"""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from polyturn.core.code_origin import defined_at
from polyturn.core.errors import PLUGIN_RAISES, ConfigError, RewardError, errors_at, one_line, raised_at
from polyturn.core.messages import to_openai
from polyturn.core.task import Task, ToolKwargs
from polyturn.core.trajectory import Trajectory
from polyturn.infra.deadline import CallWithDeadline, DeadlineError, Stretch
from polyturn.infra.plugin_shape import lacks, refuse_generator
from polyturn.rewards.calls import Batch, CallRateLimit
from polyturn.rewards.options import CallOptions
from polyturn.rewards.processes import LateCallError, Processes
from polyturn.rewards.registry import CHECKS, COMPARING, QUICK, truth_of
from polyturn.tools.result_shape import finite

ANSWER = ("data_source", "solution_str", "ground_truth", "extra_info")
"""The arguments of a function that scores one answer."""
ANSWERS = {"data_sources": ANSWER[0], "solution_strs": ANSWER[1], "ground_truths": ANSWER[2], "extra_infos": ANSWER[3]}
"""The arguments of a function that scores several answers, each a list -> the same argument for one answer."""


class Score(NamedTuple):
    """The checked result of a reward function."""

    value: float
    info: Mapping[str, Any]


class RewardFunction:
    """A reward function with its name, its arguments from the config, and a deadline."""

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        name: str,
        kwargs: Mapping[str, Any] | None = None,
        supplies: Mapping[str, Any] | None = None,
        options: CallOptions | None = None,
        source: str | None = None,
        base: Path | None = None,
    ) -> None:
        """Determine the form of the function from its parameters.

        Args:
            function: The function.
            name: The function's name in error messages.
            kwargs: Further arguments, from the config.
            supplies: Parameter name -> object of the run, passed to parameters of this name that have no default.
            options: Deadline, rate and batching of the calls.
            source: `file.py:name` or `pkg.mod:name`, from which another process can import the function; None if it cannot.
            base: The folder from which a relative file path starts.

        Raises:
            ConfigError: `function` is not a function, or its parameters fit no form.
        """
        if not callable(function) or isinstance(function, type):
            raise ConfigError(f"reward {name!r} is {function!r:.100}; give a function of a trajectory{defined_at(function)}")
        refuse_generator(function, where=f"reward {name!r}")
        self.name = name
        self._function = function
        with errors_at(function):
            parameters = _parameters(function, name=name)
        self._kwargs = {**{k: v for k, v in (supplies or {}).items() if lacks(function, k)}, **(kwargs or {})}
        self._options = options or CallOptions()
        self.limit = CallRateLimit(self._options.rate)
        """The rate limit of the calls, shared by the functions of a run."""
        self._is_quick = any(function is quick for quick in QUICK)
        self._bounded = CallWithDeadline(name=f"reward-{name}", timeout_s=self._options.timeout_s)
        with errors_at(function):
            self._accepted = _inputs(parameters, self._kwargs, name=name)
        self._called = function
        num_processes = self._options.num_processes
        if source and num_processes and self._accepted is not None and not inspect.iscoroutinefunction(function):
            if supplied := sorted(k for k in supplies or {} if k in self._kwargs and k not in (kwargs or {})):
                raise ConfigError(
                    f"reward {name!r}: its parameter {supplied[0]!r} is an object of this process, and reward.num_processes "
                    f"({num_processes}) calls the function in another; set that to null, or give the parameter in the config"
                )
            self._called = Processes(source, base=base, num=num_processes, timeout_s=self._options.timeout_s)
        self._batch: Batch[dict[str, Any]] | None = None
        if self._accepted is not None and "solution_strs" in self._accepted:
            batch = self._options.batch
            self._batch = Batch(self._call_many, size=batch.size, wait_s=batch.wait_s)

    def require(self, task: Task | None = None) -> None:
        """Check that the libraries and services of the function exist, and that `task` has a right answer if it needs one.

        Raises:
            ConfigError: a library or service that a built-in function needs is missing.
            DataError: the function compares with the right answer, and the task has none.
        """
        check = next((check for function, check in CHECKS if function is self._function), None)
        if check is not None:
            check(self._kwargs)
        if task is not None and any(function is self._function for function in COMPARING):
            truth_of(task)

    async def __call__(self, trajectory: Trajectory, *, tool_rewards: Mapping[str, float | None]) -> Score:
        """Score a finished trajectory.

        Raises:
            RewardError: the function raised, was late, or returned no finite number.
            RolloutError: too many earlier calls of the function are still running after their deadline.
        """
        self._bounded.check_abandoned(f"the reward {self.name!r}")
        where = f"reward {self.name!r} of trajectory {trajectory.id!r}"
        try:
            if self._is_quick:
                returned = self._function(trajectory, **self._kwargs)
            elif self._accepted is None:
                returned = await self._run(trajectory)
            else:
                arguments = {
                    "data_source": trajectory.task.data_source,
                    "solution_str": trajectory.text_of(self._options.text),
                    "ground_truth": trajectory.task.ground_truth,
                    "extra_info": extra_info(trajectory, tool_rewards),
                }
                if self._batch is not None:  # in one call with other trajectories
                    returned = await self._batch(arguments)
                else:
                    returned = await self._run(**{k: v for k, v in arguments.items() if k in self._accepted})
            return _score_of(returned)
        except RewardError as problem:
            raise RewardError(f"{where}: {problem}{raised_at(problem) or defined_at(self._function)}") from problem
        except (DeadlineError, LateCallError) as problem:
            raise RewardError(f"{where}: {problem}; raise reward.timeout_s or make it quicker") from problem
        except PLUGIN_RAISES as problem:  # reading the returned value may raise too, if it is of a user's class
            at = raised_at(problem) or defined_at(self._function)
            raise RewardError(f"{where} failed with {one_line(problem)}{at}") from problem

    async def _call_many(self, rows: Sequence[Mapping[str, Any]]) -> Sequence[Any]:
        assert self._accepted is not None
        lists = {many: [one[key] for one in rows] for many, key in ANSWERS.items() if many in self._accepted}
        returned: Sequence[Any] = await self._run(**lists)
        return returned

    async def _run(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function with these arguments and those of the config, at the run's rate and with its deadline."""
        async with self.limit:
            call = functools.partial(self._called, *args, **kwargs, **self._kwargs)
            return await self._bounded.run(call, stretch=Stretch())


def _score_of(returned: Any) -> Score:
    if not isinstance(returned, Mapping):
        return Score(finite(returned, what="outcome"), {})
    scores = {str(key): value for key, value in returned.items()}
    if "score" not in scores:
        raise RewardError(f"the returned mapping has the keys {sorted(scores)}; add 'score'")
    return Score(finite(scores.pop("score"), what="outcome"), scores)


def extra_info(trajectory: Trajectory, tool_rewards: Mapping[str, float | None]) -> dict[str, Any]:
    """Return `extra_info`: further columns of the row, and the events of the episode under the names that functions expect.

    num_turns                number of completions and observations, plus 1 for the prompt
    turn_scores              the scores that the interaction gave to turns
    tool_rewards             the step rewards of the tool calls
    rollout_reward_scores    the tools' rewards for the episode by name, and turn_scores as user_turn_rewards
    messages                 the whole conversation in OpenAI's form
    rollout_infos            the infos of all turns, without keys that begin with "_"; a later turn overwrites an earlier
                             one's keys; its num_turns is the number of completions

    If infos have images, videos or audios, these replace the row's.
    """
    infos: dict[str, Any] = {}
    for turn in trajectory.turns:
        infos.update({k: v for k, v in turn.info.items() if not str(k).startswith("_")})
    turn_scores = [t.scores["interaction"] for t in trajectory.turns if "interaction" in t.scores]
    steps = [r.reward for t in trajectory.turns for r in t.tool_results if r.reward is not None]
    return {
        **_of_row(trajectory.task),
        **{kind: value for kind, value in infos.items() if kind in ("images", "videos", "audios")},
        "rollout_infos": {**infos, "num_turns": len(trajectory.turns)},
        "num_turns": 1 + sum(1 + bool(t.observation) for t in trajectory.turns),
        "turn_scores": turn_scores,
        "tool_rewards": steps,
        "rollout_reward_scores": {**tool_rewards, "user_turn_rewards": turn_scores},
        "messages": to_openai(trajectory.messages),
    }


def _of_row(task: Task) -> dict[str, Any]:
    """Return the further columns of a row, and its interaction_kwargs and tools_kwargs, which functions expect there."""
    out = dict(task.extra)
    if task.interaction is not None and task.interaction.kwargs:
        out["interaction_kwargs"] = dict(task.interaction.kwargs)
    if task.tools_kwargs:
        slots = [f.name for f in fields(ToolKwargs)]
        out["tools_kwargs"] = {
            tool: {slot: dict(of) for slot in slots if (of := attrgetter(slot)(kwargs))}
            for tool, kwargs in task.tools_kwargs.items()
        }
    return out


def _parameters(function: Callable[..., Any], *, name: str) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(function).parameters
    except ValueError as problem:
        raise ConfigError(f"reward {name!r}: its parameters cannot be read; wrap it in a function") from problem


_OTHERS = {
    "completion": "solution_str", "completions": "solution_strs", "prompt": "trajectory", "prompts": "trajectory",
    "response": "solution_str", "responses": "solution_strs", "solution": "solution_str", "solutions": "solution_strs",
    "answer": "solution_str", "answers": "solution_strs", "text": "solution_str", "texts": "solution_strs",
    "output": "solution_str", "outputs": "solution_strs", "prediction": "solution_str", "predictions": "solution_strs",
    "predict_str": "solution_str", "completion_ids": "trajectory", "messages": "trajectory", "messages_list": "trajectory",
}  # fmt: skip
"""Name of the first parameter in reward functions written for other libraries -> the name of this parameter here."""


def _misread(first: str) -> str | None:
    """Return a hint for the error message if the first parameter has a misspelt name or a name from another library.

    Return None otherwise: the parameter then takes the trajectory, whatever its name.
    """
    if first in _OTHERS:
        return f" (here, its name is {_OTHERS[first]!r})"
    near = difflib.get_close_matches(first, (*ANSWER, *ANSWERS), n=1, cutoff=0.8)
    return f" (did you mean {near[0]!r}?)" if near else None


def _inputs(parameters: Mapping[str, inspect.Parameter], kwargs: Mapping[str, Any], *, name: str) -> frozenset[str] | None:
    """Return the names in `ANSWER` or `ANSWERS` that a function takes; None if it takes a trajectory.

    Raises:
        ConfigError: the parameters fit no form, or do not fit `kwargs`.
    """
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    if not takes_any and (unknown := sorted(set(kwargs) - set(parameters))):
        raise ConfigError(
            f"reward {name!r} takes the parameters {list(parameters)}, and its kwargs set {unknown[0]!r}; remove that"
        )
    fixed = [p for p in parameters.values() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    required = [p.name for p in fixed if p.default is p.empty and p.name not in kwargs]
    known = next((form for form in (tuple(ANSWERS), ANSWER) if form[1] in parameters), None)
    if known is not None:
        if unfilled := [n for n in required if n not in known]:
            raise ConfigError(
                f"reward {name!r} needs the parameter {unfilled[0]!r}, which nothing fills; give the parameter a default, "
                f"or set it in the kwargs of the function (the run fills {', '.join(known)})"
            )
        if taken := sorted(set(kwargs) & set(known)):
            raise ConfigError(f"reward {name!r}: its kwargs set {taken[0]!r}, which the run fills; remove that from kwargs")
        return frozenset(known if takes_any else set(parameters) & set(known))
    if fixed and fixed[0].name not in kwargs and (hint := _misread(fixed[0].name)) is not None:
        raise ConfigError(
            f"reward {name!r} takes ({', '.join(parameters)}), and no argument has the name {fixed[0].name!r}"
            f"{hint}; write the function as (trajectory), as (data_source, solution_str, ground_truth, extra_info=None), or "
            "for many at once as (data_sources, solution_strs, ground_truths, extra_infos=None), which returns a list"
        )
    takes_one = any(p.kind is not p.KEYWORD_ONLY for p in fixed) or len(fixed) < len(parameters) - takes_any
    if len(required) > 1 or not takes_one:
        raise ConfigError(
            f"reward {name!r} takes ({', '.join(parameters)}); write the function as (trajectory), or as "
            "(data_source, solution_str, ground_truth, extra_info=None)"
        )
    return None
