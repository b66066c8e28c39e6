"""The registry of schedulers: `rollout.scheduler: math_tips` names one of these, an entry point, or a class in a file."""

from __future__ import annotations

from typing import Any

from polyturn.core.plugin_shape import CallShape, Shape
from polyturn.core.plugins import Registry
from polyturn.rollout.scheduler import MultiTurnScheduler

schedulers: Registry[Any] = Registry("schedulers")
"""Classes of schedulers, made with `rollout.scheduler_kwargs`."""

schedulers.register("default")(MultiTurnScheduler)

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
"""The methods of a scheduler's class."""
