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
training samples of exact tokens, and the samples become one optimizer step. help(polyturn.train) lists the arguments;
`polyturn --help` is the command line. The names load on first use: the import loads neither torch nor transformers.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from difflib import get_close_matches
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
        "ViewInteraction": "polyturn.interactions.base",
        "ConversationView": "polyturn.interactions.base",
        "SpeakOptions": "polyturn.interactions.base",
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
        "Toolbox": "polyturn.tools.toolbox",
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
"""The public names and where each is defined, by task; `rollout` is a package that can be called."""

_WHERE = {name: module for names in BY_TASK.values() for name, module in names.items()}
__doc__ += "\n" + "\n".join(f"{task}:\n    {', '.join(names)}" for task, names in BY_TASK.items()) + "\n"
__all__ = ["evaluate", "rollout", "steps", "tiny", "tool", "train"]
"""The functions that `from polyturn import *` brings and help(polyturn) shows whole. All of `BY_TASK` is public."""

if TYPE_CHECKING:  # each with an alias of its own name, which says to type checkers that it is public
    from polyturn.algorithms.advantages import (
        BatchAdvantages as BatchAdvantages,
        GroupView as GroupView,
        MemberView as MemberView,
        advantages as advantages,
        assign_advantages as assign_advantages,
        declare as declare,
        grpo as grpo,
    )
    from polyturn.algorithms.losses import TokenLoss as TokenLoss, marks as marks, policy_losses as policy_losses
    from polyturn.api.front import evaluate as evaluate, steps as steps, train as train
    from polyturn.api.run import Run as Run
    from polyturn.batching.filters import filter_groups as filter_groups
    from polyturn.batching.samples import to_samples as to_samples
    from polyturn.core.errors import (
        CheckpointError as CheckpointError,
        ConfigError as ConfigError,
        DataError as DataError,
        EngineError as EngineError,
        InteractionError as InteractionError,
        PolyturnError as PolyturnError,
        RewardError as RewardError,
        RolloutError as RolloutError,
        SchedulerError as SchedulerError,
        TemplateError as TemplateError,
        ToolConnectionError as ToolConnectionError,
        ToolError as ToolError,
        ToolTimeoutError as ToolTimeoutError,
        ToolUnavailableError as ToolUnavailableError,
        TrainingError as TrainingError,
    )
    from polyturn.core.generation import (
        Completion as Completion,
        GenerateRequest as GenerateRequest,
        SamplingParams as SamplingParams,
    )
    from polyturn.core.lifecycle import StopReason as StopReason
    from polyturn.core.messages import Message as Message, ToolCall as ToolCall
    from polyturn.core.reward import Reward as Reward
    from polyturn.core.sample import TrainSample as TrainSample
    from polyturn.core.task import InteractionRef as InteractionRef, Task as Task
    from polyturn.core.trajectory import (
        Segment as Segment,
        Span as Span,
        Trajectory as Trajectory,
        TrajectoryGroup as TrajectoryGroup,
        Turn as Turn,
    )
    from polyturn.data.conversations import Conversation as Conversation
    from polyturn.data.dataset import TaskDataset as TaskDataset
    from polyturn.data.sampler import Curriculum as Curriculum
    from polyturn.engines.embedded import EmbeddedEngine as EmbeddedEngine
    from polyturn.environments.base import Adapter as Adapter
    from polyturn.interactions.base import (
        BaseInteraction as BaseInteraction,
        ConversationView as ConversationView,
        SpeakOptions as SpeakOptions,
        ViewInteraction as ViewInteraction,
    )
    from polyturn.rewards.router import RewardRouter as RewardRouter
    from polyturn.rollout.context import RolloutContext as RolloutContext
    from polyturn.rollout.episode import Episode as Episode
    from polyturn.rollout.limits import Limits as Limits
    from polyturn.rollout.open_turn import OpenTurn as OpenTurn, Reply as Reply
    from polyturn.rollout.pool import GroupSpec as GroupSpec, RolloutPool as RolloutPool
    from polyturn.rollout.scheduler import MultiTurnScheduler as MultiTurnScheduler
    from polyturn.testing.published import tiny as tiny
    from polyturn.tokens.codec import Codec as Codec
    from polyturn.tokens.parsers import PlainParser as PlainParser
    from polyturn.tokens.train import train_tokenizer as train_tokenizer
    from polyturn.tools.base import BaseTool as BaseTool
    from polyturn.tools.toolbox import Toolbox as Toolbox
    from polyturn.tools.function import FromTask as FromTask, tool as tool
    from polyturn.tools.schema import ToolResponse as ToolResponse
    from polyturn.tracking.base import RunTracker as RunTracker
    from polyturn.training.hf import build_model as build_model
    from polyturn.training.options import OptimSettings as OptimSettings, SftOptions as SftOptions
    from polyturn.training.policy import local_policy as local_policy
    from polyturn.training.sft import encode_conversation as encode_conversation, run_sft as run_sft


def __getattr__(name: str) -> Any:
    if name == "rollout":
        return importlib.import_module("polyturn.rollout")  # the package, which can be called
    if name not in _WHERE:
        near = "".join(f"; did you mean {known!r}?" for known in get_close_matches(name, _WHERE, n=1))
        raise AttributeError(f"module 'polyturn' has no attribute {name!r}{near}")
    return getattr(importlib.import_module(_WHERE[name]), name)


def __dir__() -> list[str]:
    return sorted(["__version__", *_WHERE])
