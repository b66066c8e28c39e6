"""Build the tasks and their order, from the sections `data` and `evaluation`."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from polyturn.build.environments import build_env_tasks, env_configs, rows_for_env
from polyturn.build.parts import sampling_params
from polyturn.config.config_source import ConfigSource
from polyturn.config.models import EvalConfig, TaskSourceConfig
from polyturn.config.parts import arguments_of
from polyturn.core.errors import ConfigError, plugin_errors_as
from polyturn.core.task import Task
from polyturn.data.dataset import TaskDataset, generate_tasks
from polyturn.data.hub_dataset import open_hub_dataset
from polyturn.data.mix import MixState, TaskMix
from polyturn.data.options import MixOptions
from polyturn.data.sampler import CURRICULUM, Curriculum, TaskSampler
from polyturn.data.sequences import WithInteraction, WithSystem
from polyturn.evaluation.evaluate import EvalSet
from polyturn.infra.plugin_shape import check_class, has_parameter
from polyturn.infra.plugins import import_attr

logger = logging.getLogger(__name__)


def build_tasks(source: TaskSourceConfig, *, base: Path, split: str) -> Sequence[Task]:
    """Open the files or the dataset of `source`, or call its generator."""
    if source.files is not None:
        tasks: Sequence[Task] = TaskDataset.open(source.files, split=split, base=base, columns=source.columns)
    elif source.dataset is not None:
        tasks = open_hub_dataset(
            source.dataset,
            split=split,
            part=source.split or ("test" if split == "eval" else "train"),
            subset=source.subset,
            first=source.limit if source.streaming else None,
            columns=source.columns,
            base=base,
        )
    else:
        assert source.generator is not None  # the config model requires one of the three
        tasks = generate_tasks(source.generator, source.kwargs, split=split, base=base)
    tasks = tasks if source.limit is None else tasks[: source.limit]
    tasks = tasks if source.system is None else WithSystem(tasks, source.system)
    return tasks if source.interaction is None else WithInteraction(tasks, source.interaction)


@dataclass(frozen=True, kw_only=True)
class RunTasks:
    """The tasks for training, and the evaluation sets."""

    train: Sequence[Task]
    eval_sets: Sequence[EvalSet]


def build_run_tasks(source: ConfigSource) -> RunTasks:
    """Open the tasks of a training run."""
    train, eval_sets = build_train_tasks(source), build_eval_sets(source)
    for name in ("every", "stop_at", "patience") if not eval_sets else ():
        if value := getattr(source.config.evaluation, name):
            raise ConfigError(
                f"evaluation.{name} is {value} and there are no tasks to evaluate on; set evaluation.data, or remove "
                f"evaluation.{name}"
            )
    # A warning, because `evaluation.data=null` turns the evaluation of any configuration off. A translated configuration
    # always has a set.
    sets = source.config.evaluation.sets
    if not eval_sets and sets != EvalConfig().sets and not source.config.compat.validation_metrics:
        logger.warning(
            "evaluation.sets has %s and there are no tasks to evaluate on, so the run is not evaluated; set "
            "evaluation.data, or remove evaluation.sets",
            ", ".join(map(repr, sets)),
        )
    return RunTasks(train=train, eval_sets=eval_sets)


def build_train_tasks(config_source: ConfigSource) -> Sequence[Task]:
    """Open the training tasks: data.train, or the tasks of the environment."""
    source, names = config_source.config.data.train, [e.name for e in env_configs(config_source)]
    if source is None and not names:
        raise ConfigError(
            "data.train is not set; name the tasks to train on, as files or as a generator, or an environment with "
            "its own tasks (env: textarena:GuessTheNumber-v0; in Python: tasks=rows)"
        )
    if source is None:
        return build_env_tasks(config_source, split="train")
    tasks = build_tasks(source, base=config_source.base, split="train")
    return rows_for_env(config_source, tasks, key="data.train") if names else tasks


def build_sampler(source: ConfigSource, tasks: Sequence[Task]) -> Callable[[], TaskSampler]:
    """Return a function that creates a sampler at its first visit."""
    data, seed = source.config.data, source.config.seed
    sampler = data.sampler
    if isinstance(sampler, MixOptions):
        train = source.config.train
        # A step uses the visits of all groups that start for it, including those that are cut off.
        per_step = train.groups_per_step + (0 if train.carries_over else train.extra_groups)
        shared = MixState()  # made once: a later sampler of the run continues with the draws of earlier ones
        return functools.partial(TaskMix, tasks, sampler, per_step=per_step, seed=seed, shuffle=data.shuffle, state=shared)
    if sampler is None:
        return functools.partial(TaskSampler, len(tasks), seed=seed, shuffle=data.shuffle)
    factory = import_attr(sampler.name, base=source.base, key="data.sampler")
    if not isinstance(factory, type) or not issubclass(factory, Curriculum):
        raise ConfigError(
            f"data.sampler names {sampler.name!r}, which is not a Curriculum; inherit from polyturn.data.sampler.Curriculum"
        )
    check_class(factory, CURRICULUM, where=f"data.sampler {sampler.name!r}")
    kwargs = arguments_of(sampler)
    if has_parameter(factory.maker, "base"):
        kwargs.setdefault("base", source.base)
    try:
        make = factory.maker(tasks, seed=seed, shuffle=data.shuffle, **kwargs)
    except TypeError as problem:
        raise ConfigError(f"the arguments in data.sampler do not fit the sampler {sampler.name!r}: {problem}") from problem

    def checked() -> TaskSampler:
        with plugin_errors_as(f"data.sampler: {sampler.name!r} cannot be made; it", ConfigError):
            return make()

    return checked


def build_eval_sets(source: ConfigSource) -> list[EvalSet]:
    """Make the evaluation sets; empty if there are no evaluation tasks."""
    config = source.config
    tasks: Sequence[Task]
    if config.evaluation.data is None:
        tasks = build_env_tasks(source, split="eval") if config.env is not None and config.data.train is None else []
    else:
        tasks = build_tasks(config.evaluation.data, base=source.base, split="eval")
        tasks = rows_for_env(source, tasks, key="evaluation.data") if config.env is not None else tasks
    if not tasks:
        return []
    return [
        EvalSet(
            name=name,
            tasks=tasks,
            sampling=sampling_params(one.sampling, config.rollout.limits),
            max_turns=one.max_turns,
            num_samples=one.samples,
            is_periodic=one.every,
            success_at=config.evaluation.success_at,
        )
        for name, one in config.evaluation.sets.items()
    ]
