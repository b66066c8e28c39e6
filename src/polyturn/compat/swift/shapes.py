"""The methods that schedulers written for ms-swift define, checked before a run."""

from __future__ import annotations

from polyturn.compat.swift.base import MultiTurnScheduler, RolloutScheduler
from polyturn.core.plugin_class import CallShape, Shape, check_class

_BASES = (RolloutScheduler, MultiTurnScheduler)
_CALLS = {
    "step": CallShape(num=3, write="def step(self, infer_request, response_choice, current_turn)"),
    "check_finished": CallShape(num=3, write="def check_finished(self, infer_request, response_choice, current_turn)"),
    "run": CallShape(num=2, write="async def run(self, infer_request, request_config, **kwargs)"),
}
SINGLE_TURN = Shape(what="a scheduler of ms-swift", needs=(), bases=_BASES, calls=_CALLS)
"""A scheduler of one turn is whole as its base class has it."""
MULTI_TURN = Shape(what="a multi-turn scheduler of ms-swift", needs=(("step", "run"),), bases=_BASES, calls=_CALLS)


def check_scheduler(cls: type, *, where: str) -> None:
    """Refuse a scheduler's class that leaves its turns to the base class, or misspells a method.

    Raises:
        ConfigError: the first problem found.
    """
    check_class(cls, MULTI_TURN if issubclass(cls, MultiTurnScheduler) else SINGLE_TURN, where=where)
