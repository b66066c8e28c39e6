"""Task: a dataset row made typed. The one shape that rollout reads; every row format ends here.

Task(id="train-7", data_source="openai/gsm8k", prompt=(Message(role="user", content="…"),), ground_truth="72",
     interaction=InteractionRef(name="gsm8k", kwargs={"name": "gsm8k", "ground_truth": "72"}))
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from polyturn.core.messages import Message


@dataclass(frozen=True, slots=True, kw_only=True)
class InteractionRef:
    """Which interaction a task talks to, and what the interaction is told about the task."""

    name: str
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Passed to `start_interaction` and to every `generate_response`; holds every key of the row, `name` included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolKwargs:
    """What a row tells one tool at each point of the tool's life in the episode."""

    create_kwargs: Mapping[str, Any] = field(default_factory=dict)
    execute_kwargs: Mapping[str, Any] = field(default_factory=dict)
    calc_reward_kwargs: Mapping[str, Any] = field(default_factory=dict)
    release_kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One task: a prompt, and what is needed to act on it and to judge the outcome."""

    id: str
    prompt: tuple[Message, ...]
    data_source: str | None = None
    """Routes the task to its reward function; None leaves the reward to the task's interaction."""
    ground_truth: Any = None
    tools: tuple[str, ...] | None = None
    """Names of the tools this task may call; None means every configured tool, () means none."""
    tools_kwargs: Mapping[str, ToolKwargs] = field(default_factory=dict)
    interaction: InteractionRef | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    """The rest of the row, for reward functions and for the records."""
