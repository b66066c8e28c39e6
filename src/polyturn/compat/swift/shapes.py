"""Checks the methods of schedulers written for ms-swift before a run."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from polyturn.compat.swift.base import MultiTurnScheduler, RolloutScheduler
from polyturn.core.errors import ConfigError, one_line
from polyturn.infra.plugin_shape import CallShape, Shape, check_class
from polyturn.serving.rollout_protocol import (
    ChatCompletionResponse,
    ChatCompletionResponseChoice,
    ChatMessage,
    RequestConfig,
    RolloutInferRequest,
    RolloutOutput,
    UsageInfo,
)

_BASES = (RolloutScheduler, MultiTurnScheduler)
_CALLS = {
    "step": CallShape(num=3, write="def step(self, infer_request, response_choice, current_turn)"),
    "check_finished": CallShape(num=3, write="def check_finished(self, infer_request, response_choice, current_turn)"),
    "run": CallShape(num=2, write="async def run(self, infer_request, request_config, **kwargs)"),
    "async_infer": CallShape(num=2, write="async def async_infer(self, infer_requests, request_config, **kwargs)"),
}
_OWN_LOOP = {name: _CALLS[name] for name in ("run", "async_infer")}
"""Checked methods of a class with its own loop, whose `step` and `check_finished` are only helpers."""
SINGLE_TURN = Shape(what="a scheduler of ms-swift", needs=(), bases=_BASES, calls=_CALLS)
"""A scheduler with one turn needs no methods besides those of the base class."""
MULTI_TURN = Shape(what="a multi-turn scheduler of ms-swift", needs=(("step", "run"),), bases=_BASES, calls=_CALLS)


def check_scheduler(cls: type[RolloutScheduler], *, where: str) -> None:
    """Refuse a scheduler's class that does not define its turns, or misspells a method.

    Raises:
        ConfigError: the first problem found.
    """
    shape = MULTI_TURN if issubclass(cls, MultiTurnScheduler) else SINGLE_TURN
    if cls.run not in (base.run for base in _BASES):
        shape = replace(shape, calls=_OWN_LOOP)
    check_class(cls, shape, where=where)


def overrides_batches(cls: type[RolloutScheduler]) -> bool:
    """Return whether a class overrides `async_infer`."""
    return cls.async_infer is not RolloutScheduler.async_infer


async def refuse_groups(scheduler: RolloutScheduler, request: RolloutInferRequest, *, engine: Any = None) -> bool:
    """Refuse a scheduler whose `async_infer` needs the requests of a whole group, because an episode has one request.

    The check replaces `run` by a recorder and calls `async_infer` twice: with one request, and with two equal ones. An
    override that only changes requests or reads outputs passes all of them to `run`.

    Returns:
        Whether the check is complete. It is not if the method asks for a completion, or for an engine that is missing.

    Raises:
        ConfigError: the method raises for a single request, or does not pass all requests to `run`.
    """
    for num in (1, 2):
        noted: set[str | None] = set()

        async def run(request: RolloutInferRequest, config: RequestConfig, **kwargs: Any) -> RolloutOutput:
            noted.add(request.uuid)  # noqa: B023  (called before the next round)
            message = ChatMessage(role="assistant", content="")
            choice = ChatCompletionResponseChoice(index=0, message=message, finish_reason="stop", token_ids=[])
            response = ChatCompletionResponse(model="", choices=[choice], usage=UsageInfo(0, 0, 0), id=request.uuid or "")
            return RolloutOutput(response=response, messages=request.messages)

        trial: Any = copy.copy(scheduler)
        trial.run, trial.infer_engine = run, _TrialEngine(engine)
        requests = [replace(copy.deepcopy(request), uuid=f"{request.uuid}-{number}") for number in range(num)]
        try:
            await trial.async_infer(list(requests), RequestConfig())
        except Exception as problem:
            if isinstance(problem, _Samples) or (engine is None and isinstance(problem, AttributeError)):
                return False
            raise _needs_group(scheduler, f"raises {one_line(problem)} with one request") from problem
        if noted != {one.uuid for one in requests}:
            raise _needs_group(scheduler, f"runs {len(noted)} of {num} equal requests")
    return True


def _needs_group(scheduler: RolloutScheduler, why: str) -> ConfigError:
    return ConfigError(
        f"{type(scheduler).__name__}.async_infer {why}: it needs the requests of a whole group, but an episode has one; "
        "override `run` instead, or use examples/schedulers/tree.py for branches"
    )


class _Samples(Exception):
    """The method asks for a completion, which the check does not sample."""


class _TrialEngine:
    """Replaces the engine during the check, with the attributes of the real one, if there is one."""

    def __init__(self, engine: Any) -> None:
        self._real = engine

    @property
    def engine(self) -> _TrialEngine:
        """The engine itself."""
        return self

    async def infer_async(self, *_: Any, **__: Any) -> Any:
        raise _Samples

    async def _batch_infer_stream(self, tasks: Sequence[Any], *_: Any, **__: Any) -> list[Any]:
        return [await task for task in tasks]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._real, name)

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *dir(self._real)]
