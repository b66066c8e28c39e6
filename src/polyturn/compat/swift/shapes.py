"""The methods that schedulers written for ms-swift define, checked before a run."""

from __future__ import annotations

from dataclasses import replace

from polyturn.compat.swift.base import MultiTurnScheduler, RolloutScheduler
from polyturn.core.errors import ConfigError
from polyturn.core.plugin_shape import CallShape, Shape, check_class

_BASES = (RolloutScheduler, MultiTurnScheduler)
_CALLS = {
    "step": CallShape(num=3, write="def step(self, infer_request, response_choice, current_turn)"),
    "check_finished": CallShape(num=3, write="def check_finished(self, infer_request, response_choice, current_turn)"),
    "run": CallShape(num=2, write="async def run(self, infer_request, request_config, **kwargs)"),
}
_OWN_LOOP = {"run": _CALLS["run"]}
"""Of a class with a loop of its own, whose `step` and `check_finished` are helpers that it calls as it likes."""
SINGLE_TURN = Shape(what="a scheduler of ms-swift", needs=(), bases=_BASES, calls=_CALLS)
"""A scheduler of one turn is whole as its base class has it."""
MULTI_TURN = Shape(what="a multi-turn scheduler of ms-swift", needs=(("step", "run"),), bases=_BASES, calls=_CALLS)


def check_scheduler(cls: type[RolloutScheduler], *, where: str) -> None:
    """Refuse a scheduler's class that leaves its turns to the base class, or misspells a method.

    Raises:
        ConfigError: the first problem found.
    """
    refuse_batches(cls, where=where)
    shape = MULTI_TURN if issubclass(cls, MultiTurnScheduler) else SINGLE_TURN
    if cls.run not in (base.run for base in _BASES):
        shape = replace(shape, calls=_OWN_LOOP)
    check_class(cls, shape, where=where)


def refuse_batches(cls: type[RolloutScheduler], *, where: str = "") -> None:
    """Refuse a class with an `async_infer` of its own, which gets the requests of a whole group in ms-swift.

    Raises:
        ConfigError: it has one.
    """
    if cls.async_infer is not RolloutScheduler.async_infer:
        prefix = f"{where}: " if where else ""
        raise ConfigError(
            f"{prefix}{cls.__name__} overrides `async_infer`, which gets the requests of a whole group in ms-swift; here an "
            "episode is one request, so write `run`, or take `rollout.scheduler: tree` for branches"
        )
