"""polyturn: multi-turn reinforcement learning for language-model agents.

    import polyturn

    def price(item: str) -> str:
        \"\"\"Look up what an item costs.

        Args:
            item: Its name.
        \"\"\"
        return PRICES[item]

    run = polyturn.train(
        model="Qwen/Qwen3-0.6B",
        tasks=[{"prompt": "What does a lamp cost?", "ground_truth": "17"}, ...],
        tools=[price],
        reward=lambda trajectory: float(trajectory.task.ground_truth in trajectory.turns[-1].message.text),
        steps=100,
    )
    run.metrics, run.trajectories, run.model()

A task becomes trajectories (the model speaks, a tool or a simulated user answers, again and again), each trajectory becomes
training samples of exact tokens, and the samples become one optimizer step. help(polyturn.train) says what it takes;
`polyturn --help` is the command line. The names load on first use: the import brings in neither torch nor transformers.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

BY_TASK: Mapping[str, Mapping[str, str]] = {
    "Train, evaluate, roll out": {
        "train": "polyturn.api.front",
        "evaluate": "polyturn.api.front",
        "rollout": "polyturn.rollout",
        "steps": "polyturn.api.front",
        "Run": "polyturn.api.run",
        "tiny": "polyturn.testing.published",
    },
    "Write a tool": {
        "tool": "polyturn.tools.function",
        "FromTask": "polyturn.tools.function",
        "BaseTool": "polyturn.tools.base",
        "ToolResponse": "polyturn.tools.schema",
        "ToolError": "polyturn.core.errors",
        "ToolConnectionError": "polyturn.core.errors",
        "ToolTimeoutError": "polyturn.core.errors",
        "ToolUnavailableError": "polyturn.core.errors",
    },
    "Write an interaction": {
        "BaseInteraction": "polyturn.interactions.base",
        "SceneInteraction": "polyturn.interactions.base",
        "ConversationView": "polyturn.interactions.context",
        "VoiceOptions": "polyturn.interactions.context",
    },
    "Write a scheduler or an environment": {
        "MultiTurnScheduler": "polyturn.rollout.scheduler",
        "Episode": "polyturn.rollout.episode",
        "OpenTurn": "polyturn.rollout.open_turn",
        "Reply": "polyturn.rollout.open_turn",
        "StopReason": "polyturn.core.lifecycle",
        "Adapter": "polyturn.environments.base",
    },
    "Give tasks": {
        "Task": "polyturn.core.task",
        "InteractionRef": "polyturn.core.task",
        "Message": "polyturn.core.messages",
        "ToolCall": "polyturn.core.messages",
        "TaskDataset": "polyturn.data.dataset",
        "Curriculum": "polyturn.data.sampler",
        "Conversation": "polyturn.data.conversations",
    },
    "Write a reward, an advantage estimator or a loss": {
        "Reward": "polyturn.core.reward",
        "declare": "polyturn.algorithms.advantages",
        "advantages": "polyturn.algorithms.advantages",
        "grpo": "polyturn.algorithms.advantages",
        "GroupView": "polyturn.algorithms.advantages",
        "MemberView": "polyturn.algorithms.advantages",
        "BatchAdvantages": "polyturn.algorithms.advantages",
        "marks": "polyturn.algorithms.losses",
        "policy_losses": "polyturn.algorithms.losses",
        "TokenLoss": "polyturn.algorithms.losses",
    },
    "Read what happened": {
        "Trajectory": "polyturn.core.trajectory",
        "TrajectoryGroup": "polyturn.core.trajectory",
        "Turn": "polyturn.core.trajectory",
        "Segment": "polyturn.core.trajectory",
        "Span": "polyturn.core.trajectory",
        "TrainSample": "polyturn.core.sample",
    },
    "Build a loop of your own": {
        "RolloutPool": "polyturn.rollout.pool",
        "RolloutContext": "polyturn.rollout.context",
        "GroupSpec": "polyturn.rollout.pool",
        "Limits": "polyturn.rollout.limits",
        "ToolBox": "polyturn.tools.executor",
        "RewardRouter": "polyturn.rewards.router",
        "EmbeddedEngine": "polyturn.engines.embedded",
        "Codec": "polyturn.tokens.codec",
        "PlainParser": "polyturn.tokens.parsers",
        "train_tokenizer": "polyturn.tokens.train",
        "build_model": "polyturn.training.hf",
        "encode_conversation": "polyturn.training.sft",
        "run_sft": "polyturn.training.sft",
        "SftOptions": "polyturn.training.options",
        "filter_groups": "polyturn.batching.filters",
        "to_samples": "polyturn.batching.samples",
        "assign_advantages": "polyturn.algorithms.advantages",
        "local_policy": "polyturn.training.policy",
        "OptimSettings": "polyturn.training.options",
        "SamplingParams": "polyturn.core.generation",
        "GenerateRequest": "polyturn.core.generation",
        "Completion": "polyturn.core.generation",
        "RunTracker": "polyturn.tracking.base",
    },
    "Catch an error": {
        "PolyturnError": "polyturn.core.errors",
        "ConfigError": "polyturn.core.errors",
        "DataError": "polyturn.core.errors",
        "TemplateError": "polyturn.core.errors",
        "EngineError": "polyturn.core.errors",
        "InteractionError": "polyturn.core.errors",
        "SchedulerError": "polyturn.core.errors",
        "RewardError": "polyturn.core.errors",
        "RolloutError": "polyturn.core.errors",
        "TrainingError": "polyturn.core.errors",
        "CheckpointError": "polyturn.core.errors",
    },
}
"""The public names and where each is defined, by what somebody wants to do; `rollout` is a package that can be called."""

_WHERE = {name: module for names in BY_TASK.values() for name, module in names.items()}
__doc__ += "\n" + "\n".join(f"{task}:\n    {', '.join(names)}" for task, names in BY_TASK.items()) + "\n"
__all__ = ["__version__", *_WHERE]

if TYPE_CHECKING:
    from polyturn.algorithms.advantages import (
        BatchAdvantages,
        GroupView,
        MemberView,
        advantages,
        assign_advantages,
        declare,
        grpo,
    )
    from polyturn.algorithms.losses import TokenLoss, marks, policy_losses
    from polyturn.api.front import evaluate, steps, train
    from polyturn.api.run import Run
    from polyturn.batching.filters import filter_groups
    from polyturn.batching.samples import to_samples
    from polyturn.core.errors import (
        CheckpointError,
        ConfigError,
        DataError,
        EngineError,
        InteractionError,
        PolyturnError,
        RewardError,
        RolloutError,
        SchedulerError,
        TemplateError,
        ToolConnectionError,
        ToolError,
        ToolTimeoutError,
        ToolUnavailableError,
        TrainingError,
    )
    from polyturn.core.generation import Completion, GenerateRequest, SamplingParams
    from polyturn.core.lifecycle import StopReason
    from polyturn.core.messages import Message, ToolCall
    from polyturn.core.reward import Reward
    from polyturn.core.sample import TrainSample
    from polyturn.core.task import InteractionRef, Task
    from polyturn.core.trajectory import Segment, Span, Trajectory, TrajectoryGroup, Turn
    from polyturn.data.conversations import Conversation
    from polyturn.data.dataset import TaskDataset
    from polyturn.data.sampler import Curriculum
    from polyturn.engines.embedded import EmbeddedEngine
    from polyturn.environments.base import Adapter
    from polyturn.interactions.base import BaseInteraction, SceneInteraction
    from polyturn.interactions.context import ConversationView, VoiceOptions
    from polyturn.rewards.router import RewardRouter
    from polyturn.rollout.context import RolloutContext
    from polyturn.rollout.episode import Episode
    from polyturn.rollout.limits import Limits
    from polyturn.rollout.open_turn import OpenTurn, Reply
    from polyturn.rollout.pool import GroupSpec, RolloutPool
    from polyturn.rollout.scheduler import MultiTurnScheduler
    from polyturn.testing.published import tiny
    from polyturn.tokens.codec import Codec
    from polyturn.tokens.parsers import PlainParser
    from polyturn.tokens.train import train_tokenizer
    from polyturn.tools.base import BaseTool
    from polyturn.tools.executor import ToolBox
    from polyturn.tools.function import FromTask, tool
    from polyturn.tools.schema import ToolResponse
    from polyturn.tracking.base import RunTracker
    from polyturn.training.hf import build_model
    from polyturn.training.options import OptimSettings, SftOptions
    from polyturn.training.policy import local_policy
    from polyturn.training.sft import encode_conversation, run_sft


def __getattr__(name: str) -> Any:
    if name == "rollout":
        return importlib.import_module("polyturn.rollout")  # the package, which can be called
    if name not in _WHERE:
        raise AttributeError(f"module 'polyturn' has no attribute {name!r}")
    return getattr(importlib.import_module(_WHERE[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
