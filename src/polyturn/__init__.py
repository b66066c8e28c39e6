"""polyturn: multi-turn reinforcement learning for language-model agents.

The public names load on first use, so that `import polyturn` is quick and brings in neither torch nor transformers.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_WHERE = {
    "Message": "polyturn.core.messages",
    "ToolCall": "polyturn.core.messages",
    "Task": "polyturn.core.task",
    "InteractionRef": "polyturn.core.task",
    "SamplingParams": "polyturn.core.generation",
    "GenerateRequest": "polyturn.core.generation",
    "Completion": "polyturn.core.generation",
    "Span": "polyturn.core.trajectory",
    "Segment": "polyturn.core.trajectory",
    "Turn": "polyturn.core.trajectory",
    "Trajectory": "polyturn.core.trajectory",
    "TrajectoryGroup": "polyturn.core.trajectory",
    "Reward": "polyturn.core.reward",
    "TrainSample": "polyturn.core.sample",
    "PolyturnError": "polyturn.core.errors",
    "ToolError": "polyturn.core.errors",
    "ToolConnectionError": "polyturn.core.errors",
    "ToolTimeoutError": "polyturn.core.errors",
    "ToolUnavailableError": "polyturn.core.errors",
    "BaseInteraction": "polyturn.interactions.base",
    "BaseTool": "polyturn.tools.base",
    "tool": "polyturn.tools.function",
    "FromTask": "polyturn.tools.function",
    "ToolResponse": "polyturn.tools.schema",
    "MultiTurnScheduler": "polyturn.rollout.scheduler",
    "Reply": "polyturn.rollout.scheduler",
    "Episode": "polyturn.rollout.episode",
    "open_store": "polyturn.store.stored_run",
}

__all__ = ["__version__", *_WHERE]

if TYPE_CHECKING:
    from polyturn.core.errors import PolyturnError, ToolConnectionError, ToolError, ToolTimeoutError, ToolUnavailableError
    from polyturn.core.generation import Completion, GenerateRequest, SamplingParams
    from polyturn.core.messages import Message, ToolCall
    from polyturn.core.reward import Reward
    from polyturn.core.sample import TrainSample
    from polyturn.core.task import InteractionRef, Task
    from polyturn.core.trajectory import Segment, Span, Trajectory, TrajectoryGroup, Turn
    from polyturn.interactions.base import BaseInteraction
    from polyturn.rollout.episode import Episode
    from polyturn.rollout.scheduler import MultiTurnScheduler, Reply
    from polyturn.store.stored_run import open_store
    from polyturn.tools.base import BaseTool
    from polyturn.tools.function import FromTask, tool
    from polyturn.tools.schema import ToolResponse


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'polyturn' has no attribute {name!r}")
    return getattr(importlib.import_module(_WHERE[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
