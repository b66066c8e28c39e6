"""Checks of tasks and plug-ins before weights are loaded or training starts."""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
import itertools
import logging
import os
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from polyturn.batching.loss_scale import build_loss_scale
from polyturn.build.algorithm import (
    build_estimator,
    check_algorithm,
    check_further_models,
    check_teacher_servers,
    refuse_without_rewards,
    require_scores,
    task_check,
)
from polyturn.build.parts import Parts, Plugins
from polyturn.build.ranks import check_backend
from polyturn.build.tasks import RunTasks, build_sampler
from polyturn.build.training import build_trackers
from polyturn.build.trial import try_credit
from polyturn.config.config_source import ConfigSource
from polyturn.config.models import RunConfig
from polyturn.core.errors import ConfigError, DataError, TemplateError, did_you_mean
from polyturn.core.generation import MAX_SUPPORT
from polyturn.core.protocols import Tool
from polyturn.core.task import Task, select_tools
from polyturn.data.dataset import DatasetSummary, check_tasks
from polyturn.data.rows import near_column
from polyturn.data.sequences import Subset
from polyturn.evaluation.evaluate import EvalSet
from polyturn.infra.live import names_code
from polyturn.infra.plugins import import_attr
from polyturn.interactions.checks import check_row, check_setup
from polyturn.rollout.context import RolloutContext
from polyturn.tools.function import FunctionTool
from polyturn.tools.toolbox import Toolbox
from polyturn.tracking.console import Progress

logger = logging.getLogger(__name__)

FIRST_TASKS = 256
"""Number of tasks to check before weights are loaded; all tasks are checked before the first step."""
MEASURED_MEDIA_TASKS = 64
"""Number of tasks with media to encode before a run; for the others only files and kinds are checked, which is quick."""


def check_each(
    plugins: Plugins | RolloutContext,
    tools: Toolbox,
    tasks: Sequence[Task],
    *,
    name: str,
    needs_name: bool,
    needs_rewards: bool = True,
    also: Callable[[Task], object] = lambda task: None,
) -> DatasetSummary:
    """Read every task once and check that it can be scored and run; return a summary of all tasks.

    `name` is the name of the tasks in messages, and `also` makes further checks of every task. With `needs_name`, tasks with
    interaction_kwargs must name an interaction. Without `needs_rewards`, tasks of data.train need no scorer.
    """

    def check_scorer(task: Task) -> None:
        router, scoring = plugins.rewarder, tools.scoring
        is_given = needs_rewards or plugins.scheduler.gives_reward
        if is_given or router.scores(task, tools=tools.tools, scoring=scoring):
            router.check([task], tools=tools.tools, scoring=scoring)
        elif name != "data.train":
            raise DataError(
                f"{name}, task {task.id!r}: nothing scores its data_source {task.data_source!r}; this training needs no "
                "rewards, but an evaluation reports them, so set reward.function or a route, or set evaluation.data to null"
            )

    def check(task: Task) -> None:
        check_scorer(task)
        plugins.scheduler.check_task(task)
        for used in select_tools(task, tools.tools).names:
            _require_arguments(tools.tools[used], task, where=f"{name}, task {task.id!r}")
        check_row(plugins.interactions, task)
        also(task)

    return check_tasks(
        tasks,
        tools=tools.tools,
        interactions=plugins.interactions,
        name=name,
        require_interaction_name=needs_name,
        also=check,
    )


def check_before_weights(source: ConfigSource, tasks: RunTasks, plugins: Plugins | None, tools: Toolbox | None) -> None:
    """Run the checks that need no weights: unknown names, and rows that cannot be scored.

    Without `plugins` and `tools`, which are then made later, no task is read. Checks that need PyTorch, whose import takes
    seconds, are last.
    """
    build_trackers(source)
    check_support(source.config)
    check_warm_start(source)
    build_loss_scale(source.config.algorithm.loss_scale, decode=str, base=source.base)
    build_sampler(source, tasks.train)
    # All evaluation sets have the same tasks, so checking the first is enough.
    sources = {"data.train": tasks.train, **({"evaluation.data": tasks.eval_sets[0].tasks} if tasks.eval_sets else {})}
    check_first_tasks(source, sources, plugins, tools)
    with Progress("load PyTorch"):
        check_backend(source)
        check_algorithm(source)
        try_credit(source)


def check_support(config: RunConfig) -> None:
    """Raise if `rollout.sampling.keep_support` has no effect, or engine or trainer cannot use it."""
    sampling, where = config.rollout.sampling, "rollout.sampling.keep_support is true"
    if not sampling.keep_support:
        return
    if sampling.temperature == 0:
        raise ConfigError(f"{where}, and rollout.sampling.temperature is 0; raise temperature, or remove keep_support")
    if sampling.top_k > MAX_SUPPORT:
        raise ConfigError(
            f"{where}, and top_k is {sampling.top_k}; at most {MAX_SUPPORT} tokens are recorded, so lower top_k"
        )
    if not sampling.is_cut:
        raise ConfigError(f"{where}, and neither top_p nor top_k removes a token; set one of them, or remove keep_support")
    if config.engine.kind == "sglang":
        raise ConfigError(f"{where}, and the engine sglang does not return the kept tokens; use embedded or vllm")
    if config.train.backend == "megatron":
        raise ConfigError(f"{where}, and train.backend megatron does not use it; use train.backend torch")
    if config.algorithm.served_teachers is not None:
        raise ConfigError(
            f"{where}, and algorithm.served_teachers uses log-probabilities over the whole vocabulary; remove one of them"
        )


def check_first_tasks(
    config_source: ConfigSource, sources: Mapping[str, Sequence[Task]], plugins: Plugins | None, tools: Toolbox | None
) -> None:
    """Read the first tasks of each source, and check that they can be scored and run.

    If `plugins` is None, because further policies must be made first, no task is read.
    """
    if plugins is None or tools is None:
        return
    config = config_source.config
    check = functools.partial(
        check_each,
        plugins,
        tools,
        needs_name=config.compat.require_interaction_name,
        needs_rewards=config.algorithm.needs_rewards,
    )
    summaries = {}
    for name, source in sources.items():
        summaries[name] = check(Subset(source, range(min(len(source), FIRST_TASKS))), name=name)
    # Only if all tasks were read: an unread task may use tools and interactions that the read tasks do not use.
    if all(len(source) <= FIRST_TASKS for source in sources.values()):
        _refuse_unused(plugins.interactions, tools.tools, summaries)


def check_training(parts: Parts, tasks: RunTasks) -> None:
    """Check the tasks of a training run, after `check_before_weights` and before training."""
    estimator = build_estimator(parts.source)
    require_scores(parts, estimator)
    check_further_models(parts.source, estimator, like=parts.model)
    if parts.source.config.rollout.sampling.temperature == 0:
        logger.warning(
            "rollout.sampling.temperature is 0: the members of a group repeat each other unless they get different "
            "answers, and a group of equal rewards trains nothing; set it to 1.0 to sample"
        )
    build_sampler(parts.source, tasks.train)()
    check_teacher_servers(parts)
    summaries = {"data.train": _read_tasks(parts, tasks.train, name="data.train", also=task_check(parts.source))}
    _check_unscored(parts, tasks.train, estimator)
    check_eval_sets(parts, tasks.eval_sets)
    if tasks.eval_sets:
        summaries["evaluation.data"] = _read_tasks(parts, tasks.eval_sets[0].tasks, name="evaluation.data")
    _refuse_tools_not_offered(parts.context)
    check_use(parts.context, summaries)
    sources = {str(source) for summary in summaries.values() for source in summary.data_sources if source is not None}
    for pattern in parts.source.config.reward.routes:
        if not any(fnmatch.fnmatchcase(source, pattern) for source in sources):
            hint = did_you_mean(pattern, sources)
            logger.warning("reward.routes has %r, and no task has such a data_source.%s", pattern, hint)
    for name, one in parts.policies.by_name.items():
        if not one.is_named:
            logger.warning(
                "policies.%s is loaded but not used: no seat, simulated user or judge in the configuration names it", name
            )


def _check_unscored(parts: Parts, tasks: Sequence[Task], estimator: Any) -> None:
    """If the run needs no rewards, log how many tasks have none, and raise for settings that read them."""
    context = parts.context
    if context.needs_rewards or context.scheduler.gives_reward:
        return
    unscored = [task for task in tasks if not context.scores(task)]
    if unscored:
        refuse_without_rewards(parts.source, estimator, task=unscored[0])
        logger.info(
            "data.train: nothing scores %d of %d tasks, so their trajectories have no reward, which the loss does not read",
            *(len(unscored), len(tasks)),
        )


def check_warm_start(source: ConfigSource) -> None:
    """Raise if the conversations of a warm start are not set, or their file, folder or function does not exist."""
    sft = source.config.warm_start
    if sft.steps == 0:
        return
    if sft.conversations is None:
        raise ConfigError(
            f"warm_start.steps is {sft.steps} and warm_start.conversations is not set; name a jsonl file, a function or a "
            "run's folder, or set the steps to 0"
        )
    if names_code(sft.conversations):
        import_attr(sft.conversations, base=source.base, key="warm_start.conversations")
    elif not os.path.exists(source.base / str(sft.conversations)):
        raise ConfigError(
            f"warm_start.conversations is {sft.conversations!r}, and there is no such file or folder in "
            f"{str(source.base)!r}; name a jsonl file, a function as file.py:function, or a run's folder"
        )


def check_eval_sets(parts: Parts, sets: Sequence[EvalSet]) -> None:
    """Raise if the engine does not sample at the temperature of a set."""
    for one in sets:
        key = f"evaluation.sets.{one.name}.sampling.temperature"
        parts.engine.capabilities.check_temperature(one.sampling.temperature, key=key)


def check_run(parts: Parts, tasks: Sequence[Task], *, name: str) -> None:
    """Raise for tasks that cannot run: unknown tools or interactions, no reward, a prompt that is too long."""
    _refuse_tools_not_offered(parts.context)
    check_use(parts.context, {name: _read_tasks(parts, tasks, name=name)})


def fitting(parts: Parts, tasks: Sequence[Task], *, name: str) -> Sequence[Task]:
    """Return the tasks whose prompts fit if `data.drop_long_prompts` is set, otherwise all.

    Raises:
        DataError: no prompt fits.
    """
    if not parts.source.config.data.drop_long_prompts:
        return tasks
    with Progress(f"measure {name}", len(tasks)) as bar:
        kept = []
        for index, task in enumerate(tasks):
            if _too_long(parts, task, name=name) is None:
                kept.append(index)
            bar.advance()
    if not kept:
        raise DataError(
            f"{name}: data.drop_long_prompts leaves none of its {len(tasks)} tasks; their prompts have more than "
            f"{_prompt_limit(parts)} tokens, so raise rollout.limits.max_prompt_tokens"
        )
    if len(kept) < len(tasks):
        logger.info("%s: left out %d of %d tasks with long prompts", name, len(tasks) - len(kept), len(tasks))
    return Subset(tasks, kept)


def settle(parts: Parts, tasks: RunTasks) -> tuple[Parts, RunTasks]:
    """Drop long prompts if configured, and compute the number of steps if epochs are set.

    Raises:
        DataError: no task is left, or the tasks do not fill one step.
    """
    eval_sets = tasks.eval_sets
    if eval_sets:
        held_out = fitting(parts, eval_sets[0].tasks, name="evaluation.data")
        eval_sets = [dataclasses.replace(one, tasks=held_out) for one in eval_sets]
    tasks = RunTasks(train=fitting(parts, tasks.train, name="data.train"), eval_sets=eval_sets)
    config = parts.source.config
    train = config.train
    if train.epochs is None:
        return parts, tasks
    visits = build_sampler(parts.source, tasks.train)().visits(train.epochs)
    if visits < train.groups_per_step:
        raise DataError(
            f"train.epochs is {train.epochs} and data.train has {len(tasks.train)} tasks, which do not fill one step of "
            f"train.groups_per_step = {train.groups_per_step}; lower train.groups_per_step, or give more tasks"
        )
    train = dataclasses.replace(train, steps=visits // train.groups_per_step, epochs=None)
    source = dataclasses.replace(parts.source, config=config.model_copy(update={"train": train}))
    return dataclasses.replace(parts, source=source), tasks


def _prompt_limit(parts: Parts) -> int:
    longest = parts.source.config.rollout.limits.max_prompt_tokens
    return parts.max_context - 1 if longest is None else min(longest, parts.max_context - 1)


def _too_long(parts: Parts, task: Task, *, name: str) -> int | None:
    """Return the length in tokens of a prompt that is too long; None for other prompts."""
    context, limit = parts.context, _prompt_limit(parts)
    if any(message.media for message in task.prompt):
        try:
            length = len(context.encoder_for(task).start(task.prompt))
        except (TemplateError, DataError, ConfigError) as problem:
            raise type(problem)(f"{name}, task {task.id!r}: {problem}") from problem
        return length if length > limit else None
    try:
        text = context.codec.template.render(task.prompt, tools=context.encoder_for(task).tools, add_generation_prompt=True)
    except TemplateError as problem:
        raise TemplateError(f"{name}, task {task.id!r}: {problem}") from problem
    try:
        num_bytes = len(text.encode())
    except UnicodeEncodeError as problem:
        raise DataError(
            f"{name}, task {task.id!r}: the prompt has half of a surrogate pair, {text[problem.start]!a}, which is not a "
            "character; remove it"
        ) from problem
    # A token has at least one byte, so a text with at most as many bytes as the limit need not be encoded.
    if num_bytes <= limit:
        return None
    length = len(context.codec.encode(text))
    return length if length > limit else None


def check_use(context: RolloutContext, summaries: Mapping[str, DatasetSummary]) -> None:
    """Raise if no task uses the run's interactions, or its tools: the run would silently be single-turn.

    If the scheduler forks conversations, warn of the tools whose state the forks share.
    """
    check_setup(context.interactions)
    shared = [name for name, one in context.tools.hooks.items() if one.why_not is not None or one.snapshot is not None]
    if context.scheduler.forks and shared:
        logger.warning(
            "the scheduler %s forks conversations, and the forks share the state of %s; set `stateless = True` in a "
            "tool whose calls change no state",
            type(context.scheduler).__name__,
            ", ".join(map(repr, shared)),
        )
    _refuse_unused(context.interactions, context.tools.tools, summaries)


def _refuse_tools_not_offered(context: RolloutContext) -> None:
    if context.tools.tools and not context.scheduler.offers_tools:
        raise ConfigError(
            f"rollout.tools has {sorted(context.tools.tools)}, and with this rollout.scheduler the model never sees them: "
            "an agent's requests bring its tools; remove rollout.tools, or let the agent offer these tools"
        )


def _refuse_unused(interactions: Collection[str], tools: Collection[str], summaries: Mapping[str, DatasetSummary]) -> None:
    which = f"none of the {sum(s.num_tasks for s in summaries.values())} tasks of {' and '.join(summaries)}"
    if interactions and not any(set(s.interactions) - {None} for s in summaries.values()):
        first = next(iter(interactions))
        raise ConfigError(
            f"the run has the interactions {sorted(interactions)} and {which} names an interaction; add one to the rows, "
            f"{{'prompt': …, 'interaction': {first!r}}}, or set data.train.interaction for all rows, or remove "
            "rollout.interactions"
        )
    if tools and not any(s.num_with_tools for s in summaries.values()):
        unknown = sorted({name for s in summaries.values() for name in s.unknown_tools})
        named = f" (the rows name {unknown}.{did_you_mean(unknown[0], tools)})" if unknown else ""
        raise ConfigError(
            f"rollout.tools has {sorted(tools)} and {which} may call these tools{named}; name them in `tools` or "
            "`tools_kwargs` of the rows (or in extra_info.tools_kwargs), remove these columns, or remove rollout.tools"
        )


def _require_arguments(tool: Tool, task: Task, *, where: str) -> None:
    """Raise if the row lacks a value that a function tool takes from the row."""
    if isinstance(tool, FunctionTool):
        kwargs = task.tools_kwargs.get(tool.name)
        try:
            tool.require({} if kwargs is None else kwargs.create_kwargs)
        except DataError as problem:
            raise DataError(
                f"{where}: {problem}; put it into the row's tools_kwargs[{tool.name!r}]['create_kwargs']"
            ) from problem


def _read_tasks(
    parts: Parts, tasks: Sequence[Task], *, name: str, also: Callable[[Task], object] | None = None
) -> DatasetSummary:
    """Check every task; return a summary. `also` makes further checks."""
    context = parts.context
    limits = parts.source.config.rollout.limits
    longest = limits.max_prompt_tokens
    seen, near = itertools.count(), Counter[tuple[str, str]]()
    answered: list[str] = []

    def measure(task: Task) -> None:
        media = [medium for message in task.prompt for medium in message.media]
        if media and context.media is not None and next(seen) >= MEASURED_MEDIA_TASKS:
            context.media.check(media, where=f"{name}, task {task.id!r}")
        elif (length := _too_long(parts, task, name=name)) is not None:
            limit = _prompt_limit(parts)
            if limit == longest:
                which = "rollout.limits.max_prompt_tokens"
            elif limit + 1 == limits.max_context:
                which = f"rollout.limits.max_context {limits.max_context}"
            else:
                which = "the model's context"
            raise DataError(
                f"{name}, task {task.id!r}: its prompt has {length} tokens and {which} allows {limit}; raise the limit, or "
                "remove the task (data.drop_long_prompts drops all such tasks)"
            )
        if also is not None:
            also(task)
        near.update(filter(None, map(near_column, task.extra)))
        if task.prompt and task.prompt[-1].role == "assistant":
            answered.append(task.id)
        bar.advance()

    with Progress(f"check {name}", len(tasks)) as bar:
        needs = {"needs_name": context.require_interaction_name, "needs_rewards": context.needs_rewards}
        summary = check_each(context, context.tools, tasks, name=name, **needs, also=measure)
    for (column, known), count in near.items():
        logger.warning(
            "%s: %d of %d tasks have the column %r, which only rewards, tools and interactions read; did you mean %r?",
            *(name, count, len(tasks), column, known),
        )
    if answered:
        logger.warning(
            "%s: %d of %d prompts end with an assistant message, the first in task %r; the model starts a new assistant "
            "message after it, unless the scheduler continues it; end the prompts with a user message, or name the column "
            "'messages' instead of 'prompt', which leaves out a last answer",
            *(name, len(answered), len(tasks), answered[0]),
        )
    without = summary.interactions.get(None, 0)
    if 0 < without < len(tasks):
        logger.info(
            "%s: %d of %d tasks name no interaction, so their episodes end at the first answer without a tool call",
            *(name, without, len(tasks)),
        )
    return summary
