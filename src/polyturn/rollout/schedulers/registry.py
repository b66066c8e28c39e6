"""The registry of schedulers: `rollout.scheduler` names a registered one, an entry point, or a class in a file."""

from __future__ import annotations

from typing import Any

from polyturn.core.errors import UnknownNameError
from polyturn.infra.plugin_shape import CallShape, Shape
from polyturn.infra.plugins import Registry
from polyturn.rollout.scheduler import MultiTurnScheduler

schedulers: Registry[Any] = Registry("schedulers")
"""Scheduler classes, instantiated with `rollout.scheduler_kwargs`."""

schedulers.register("default")(MultiTurnScheduler)

MOVED = {
    "image_tools": "image_tools.py:ImageTools",
    "lookahead": "lookahead.py:Lookahead",
    "math_tips": "math_tips.py:MathTips",
    "react": "react.py:React",
    "thinking_tips": "thinking_tips.py:ThinkingTips",
    "tree": "tree.py:Tree, and reward.function to schedulers/tree.py:score_tree",
}
"""Names of formerly built-in schedulers, and the values to set instead."""


def refuse_moved(name: str) -> None:
    """Refuse the name of a formerly built-in scheduler, and point to the example that replaces it.

    Raises:
        UnknownNameError: `name` is one of `MOVED`.
    """
    if name in MOVED:
        raise UnknownNameError(
            f"rollout.scheduler is {name!r}, which is an example now: copy the folder examples/schedulers of polyturn's "
            f"repository beside your configuration, and set rollout.scheduler to schedulers/{MOVED[name]}"
        )


_STEPS = ("step", "run", "check_finished", "on_turn_end", "on_trajectory_start", "on_trajectory_end", "settle", "check_task")
SCHEDULER = Shape(
    what="a scheduler",
    needs=(_STEPS,),
    bases=(MultiTurnScheduler,),
    may_be_empty=True,
    calls={
        "step": CallShape(num=2, write="async def step(self, episode, turn)"),
        "run": CallShape(num=1, write="async def run(self, episode)"),
        "check_finished": CallShape(num=2, write="def check_finished(self, episode, turn)"),
        "on_turn_end": CallShape(num=2, write="async def on_turn_end(self, episode, turn)"),
        "on_trajectory_start": CallShape(num=1, write="async def on_trajectory_start(self, episode)"),
        "on_trajectory_end": CallShape(num=1, write="async def on_trajectory_end(self, episode)"),
        "show_tools": CallShape(num=1, write="def show_tools(self, episode)"),
        "check_task": CallShape(num=1, write="def check_task(self, task)"),
        "snapshot": CallShape(num=1, write="async def snapshot(self, episode)"),
        "restore": CallShape(num=2, write="async def restore(self, episode, state)"),
    },
)
"""The methods that a scheduler class may define, and their signatures."""
