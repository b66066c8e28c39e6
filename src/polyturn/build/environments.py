"""Build the adapters, tasks and scheduler of the section `env`."""

from __future__ import annotations

import atexit
import logging
import re
from collections.abc import Sequence

from polyturn.build.policies import FurtherPolicies
from polyturn.config.config_source import ConfigSource
from polyturn.config.models import EnvConfig
from polyturn.core.errors import ConfigError, PolyturnError, SchedulerError, plugin_errors_as
from polyturn.core.protocols import Tool
from polyturn.core.task import Task
from polyturn.data.sequences import Changed, Joined, WithSystem
from polyturn.environments.base import Adapter, at_stage
from polyturn.environments.players import seat_players
from polyturn.environments.registry import find_adapter
from polyturn.environments.scheduler import EnvScheduler, Stage
from polyturn.rollout.scheduler import MultiTurnScheduler

logger = logging.getLogger(__name__)


def env_configs(source: ConfigSource) -> list[EnvConfig]:
    """Return the configured environments of a run.

    Raises:
        ConfigError: the list is empty, or names an environment twice.
    """
    named = source.config.env
    if named is None:
        return []
    configs = [e if isinstance(e, EnvConfig) else EnvConfig(name=e) for e in (named if isinstance(named, list) else [named])]
    names = [str(e.name) for e in configs]
    if not configs:
        raise ConfigError("env is an empty list; name an environment, or remove env")
    if len(set(names)) < len(names):
        twice = next(n for n in names if names.count(n) > 1)
        raise ConfigError(f"env names {twice!r} twice; list it once, and raise its `tasks`")
    return configs


def build_env_scheduler(source: ConfigSource, policies: FurtherPolicies) -> MultiTurnScheduler:
    """Make the scheduler for the episodes of the run's environments."""
    config = source.config
    if config.rollout.scheduler is not None:
        raise ConfigError(
            f"env has its own scheduler and rollout.scheduler is {config.rollout.scheduler!r}; remove rollout.scheduler, "
            "or, if rows have env_config, remove env and write rollout.scheduler: gym"
        )
    if config.rollout.interactions is not None:
        raise ConfigError("env answers every turn, so rollout.interactions would never be used; remove one of them")
    stages: dict[str, Stage] = {}
    own: dict[str, MultiTurnScheduler] = {}
    for one in env_configs(source):
        adapter = _adapter(one, source)
        if (scheduler := adapter.scheduler()) is not None:
            own[str(one.name)] = scheduler
        stages[str(one.name)] = _stage(one, adapter, source, policies)
    if own and len(stages) > 1:
        raise ConfigError(
            f"env {next(iter(own))!r} runs its episodes itself, so it must be the only environment of a run; env names "
            f"{list(stages)}"
        )
    return next(iter(own.values())) if own else EnvScheduler(stages)


def build_env_tools(source: ConfigSource) -> list[Tool]:
    """Return the tools that the run's environments provide."""
    return [tool for one in env_configs(source) for tool in _adapter(one, source).tools()]


def build_env_tasks(source: ConfigSource, *, split: str) -> Sequence[Task]:
    """Return the tasks of the run's environments, with the seeds of the split ("train" or "eval")."""
    parts: list[Sequence[Task]] = []
    for one in env_configs(source):
        # The evaluation's seeds follow those of training, so that no task is in both splits.
        first = one.seed + (one.tasks if split == "eval" else 0)
        count = one.eval_tasks if split == "eval" else one.tasks
        adapter = _adapter(one, source)
        tasks = adapter.tasks(split=split, seeds=range(first, first + count), prompt=one.prompt)
        if not tasks:
            continue
        staged = Changed(tasks, at_stage(split=split, score=one.score or adapter.score))
        parts.append(staged if one.system is None else WithSystem(staged, one.system))
    return parts[0] if len(parts) == 1 else Joined(parts)


def rows_for_env(source: ConfigSource, tasks: Sequence[Task], *, key: str) -> Sequence[Task]:
    """Return the user's rows as tasks of the run's only environment."""
    configs = env_configs(source)
    adapters = [_adapter(one, source) for one in configs]
    if len(adapters) > 1:
        names = ", ".join(repr(one.name) for one in configs)
        raise ConfigError(
            f"env names {names}, and the rows of {key} can go to only one environment; remove {key} or the others"
        )
    if not adapters[0].takes_rows:
        raise ConfigError(
            f"env {configs[0].name!r} has its own tasks, and {key} is set as well; remove one of them (for rows with "
            "env_config use rollout.scheduler: gym)"
        )
    split = "eval" if key.startswith("eval") else "train"
    return Changed(adapters[0].of_rows(tasks), at_stage(split=split, score=configs[0].score or adapters[0].score))


def _adapter(one: EnvConfig, source: ConfigSource) -> Adapter:
    name = str(one.name)
    if name not in source.adapters:
        source.adapters[name] = find_adapter(one.name, one.kwargs, base=source.base)
        atexit.register(source.adapters[name].close)
    return source.adapters[name]


def close_adapters(source: ConfigSource) -> None:
    """Close the adapters of a run that starts again: like every plug-in, an adapter works only in its first event loop."""
    for name, adapter in source.adapters.items():
        atexit.unregister(adapter.close)
        try:
            with plugin_errors_as(f"env {name!r}: close", SchedulerError):
                adapter.close()
        except PolyturnError as problem:
            logger.warning("%s", problem)


def _stage(one: EnvConfig, adapter: Adapter, source: ConfigSource, policies: FurtherPolicies) -> Stage:
    if adapter.num_seats == 1 and (one.seats or one.eval_seats):
        key, seats_set = ("seats", one.seats) if one.seats else ("eval_seats", one.eval_seats)
        raise ConfigError(f"env {one.name!r} has one player and env.{key} is {seats_set!r:.200}; remove env.{key}")
    seats, eval_seats = (
        seat_players(
            seat_options, num_seats=adapter.num_seats, name=str(one.name), base=source.base, policies=policies.by_name
        )
        for seat_options in (one.seats, one.eval_seats or one.seats)
    )
    return Stage(
        adapter=adapter,
        players=seats,
        eval_players=eval_seats,
        rotates=one.rotate,
        forfeit=one.forfeit,
        action=None if one.action is None else re.compile(one.action, re.DOTALL),
    )
