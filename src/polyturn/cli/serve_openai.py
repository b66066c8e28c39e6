"""`polyturn serve --openai`: serve a model with OpenAI's and Anthropic's APIs, keeping the tokens of episodes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polyturn.cli.listening import ServeOptions
from polyturn.cli.serve import warn_of_min_concurrent
from polyturn.core.trajectory import TrajectoryGroup
from polyturn.infra.loop import run_loop

if TYPE_CHECKING:
    from polyturn.config.models import RunConfig

logger = logging.getLogger(__name__)

UNTIMED = {"rollout": {"limits": {"timeout_s": None}}}
"""Defaults: no time limit, because a client may be a person; inactivity (`--idle`) ends an episode."""
_OPEN_LIMITS = {"rollout.limits.max_turns": "null", "rollout.limits.max_tokens_per_turn": "null"}
"""Defaults for limits that an agent with its own loop sets itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hosted:
    """Further options of `serve --openai`."""

    model_names: tuple[str, ...] = ()
    record: Path | None = None
    idle_s: float = 600.0


def run(config: Path | None, overrides: Sequence[str], options: ServeOptions, hosted: Hosted) -> None:
    """Serve a model until a signal.

    Raises:
        ConfigError: the address would be open to others, or the configuration cannot work.
    """
    from polyturn import build
    from polyturn.api.console import quiet_transformers
    from polyturn.api.folders import keep_tokenizer
    from polyturn.cli.dialects import load_native
    from polyturn.config.load import base_of
    from polyturn.serving.listen import on_signal
    from polyturn.serving.openai.endpoint import MAX_REQUESTS, EndpointOptions
    from polyturn.serving.openai.hosted_episodes import OpenAIService

    rules = options.rules(max_requests=MAX_REQUESTS)
    options.check_port()
    named = {o.partition("=")[0] for o in overrides}
    opened = [f"{key}={value}" for key, value in _OPEN_LIMITS.items() if config is None and key not in named]
    loaded = load_native(config, [*opened, *overrides], defaults=UNTIMED)
    if unused := unused_keys(loaded.config):
        logger.warning(
            "%s: no effect, because an agent has its own tools and loop; to serve tools, use polyturn serve --mcp TOOLS",
            ", ".join(unused),
        )
    warn_of_min_concurrent(loaded.config)
    quiet_transformers()
    base = Path() if config is None else base_of(config)
    read: Any = loaded.config
    hosted_rollout: dict[str, Any] = {"scheduler": None, "scheduler_kwargs": {}}
    values = read.model_copy(update={"rollout": read.rollout.model_copy(update=hosted_rollout)})
    parts = build.build_parts(build.untrained(build.ConfigSource(config=values, base=base.resolve())))
    names = [n for n in hosted.model_names if n != "*"] or _names(values)
    endpoint = EndpointOptions(host=options.host, models=tuple(names), any_model="*" in hosted.model_names, rules=rules)

    async def serve(record: Any) -> None:
        service = OpenAIService(
            parts.context,
            endpoint,
            idle_s=hosted.idle_s,
            max_episodes=values.rollout.max_concurrent,
            record=record,
            has_rewards=values.reward.function is not None or bool(values.reward.routes),
        )
        until = asyncio.Event()
        on_signal(until.set)
        try:
            await service.serve(options.bind(), until, grace_s=options.grace_s)
        finally:
            await parts.context.close()

    with ExitStack() as stack:
        record = None
        if hosted.record is not None:
            from polyturn.store.parquet_store import ParquetStore

            store = stack.enter_context(ParquetStore(hosted.record))
            keep_tokenizer(parts, hosted.record)

            def record(group: TrajectoryGroup) -> None:
                store.add(group, step=0, split="served")
                store.flush()

        run_loop(serve(record))


def unused_keys(config: RunConfig) -> list[str]:
    """Return the keys that are set but have no effect, because agents have their own tools and loop."""
    rollout = config.rollout
    values = {
        "rollout.tools.functions": rollout.tools.functions,
        "rollout.tools.file": rollout.tools.file,
        "rollout.interactions": rollout.interactions,
        "rollout.scheduler": rollout.scheduler,
    }
    return [key for key, value in values.items() if value]


def _names(config: Any) -> list[str]:
    """Return the names that requests may use: the model's path, its last part, the run's name, and `polyturn`."""
    path = config.model.path
    names = [] if path is None else [str(path), Path(path).name]
    return list(dict.fromkeys([*names, config.name, "polyturn"]))
