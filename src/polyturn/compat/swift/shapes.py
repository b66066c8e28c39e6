"""The methods that schedulers written for ms-swift define, checked before a run."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from polyturn.compat.swift.base import MultiTurnScheduler, RolloutScheduler
from polyturn.core.errors import ConfigError, one_line
from polyturn.core.plugin_shape import CallShape, Shape, check_class
from polyturn.infra.run_sync import in_own_loop
from polyturn.serving.protocol import (
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
"""Of a class with a loop of its own, whose `step` and `check_finished` are helpers that it calls as it likes."""
SINGLE_TURN = Shape(what="a scheduler of ms-swift", needs=(), bases=_BASES, calls=_CALLS)
"""A scheduler of one turn is whole as its base class has it."""
MULTI_TURN = Shape(what="a multi-turn scheduler of ms-swift", needs=(("step", "run"),), bases=_BASES, calls=_CALLS)


def check_scheduler(cls: type[RolloutScheduler], *, where: str) -> None:
    """Refuse a scheduler's class that leaves its turns to the base class, or misspells a method.

    Raises:
        ConfigError: the first problem found.
    """
    shape = MULTI_TURN if issubclass(cls, MultiTurnScheduler) else SINGLE_TURN
    if cls.run not in (base.run for base in _BASES):
        shape = replace(shape, calls=_OWN_LOOP)
    check_class(cls, shape, where=where)


def overrides_batches(cls: type[RolloutScheduler]) -> bool:
    """Return whether a class has an `async_infer` of its own."""
    return cls.async_infer is not RolloutScheduler.async_infer


def refuse_groups(scheduler: RolloutScheduler, request: RolloutInferRequest) -> None:
    """Refuse a scheduler whose `async_infer` needs the requests of a whole group, for an episode has one request.

    It is called with one request and with two of the same messages, and `run` only notes them: an override that prepares
    requests, or looks at outputs, passes each of them on.

    Raises:
        ConfigError: it raises with one request alone, or lets `run` have fewer than it was given.
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
        trial.run, trial.infer_engine = run, _NoEngine()
        requests = [replace(copy.deepcopy(request), uuid=f"{request.uuid}-{number}") for number in range(num)]
        try:
            in_own_loop(lambda: trial.async_infer(list(requests), RequestConfig()))  # noqa: B023
        except _NeedsEngine:
            return  # the first episode shows what it does
        except Exception as problem:
            raise _needs_group(scheduler, f"raises {one_line(problem)} with one request") from problem
        if noted != {one.uuid for one in requests}:
            raise _needs_group(scheduler, f"runs {len(noted)} of {num} equal requests")


def _needs_group(scheduler: RolloutScheduler, why: str) -> ConfigError:
    return ConfigError(
        f"{type(scheduler).__name__}.async_infer {why}: it needs those of a whole group, and an episode is one; write "
        "`run`, or take examples/schedulers/tree.py for branches"
    )


class _NeedsEngine(AttributeError):
    """Code asked for an engine where none is there yet."""


class _NoEngine:
    """Stands in for an engine where nothing is generated."""

    async def _batch_infer_stream(self, tasks: Sequence[Any], *_: Any, **__: Any) -> list[Any]:
        return [await task for task in tasks]

    def __getattr__(self, name: str) -> Any:
        raise _NeedsEngine(name)
