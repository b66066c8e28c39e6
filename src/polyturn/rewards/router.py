"""RewardRouter: computes the reward of a finished trajectory.

component     value
outcome       the first of these that the task has: the score of the function to which its data_source routes, or of
              `function`; the interaction's score; the sum of the scheduler's turn scores, if the scheduler scores turns;
              the sum of the tools' rewards for the episode
tool_step     the sum of the step rewards of the trajectory's tool calls
overlong      0 or less, for a response near the limit, if the run has this penalty
turns         the sum of the scheduler's turn scores
interaction   the interaction's score
tool/<name>   that tool's reward for the episode
agent/<name>  the reward of one agent, if a function returned "agents" beside its score: the total, with the agent's score in
              place of the outcome

total = sum of weight x component (`reward.weights`) + overlong. By default outcome and tool_step have weight 1. All others
have weight 0: they are recorded, but not counted again if the outcome already contains them.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import inspect
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from polyturn.core.errors import ConfigError, DataError, RewardError, UnknownNameError, did_you_mean
from polyturn.core.protocols import Scheduler
from polyturn.core.reward import AGENTS, MAX_REWARD, Reward, as_score, brief
from polyturn.core.task import Task
from polyturn.core.trajectory import Trajectory
from polyturn.infra.live import LiveObject, NameOrObject
from polyturn.partners.judge import Judges
from polyturn.partners.policy import Policies
from polyturn.rewards.calls import CallRateLimit
from polyturn.rewards.code import Sandbox
from polyturn.rewards.function import RewardFunction
from polyturn.rewards.options import DEFAULT_WEIGHTS, CallOptions, CallRate
from polyturn.rewards.overlong import Overlong
from polyturn.rewards.registry import BUILT_IN_ROUTES, rewards

Aggregate = Literal["last", "sum", "max", "mean"]

COMPONENTS = ("outcome", "tool_step", "interaction", "turns", "tool/<name>")
EPISODE_ROUTES = ("interaction", "tools", "turns")
"""Route targets that are not functions: the outcome is the score of the interaction, the sum of the tools' rewards for the
episode, or the sum of the scheduler's turn scores."""

_AGGREGATES: dict[str, Callable[[list[float]], float]] = {
    "last": lambda scores: scores[-1],
    "sum": math.fsum,
    "max": max,
    "mean": lambda scores: math.fsum(scores) / len(scores),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardRef:
    """A reward function, or its name, with further arguments."""

    target: Callable[..., Any] | NameOrObject
    kwargs: Mapping[str, Any] = field(default_factory=dict)


Target = Callable[..., Any] | str | RewardRef


@dataclass(frozen=True, slots=True, kw_only=True)
class Weighing:
    """The reduction of a reward's components to one number."""

    weights: Mapping[str, float] = field(default_factory=lambda: DEFAULT_WEIGHTS)
    """Component -> its weight."""
    interaction: Aggregate = "last"
    """How the turn scores of an interaction are reduced to one score."""
    overlong: Overlong | None = None
    """The penalty for long responses."""

    def __post_init__(self) -> None:
        if self.interaction not in _AGGREGATES:
            raise ConfigError(
                f"the interaction aggregate {self.interaction!r} is unknown.{did_you_mean(self.interaction, _AGGREGATES)}"
            )
        for name, weight in self.weights.items():
            if name not in COMPONENTS[:-1] and not name.startswith("tool/"):
                raise ConfigError(f"reward.weights: there is no component {name!r}.{did_you_mean(name, COMPONENTS)}")
            if not math.isfinite(weight):
                raise ConfigError(f"reward.weights: the weight of {name!r} is {weight}; it must be finite")


class RewardRouter:
    """Chooses a reward function by data_source, and combines its score with the scores of the episode."""

    def __init__(
        self,
        routes: Mapping[str, Target] | None = None,
        *,
        function: Target | None = None,
        weighing: Weighing | None = None,
        calls: CallOptions | None = None,
        sandbox: Sandbox | None = None,
        scheduler: Scheduler | None = None,
        policies: Policies | None = None,
        base: Path | None = None,
    ) -> None:
        """Resolve every route.

        Args:
            routes: data_source, or a glob over data_sources -> a reward function, its name, "interaction", "tools" or
                "turns". An exact name wins over a glob, and an earlier glob over a later one. All of these routes win over
                the built-in ones.
            function: Scores every task that no entry of `routes` matches, and every task without a data_source. The
                built-in routes are then unused.
            weighing: How components become the total.
            calls: How reward functions are called.
            sandbox: The sandbox that runs programs, for functions that have a parameter `sandbox`.
            scheduler: The run's scheduler. If it scores turns, the turn scores are the outcome of tasks that nothing else
                scores. If it gives the rewards of episodes, tasks need no other scorer.
            policies: The run's further policies, for the judge and for functions that have a parameter `policies`.
            base: The folder from which relative file paths start.

        Raises:
            ConfigError: a route cannot work.
        """
        self._weighing = weighing or Weighing()
        self._scores_turns = scheduler is not None and bool(scheduler.scores_turns)
        self._may_be_given = scheduler is not None and scheduler.gives_reward
        options, sandbox = calls or CallOptions(), sandbox or Sandbox(url=None)
        resolve = _Resolver(options=options, sandbox=sandbox, policies=policies, base=base)
        self._routes = {pattern: resolve(target) for pattern, target in (routes or {}).items()}
        self._function = None if function is None else resolve(function)
        # The configured rate limit is for services. Built-in routes use only the sandbox, which has a limit of its own.
        unhurried = dataclasses.replace(options, rate=CallRate())
        resolve = _Resolver(options=unhurried, sandbox=sandbox, policies=policies, base=base)
        self._built_in = {pattern: resolve(target) for pattern, target in BUILT_IN_ROUTES.items()}

    def route(self, data_source: str) -> RewardFunction | str:
        """Return the scorer of a data_source: a function, "interaction", "tools" or "turns".

        Raises:
            UnknownNameError: there is no scorer for it.
        """
        if (
            function := _match(self._routes, data_source) or self._function or _match(self._built_in, data_source)
        ) is not None:
            return function
        raise UnknownNameError(
            f"no reward for the data_source {data_source!r}; add a route for it under reward.routes (to a function, "
            f"'interaction', 'tools' or 'turns').{did_you_mean(data_source, [*self._routes, *self._built_in])}"
        )

    def scores(self, task: Task, *, tools: Collection[str] = (), scoring: Collection[str] | None = None) -> bool:
        """Return whether a function, an interaction, tools or turn scores give a task its reward.

        A reward that the scheduler may give to an episode does not count. `tools` and `scoring` are those of `check`.
        """
        try:
            target = self._target(task)
        except UnknownNameError:
            return False
        if target == "interaction":
            return task.interaction is not None
        return target != "tools" or bool(_may_score(task, tools, scoring))

    def check(self, tasks: Iterable[Task], *, tools: Collection[str] = (), scoring: Collection[str] | None = None) -> None:
        """Check before the run that every task has a scorer.

        Args:
            tasks: The tasks of a run.
            tools: Names of the tools that a task may call if it selects none itself.
            scoring: Names of the tools that may give a reward; None means all tools.

        Raises:
            ConfigError: a data_source has no route, or routes to a function whose library or service is missing.
            DataError: nothing can score a task, or a function needs its right answer and the task has none.
        """
        for task in tasks:
            try:
                target = self._target(task)
            except UnknownNameError:
                if self._may_be_given:
                    continue
                raise
            if isinstance(target, RewardFunction):
                target.require(None if self._may_be_given else task)
            may_call = list(tools if task.tools is None else task.tools)
            is_alone = target == "tools" and not _may_score(task, tools, scoring) and not self._may_be_given
            if (target == "interaction" and task.interaction is None) or is_alone:
                silent = f"; {', '.join(map(repr, may_call[:3]))} return answers and no rewards" if may_call else ""
                raise DataError(
                    f"task {task.id!r} has nothing that scores it (data_source {task.data_source!r}, interaction "
                    f"{task.interaction and task.interaction.name!r}, tools {task.tools}{silent}); give its row a "
                    "data_source with a reward, an interaction, or tools that return rewards, or set reward.function "
                    "(in Python: reward=lambda trajectory: …)"
                )

    async def score(
        self,
        trajectory: Trajectory,
        tool_rewards: Mapping[str, float | None] | None = None,
        *,
        outcome: tuple[float, Mapping[str, Any]] | None = None,
    ) -> Reward:
        """Return the reward of a finished trajectory.

        Args:
            trajectory: The record; its turns carry the scores of the interaction and of the tool calls.
            tool_rewards: Tool name -> the result of its `calc_reward`.
            outcome: The score and further values to record, if the episode's scheduler gave them; the reward functions are
                then not called.

        Raises:
            RewardError: the reward function raised, was late or returned no finite number, or there is none.
        """
        of_tools = {f"tool/{name}": value for name, value in (tool_rewards or {}).items() if value is not None}
        replies = [t.scores["interaction"] for t in trajectory.turns if "interaction" in t.scores]
        scores = [pair for t in trajectory.turns for pair in t.scores.items() if pair[0] != "interaction"]
        steps = [s for name, s in scores if name.startswith("tool/")]
        of_turns = [s for name, s in scores if not name.startswith("tool/")]
        interaction_score = _AGGREGATES[self._weighing.interaction](replies) if replies else None
        if outcome is None:
            target = self._target_of(trajectory, of_tools)
            if isinstance(target, RewardFunction):
                outcome = await target(trajectory, tool_rewards=tool_rewards or {})
            elif target == "interaction":
                # Without a score, a limit ended the episode before the interaction answered; the outcome is then 0.
                outcome = 0.0 if interaction_score is None else interaction_score, {}
            else:
                outcome = math.fsum(of_turns if target == "turns" else of_tools.values()), {}
        value, info = outcome
        components = {"outcome": value, "tool_step": math.fsum(steps), **of_tools}
        if interaction_score is not None:
            components["interaction"] = interaction_score
        if of_turns:
            components["turns"] = math.fsum(of_turns)
        weights, overlong = self._weighing.weights, self._weighing.overlong
        total = math.fsum(weight * components.get(name, 0.0) for name, weight in weights.items())
        if overlong is not None:
            components["overlong"] = overlong.score(trajectory)
            total += components["overlong"]
        if as_score(total) is None:
            raise RewardError(
                f"trajectory {trajectory.id!r}: the reward is {total}, from the components {components}; it must be finite "
                f"and at most {MAX_REWARD:g}"
            )
        if AGENTS in info:
            info = {**info, AGENTS: _of_agents(info[AGENTS], total - weights.get("outcome", 0.0) * value, weights)}
            components |= {f"agent/{agent}": score for agent, score in info[AGENTS].items()}
        return Reward(total=total, components=components, info=info)

    def _target_of(self, trajectory: Trajectory, of_tools: Mapping[str, float]) -> RewardFunction | str:
        """Return the scorer of a finished trajectory: a function, "interaction", "tools" or "turns".

        Raises:
            RewardError: nothing scores it.
        """
        try:
            target = self._target(trajectory.task)
        except UnknownNameError as problem:
            if not self._may_be_given:
                raise RewardError(str(problem)) from problem
            target = "tools"
        if target == "tools" and not of_tools and self._may_be_given and not trajectory.stop_reason.is_truncation:
            raise RewardError(
                f"the episode of task {trajectory.task.id!r} has no reward: its agent returned None and posted no reward, "
                f"and no reward function scores the data_source {trajectory.task.data_source!r}"
            )
        return target

    def _target(self, task: Task) -> RewardFunction | str:
        if task.data_source is not None:
            return self.route(task.data_source)
        if self._function is not None:
            return self._function
        if task.interaction is not None:
            return "interaction"
        return "turns" if self._scores_turns else "tools"


def _may_score(task: Task, tools: Collection[str], scoring: Collection[str] | None) -> list[str]:
    """Return the names of the tools that the task may call and that may give a reward."""
    may_call = list(tools if task.tools is None else task.tools)
    return may_call if scoring is None else [name for name in may_call if name in scoring]


def _of_agents(scores: Any, shared: float, weights: Mapping[str, float]) -> dict[str, float]:
    """Return agent -> reward: the trajectory's reward with the agent's score in place of the outcome.

    `shared` is the trajectory's reward without the weighted outcome.
    """
    weight, rewards_by_agent = weights.get("outcome", 0.0), dict[str, float]()
    for agent, score in scores.items() if isinstance(scores, Mapping) else [("", None)]:
        if (number := as_score(score)) is None:
            raise RewardError(
                f"a reward function returned the agents {brief(scores)}; map names of agents to finite numbers of at most "
                f"{MAX_REWARD:g}"
            )
        rewards_by_agent[str(agent)] = shared + weight * number
    return rewards_by_agent


class _Resolver:
    """Turns route targets into reward functions."""

    def __init__(
        self,
        *,
        options: CallOptions,
        sandbox: Sandbox,
        policies: Policies | None,
        base: Path | None,
    ) -> None:
        self._options = options
        self._limit = CallRateLimit(options.rate)
        self._sandbox = sandbox
        self._base = base
        self._policies = policies or {}
        self._judges = Judges(base=base, policies=self._policies)

    def __call__(self, wanted: Target) -> RewardFunction | str:
        target, kwargs = (wanted.target, dict(wanted.kwargs)) if isinstance(wanted, RewardRef) else (wanted, {})
        if isinstance(target, str) and target in EPISODE_ROUTES:
            if kwargs:
                raise ConfigError(f"the reward {target!r} is not a function and takes no kwargs; remove {sorted(kwargs)}")
            return target
        if isinstance(target, str | LiveObject):
            function = rewards.resolve(target, base=self._base, key="reward")
            name = target if isinstance(target, str) else target.name
            if isinstance(target, LiveObject) and self._options.num_processes and not inspect.iscoroutinefunction(function):
                raise ConfigError(
                    f"reward {name!r} is a function of this program, which the reward.num_processes "
                    f"({self._options.num_processes}) other processes cannot import; name it as 'file.py:function' or "
                    "'package.module:function', or set reward.num_processes to null"
                )
        else:
            function = target
            name = target.__name__ if inspect.isfunction(target) else type(target).__name__
        supplies = {"sandbox": self._sandbox, "judges": self._judges, "policies": self._policies}
        reward_function = RewardFunction(
            function,
            name=name,
            kwargs=kwargs,
            supplies=supplies,
            options=self._options,
            source=target if isinstance(target, str) and ":" in target and target not in rewards else None,
            base=self._base,
        )
        reward_function.limit = self._limit
        return reward_function


def _match(routes: Mapping[str, RewardFunction | str], data_source: str) -> RewardFunction | str | None:
    """Return the route of a data_source: an exact name wins over a glob, an earlier glob over a later one."""
    if data_source in routes:
        return routes[data_source]
    return next((to for pattern, to in routes.items() if fnmatch.fnmatchcase(data_source, pattern)), None)
