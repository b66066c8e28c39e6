"""swift.rewards: reward functions, and the plug-ins of reward models, which are kept so that files defining one load."""

from __future__ import annotations

from polyturn.compat.swift.base import MultiTurnScheduler, multi_turns
from polyturn.compat.swift.orm import ORM, PRM, AsyncORM, MathAccuracy, orms, prms
from polyturn.compat.swift.rm_plugin import DefaultRMPlugin, GenRMPlugin, rm_plugins

__all__ = [
    "ORM",
    "PRM",
    "AsyncORM",
    "DefaultRMPlugin",
    "GenRMPlugin",
    "MathAccuracy",
    "MultiTurnScheduler",
    "multi_turns",
    "orms",
    "prms",
    "rm_plugins",
]
