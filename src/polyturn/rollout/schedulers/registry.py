"""The registry of schedulers: `rollout.scheduler: math_tips` names one of these, an entry point, or a class in a file."""

from __future__ import annotations

from typing import Any

from polyturn.core.registry import Registry
from polyturn.rollout.scheduler import MultiTurnScheduler

schedulers: Registry[Any] = Registry("schedulers")
"""Classes of schedulers, made with `rollout.scheduler_kwargs`."""

schedulers.register("default")(MultiTurnScheduler)
