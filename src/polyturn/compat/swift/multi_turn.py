"""swift.rollout.multi_turn, and swift.plugin.multi_turn of earlier releases: the names that user code imports from there."""

from __future__ import annotations

from polyturn.compat.swift.base import MultiTurnScheduler, RolloutScheduler, extract_logprobs_from_choice, multi_turns
from polyturn.compat.swift.gym_env import ContextManager, DummyContextManager, Env, context_managers, envs
from polyturn.compat.swift.openenv_wrapper import OpenEnvWrapper
from polyturn.compat.swift.schedulers import (
    GYMScheduler,
    MathTipsScheduler,
    OpenEnvScheduler,
    ThinkingModelTipsScheduler,
)
from polyturn.serving.protocol import (
    ChatCompletionResponse,
    ChatCompletionResponseChoice,
    ChatMessage,
    Messages,
    RequestConfig,
    RolloutInferRequest,
    RolloutOutput,
)

__all__ = [
    "ChatCompletionResponse",
    "ChatCompletionResponseChoice",
    "ChatMessage",
    "ContextManager",
    "DummyContextManager",
    "Env",
    "GYMScheduler",
    "MathTipsScheduler",
    "Messages",
    "MultiTurnScheduler",
    "OpenEnvScheduler",
    "OpenEnvWrapper",
    "RequestConfig",
    "RolloutInferRequest",
    "RolloutOutput",
    "RolloutScheduler",
    "ThinkingModelTipsScheduler",
    "context_managers",
    "envs",
    "extract_logprobs_from_choice",
    "multi_turns",
]
