"""Parts: the live objects that training, evaluation, `polyturn rollout` and serving share."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from polyturn.algorithms.options import RoutingOptions
from polyturn.build.engine import build_engine, check_engine, route_shape
from polyturn.build.environments import build_env_scheduler, build_env_tools
from polyturn.build.model import build_codec, build_media, build_model, build_outline, max_context_of, on_gpu, set_up_torch
from polyturn.build.policies import FurtherPolicies, build_policies
from polyturn.config.config_source import ConfigSource, check_model_name
from polyturn.config.models import LIMITS, RewardFunctionConfig
from polyturn.config.parts import arguments_of
from polyturn.core.errors import ConfigError, UnknownNameError, did_you_mean, plugin_errors_as
from polyturn.core.generation import Sampling, SamplingParams
from polyturn.core.protocols import Engine
from polyturn.engines.base import ModelFolder, ServerPlaces
from polyturn.engines.options import EmbeddedOptions
from polyturn.engines.update_gate import UpdateGate
from polyturn.infra.live import LiveObject
from polyturn.infra.loop import LoopMonitor
from polyturn.infra.plugin_shape import check_class, has_parameter, lacks
from polyturn.infra.plugins import import_attr, load_plugins
from polyturn.infra.stand_in import stand_ins
from polyturn.interactions.registry import check_interactions, initialize_interactions_from_config
from polyturn.rewards.code import Sandbox
from polyturn.rewards.options import DEFAULT_WEIGHTS
from polyturn.rewards.overlong import Overlong
from polyturn.rewards.router import RewardRef, RewardRouter, Weighing
from polyturn.rollout.context import RolloutContext
from polyturn.rollout.limits import Limits
from polyturn.rollout.pool import RolloutPool
from polyturn.rollout.scheduler import MultiTurnScheduler
from polyturn.rollout.schedulers import schedulers
from polyturn.rollout.schedulers.registry import SCHEDULER, refuse_moved
from polyturn.tokens.codec import Codec
from polyturn.tokens.parsers import build_parser
from polyturn.tokens.probe import TemplateProbe, probe_template
from polyturn.tools.base import BaseTool
from polyturn.tools.function import FunctionTool
from polyturn.tools.registry import TOOL, check_tools, initialize_tools_from_config, load_function_tools
from polyturn.tools.toolbox import Toolbox
from polyturn.tracking.console import Progress

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

    from polyturn.cluster.worker_pool import WorkerPool
    from polyturn.training.rank_group import RankGroup

NO_POLICIES = FurtherPolicies()


@dataclass(frozen=True, kw_only=True)
class Parts:
    """The live objects for rollout."""

    source: ConfigSource
    model: PreTrainedModel
    engine: Engine
    context: RolloutContext
    template: TemplateProbe
    policies: FurtherPolicies = NO_POLICIES
    """Further policies, which sample and are not trained."""
    rank_group: RankGroup | None = None
    """The training ranks; None if this process trains alone."""
    pool: WorkerPool | None = None
    """The processes that run episodes; None if this process does."""

    @property
    def tokenizer(self) -> PreTrainedTokenizerFast:
        """The tokenizer, with the run's chat template."""
        return self.context.codec.tokenizer

    @property
    def max_context(self) -> int:
        """Largest length of a conversation, in tokens."""
        assert self.context.limits.max_context is not None
        return self.context.limits.max_context

    @property
    def busy_s(self) -> float:
        """Seconds that all policies have spent generating so far."""
        return self.engine.busy_s + self.policies.busy_s


def build_parts(
    source: ConfigSource,
    *,
    checkpoint: Path | None = None,
    engine: Any = None,
    has_weights: bool = True,
    places: Callable[[ModelFolder], ServerPlaces] | None = None,
    follows: int = 0,
    check: Callable[[Plugins | None, Toolbox], None] | None = None,
) -> Parts:
    """Make the model, the engine and the rollout context.

    Args:
        source: The configuration.
        checkpoint: A folder with a Hugging Face model that replaces the configured weights and tokenizer.
        engine: The engine; None makes the configured one.
        has_weights: Whether to load weights; the rollout itself needs only config and shapes.
        places: Makes, from the model's folder, the object that starts servers on other machines; None starts them here.
        follows: In a rollout worker, the number of the controller's servers, which the worker only calls.
        check: Called with plug-ins and tools before weights are loaded. The plug-ins are None if further policies must be
            made first.
    """
    config, rollout = source.config, source.config.rollout
    for name in (config.model.path, config.model.tokenizer):
        if isinstance(name, str):
            check_model_name(name, source.base)
    check_plugins(source)
    is_own = engine is None and not follows
    if is_own and not isinstance(config.engine, EmbeddedOptions):  # its modules import PyTorch
        check_engine(source)
    if has_torch := "torch" in sys.modules:  # a plug-in imported torch, and may draw random numbers when it is created
        set_up_torch(config)
    with Progress("load the tokenizer and test its template"):
        codec = build_codec(source, checkpoint=checkpoint)
        tools = build_tools(source, codec=codec)
        schemas = tuple(tools.schemas.values())
        template = probe_template(codec, tools=schemas)
        shows_tools = config.env is None and bool(getattr(_scheduler_class(source), "shows_tools", False))
        if in_prompt := bool(schemas) and not template.renders_tools and shows_tools:
            template = probe_template(codec)
    template.require()
    # Before weights are loaded, so that a misspelt parser is reported at once.
    needs_calls = bool(tools.tools) and not in_prompt
    parser = build_parser(codec, rollout.parser, needs_calls=needs_calls, base=source.base)
    plugins = None if config.policies else build_plugins(source, NO_POLICIES)  # a further policy may be a copy of the model
    if check is not None:
        check(plugins, tools)
    if not has_torch:
        set_up_torch(config)
    if config.algorithm.routing != RoutingOptions():  # checked before weights are loaded
        route_shape(source, build_outline(source, codec.tokenizer))
    make = functools.partial(build_model, checkpoint=checkpoint) if has_weights else build_outline
    with Progress("load the model"):
        model = on_gpu(make(source, codec.tokenizer))
    max_context = max_context_of(rollout.limits.max_context, model)
    limits = dataclasses.replace(rollout.limits, max_context=max_context)
    limits.warn_of_no_room()
    media = build_media(source, codec, model)
    policies = build_policies(source, model=model, codec=codec)
    plugins = plugins or build_plugins(source, policies)
    engine = engine or build_engine(
        source,
        model,
        tokenizer=codec.tokenizer,
        media=media,
        max_context=max_context,
        checkpoint=checkpoint,
        places=places,
        follows=follows,
    )
    context = build_context(
        source,
        plugins,
        policies,
        engine=UpdateGate(engine, mode=mode) if (mode := config.engine.update) in ("wait", "abort_resume") else engine,
        codec=codec,
        media=media,
        parser=parser,
        tools=tools,
        limits=limits,
        sampling=sampling_params(rollout.sampling, rollout.limits),
        renders_history=rollout.use_inference_chat_template or template.strategy == "segment",
        sanity_mode=rollout.tokenization_sanity_check_mode,
        escape_prompts=rollout.escape_prompts,
        escape_observations=rollout.escape_observations,
    )
    return Parts(source=source, model=model, engine=engine, context=context, template=template, policies=policies)


class Plugins(NamedTuple):
    """The user's plug-ins, made before weights are loaded, so that a mistake in a plug-in is reported at once."""

    scheduler: MultiTurnScheduler
    interactions: Mapping[str, Any]
    rewarder: RewardRouter


def build_plugins(source: ConfigSource, policies: FurtherPolicies) -> Plugins:
    """Make the scheduler, the rewards and the interactions."""
    scheduler = build_scheduler(source, policies)
    rewarder = build_rewarder(source, policies, scheduler)
    named = source.config.rollout.interactions
    interactions = (
        {} if named is None else initialize_interactions_from_config(named, base=source.base, policies=policies.by_name)
    )
    return Plugins(scheduler=scheduler, interactions=interactions, rewarder=rewarder)


def build_context(source: ConfigSource, plugins: Plugins, policies: FurtherPolicies, **parts: Any) -> RolloutContext:
    """Return the context of all episodes: plug-ins, their deadlines, and the `parts` that depend on the engine."""
    rollout = source.config.rollout
    return RolloutContext(
        **plugins._asdict(),
        needs_rewards=source.config.algorithm.needs_rewards,
        also=tuple(one.engine for one in policies.by_name.values()),
        interaction_timeout_s=rollout.interaction_timeout_s,
        scheduler_timeout_s=rollout.scheduler_timeout_s,
        require_interaction_name=source.config.compat.require_interaction_name,
        monitor=LoopMonitor(limit_s=rollout.watchdog_s, deadline_s=source.config.deadline_s),
        sanity_every=rollout.sanity_every,
        **parts,
    )


def check_plugins(source: ConfigSource) -> None:
    """Import the user's plug-ins and check their classes and signatures, before anything is loaded."""
    config = source.config
    load_plugins(config.plugins, base=source.base)
    if config.rollout.interactions is not None:
        check_interactions(config.rollout.interactions, base=source.base)
    if config.rollout.tools.file is not None:
        check_tools(config.rollout.tools.file, base=source.base)
    _function_tools(source)
    if config.env is None:
        scheduler = _scheduler_class(source)
        kind = type(scheduler) if isinstance(scheduler, MultiTurnScheduler) else scheduler
        if isinstance(kind, type):
            check_class(kind, SCHEDULER, where=f"rollout.scheduler {config.rollout.scheduler!r}")
    build_rewarder(source)


def _scheduler_class(source: ConfigSource) -> Any:
    """Return the class of `rollout.scheduler`, or the adapter of another library's class."""
    name = source.config.rollout.scheduler or "default"
    theirs: dict[str, Any] = {}
    if isinstance(name, str) and name not in schedulers and ":" not in name:
        theirs = {n: c for one in stand_ins() for n, c in one.schedulers().items()}
        if name not in theirs:
            refuse_moved(name)
        if theirs and name not in theirs and "." not in name:
            raise UnknownNameError(f"rollout.scheduler: there is no {name!r}.{did_you_mean(name, [*schedulers, *theirs])}")
    scheduler = theirs[name] if name in theirs else schedulers.resolve(name, base=source.base)
    adapters = (one.adapt_scheduler for one in stand_ins() if one.adapt_scheduler is not None)
    adapted = (adapt(scheduler, where=f"rollout.scheduler {name!r}") for adapt in adapters)
    return next((adapter for adapter in adapted if adapter is not None), scheduler)


def build_tools(source: ConfigSource, *, codec: Codec) -> Toolbox:
    """Make the tools of the tools file and of the named functions."""
    tools = source.config.rollout.tools
    of_file = [] if tools.file is None else initialize_tools_from_config(tools.file, base=source.base)
    return Toolbox([*of_file, *_function_tools(source), *build_env_tools(source)], tools, codec=codec)


def _function_tools(source: ConfigSource) -> list[BaseTool]:
    """Return the tools of `rollout.tools.functions`."""
    function_tools: list[BaseTool] = []
    for name in source.config.rollout.tools.functions:
        if isinstance(name, str) and name.endswith(".py"):
            function_tools += load_function_tools(source.base / os.path.expanduser(name))
            continue
        function = import_attr(name, base=source.base, key="rollout.tools.functions")
        if isinstance(name, LiveObject) and not isinstance(function, BaseTool):
            function = FunctionTool(function)
        if not isinstance(function, BaseTool):
            raise ConfigError(
                f"rollout.tools.functions names {name!r}, which is a {type(function).__name__}; "
                "decorate the function with @polyturn.tool"
            )
        check_class(type(function), TOOL, where=f"tool {name!r}")
        function_tools.append(function)
    return function_tools


def build_rewarder(
    config_source: ConfigSource, policies: FurtherPolicies = NO_POLICIES, scheduler: MultiTurnScheduler | None = None
) -> RewardRouter:
    """Make the reward router for finished trajectories; `scheduler` may score too."""
    reward = config_source.config.reward
    return RewardRouter(
        {source: _reward_ref(target) for source, target in reward.routes.items()},
        function=None if reward.function is None else _reward_ref(reward.function),
        weighing=Weighing(
            weights=DEFAULT_WEIGHTS if reward.weights is None else reward.weights,
            interaction=reward.interaction,
            overlong=_overlong(reward.overlong, config_source.config.rollout.limits),
        ),
        calls=reward,
        sandbox=Sandbox.of(reward.sandbox),
        scheduler=scheduler,
        policies=policies.by_name,
        base=config_source.base,
    )


def _reward_ref(named: RewardFunctionConfig) -> RewardRef:
    return RewardRef(target=named.name, kwargs=arguments_of(named))


def _overlong(config: Overlong, limits: Limits) -> Overlong | None:
    if config.buffer == 0:
        return None
    limit = config.max_tokens or limits.max_tokens
    if limit is None:
        raise ConfigError("reward.overlong has a buffer but no limit; set reward.overlong.max_tokens")
    return dataclasses.replace(config, max_tokens=limit)


def build_scheduler(source: ConfigSource, policies: FurtherPolicies = NO_POLICIES) -> MultiTurnScheduler:
    """Make the scheduler."""
    if source.config.env is not None:
        return build_env_scheduler(source, policies)
    rollout = source.config.rollout
    name = rollout.scheduler or "default"
    kwargs = {key: v.target if isinstance(v, LiveObject) else v for key, v in rollout.scheduler_kwargs.items()}
    limits = rollout.limits
    # The default timeout does not count as a limit: an endless episode would run for two hours unnoticed.
    timeout_s = None if limits.timeout_s == LIMITS.timeout_s else limits.timeout_s
    if rollout.scheduler is not None and (limits.max_turns, limits.max_tokens, timeout_s) == (None, None, None):
        raise ConfigError(
            f"rollout.scheduler is {name!r} and no limit would end an endless episode; set rollout.limits.max_turns, "
            f"max_tokens or timeout_s (to another time than its default, {LIMITS.timeout_s:g})"
        )
    scheduler_class = _scheduler_class(source)
    if isinstance(scheduler_class, MultiTurnScheduler) and not kwargs:
        return scheduler_class
    if callable(scheduler_class) and has_parameter(scheduler_class, "base"):
        kwargs.setdefault("base", source.base)
    # A parameter `policies` with a default other than None has another meaning.
    if callable(scheduler_class) and lacks(scheduler_class, "policies"):
        kwargs.setdefault("policies", policies.by_name)
    try:
        inspect.signature(scheduler_class).bind(**kwargs)
    except TypeError as problem:
        raise ConfigError(f"rollout.scheduler_kwargs do not fit the scheduler {name!r}: {problem}") from problem
    with plugin_errors_as(f"rollout.scheduler: {name!r} cannot be made; it", ConfigError):
        scheduler = scheduler_class(**kwargs)
    if not isinstance(scheduler, MultiTurnScheduler):
        raise ConfigError(
            f"rollout.scheduler names {name!r}, which does not make a MultiTurnScheduler; inherit from that class"
        )
    return scheduler


def rollout_pool(source: ConfigSource, context: RolloutContext) -> RolloutPool:
    """Make the pool that runs episodes in this process."""
    rollout = source.config.rollout
    return RolloutPool(
        context,
        max_concurrent=rollout.max_concurrent,
        min_concurrent=rollout.min_concurrent,
        max_failed_share=rollout.max_failed_share,
    )


def sampling_params(sampling: Sampling, limits: Limits) -> SamplingParams:
    """Return the sampling parameters of one completion."""
    return SamplingParams.of(sampling, max_tokens=limits.max_tokens_per_turn or 1 << 20)
