"""Build a rollout context for a served model, for evaluation without loading a model or torch."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence

from polyturn.build.checks import check_each, check_use
from polyturn.build.parts import build_context, build_plugins, build_tools, check_plugins
from polyturn.build.policies import build_policies
from polyturn.config.config_source import ConfigSource
from polyturn.core.errors import ConfigError
from polyturn.core.generation import SamplingParams
from polyturn.core.task import Task
from polyturn.engines.chat_completions import ChatEngine, Endpoint
from polyturn.engines.text_codec import text_codec
from polyturn.evaluation.evaluate import EvalSet
from polyturn.rollout.context import RolloutContext
from polyturn.rollout.limits import ContextPolicy
from polyturn.tokens.options import ParserOptions
from polyturn.tokens.parsers import HermesParser, build_parser

logger = logging.getLogger(__name__)

NO_LIMIT = 1 << 30
"""A limit that no completion reaches: ids are bytes here, and only the server can count and limit its tokens."""


def build_endpoint_context(source: ConfigSource, endpoint: Endpoint) -> tuple[RolloutContext, ChatEngine]:
    """Make the rollout context and the engine for evaluating a model behind a text-only endpoint.

    The configured limits of turns, time and tokens per turn apply; limits on the tokens of a conversation are left to the
    server.
    """
    check_plugins(source)
    limits = source.config.rollout.limits
    if limits.max_tokens is not None:
        logger.info("rollout.limits.max_tokens is not applied: only the server counts its tokens")
    codec = text_codec()
    tools = build_tools(source, codec=codec)
    policies = build_policies(source)
    plugins = build_plugins(source, policies)
    engine = ChatEngine(dataclasses.replace(endpoint, max_tokens=limits.max_tokens_per_turn))
    context = build_context(
        source,
        plugins,
        policies,
        engine=engine,
        codec=codec,
        parser=build_parser(codec, ParserOptions(name="hermes"), needs_calls=True) if tools.tools else HermesParser(),
        tools=tools,
        limits=dataclasses.replace(
            limits, max_tokens_per_turn=None, max_tokens=None, max_context=None, context_policy=ContextPolicy.STOP
        ),
        sampling=SamplingParams(max_tokens=NO_LIMIT),
        sanity_mode="off",  # ids are bytes of the text codec, so there is nothing to compare
        escape_prompts="all",
    )
    return context, engine


def for_endpoint(which: EvalSet) -> EvalSet:
    """Return an evaluation set without a limit on the length of completions except the server's."""
    return dataclasses.replace(which, sampling=dataclasses.replace(which.sampling, max_tokens=NO_LIMIT))


def check_endpoint_run(context: RolloutContext, tasks: Sequence[Task], *, name: str) -> None:
    """Raise for tasks that cannot run: unknown tools or interactions, no reward, media."""

    def check(task: Task) -> None:
        if any(message.media for message in task.prompt):
            raise ConfigError(f"{name}, task {task.id!r} has images, videos or sounds; an endpoint accepts only text")

    needs_name = context.require_interaction_name
    summary = check_each(context, context.tools, tasks, name=name, needs_name=needs_name, also=check)
    check_use(context, {name: summary})
