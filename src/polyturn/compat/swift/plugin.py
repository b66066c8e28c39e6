"""swift.plugin of the 3.x releases: every registry that a plug-in file writes to, in one place."""

from __future__ import annotations

from polyturn.compat.swift.gym_env import ContextManager, Env, context_managers, envs
from polyturn.compat.swift.loss_scale import LossScale, loss_scale_map
from polyturn.compat.swift.multi_turn import (
    GYMScheduler,
    MathTipsScheduler,
    MultiTurnScheduler,
    OpenEnvScheduler,
    RolloutScheduler,
    ThinkingModelTipsScheduler,
    multi_turns,
)
from polyturn.compat.swift.orm import ORM, PRM, AsyncORM, orms, prms
from polyturn.compat.swift.rm_plugin import DefaultRMPlugin, GenRMPlugin, rm_plugins

__all__ = [
    "ORM",
    "PRM",
    "AsyncORM",
    "ContextManager",
    "DefaultRMPlugin",
    "Env",
    "GYMScheduler",
    "GenRMPlugin",
    "LossScale",
    "MathTipsScheduler",
    "MultiTurnScheduler",
    "OpenEnvScheduler",
    "RolloutScheduler",
    "ThinkingModelTipsScheduler",
    "context_managers",
    "envs",
    "loss_scale_map",
    "multi_turns",
    "orms",
    "prms",
    "rm_plugins",
]
