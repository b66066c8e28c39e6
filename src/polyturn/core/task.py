"""Task: a typed dataset row. Every row format is converted to this type, the only one that rollout reads.

Task(id="train-7", data_source="openai/gsm8k", prompt=(Message(role="user", content="…"),), ground_truth="72",
     interaction=InteractionRef(name="gsm8k", kwargs={"name": "gsm8k", "ground_truth": "72"}))
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from polyturn.core.errors import DataError, did_you_mean
from polyturn.core.messages import Message, Origin

NATIVE_AGENTS = ("single_turn_agent", "tool_agent")
"""Values of a row's `agent_name` that select the native loop: a single turn without tools or interaction, or many turns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InteractionRef:
    """The interaction of a task, and its arguments from the row."""

    name: str
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Passed to `start_interaction` and to every `generate_response`: all of the row's keys, including `name`."""
    is_optional: bool = False
    """Whether a run that configures no interaction may ignore this one, for rows that serve several kinds of run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolKwargs:
    """The arguments of a row for each method of one tool."""

    create_kwargs: Mapping[str, Any] = field(default_factory=dict)
    execute_kwargs: Mapping[str, Any] = field(default_factory=dict)
    calc_reward_kwargs: Mapping[str, Any] = field(default_factory=dict)
    release_kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One task: a prompt, with the tools, the interaction and the data that its reward needs."""

    id: str
    prompt: tuple[Message, ...]
    data_source: str | None = None
    """The key by which the task's reward function is chosen; None leaves the reward to the task's interaction."""
    ground_truth: Any = None
    tools: tuple[str, ...] | None = None
    """Names of the tools that this task may call; None means every configured tool, () means no tool."""
    skips_unknown_tools: bool = False
    """Whether an unconfigured name in `tools` is skipped with a warning instead of being an error."""
    needs_tools: bool = False
    """Whether a task that is left without any tool is an error."""
    tools_kwargs: Mapping[str, ToolKwargs] = field(default_factory=dict)
    interaction: InteractionRef | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    """The rest of the row, for reward functions and for the records."""

    def __post_init__(self) -> None:
        if any(m.origin is None for m in self.prompt):
            object.__setattr__(self, "prompt", as_rows(self.prompt))


def as_rows(messages: Iterable[Message]) -> tuple[Message, ...]:
    """Set the origin of a row's messages that have none: the environment for tool messages, the owner for all others."""
    return tuple(
        m if m.origin is not None else replace(m, origin=Origin.ENVIRONMENT if m.role == "tool" else Origin.OWNER)
        for m in messages
    )


class ToolChoice(NamedTuple):
    """The configured tools that a task may call."""

    names: tuple[str, ...]
    skipped: tuple[str, ...]
    """Names that the task lists but that are not configured."""


def select_tools(task: Task, configured: Collection[str]) -> ToolChoice:
    """Choose the configured tools that a task may call, in the order of `task.tools`; all of them if `task.tools` is None.

    Raises:
        DataError: the task names an unconfigured tool and does not skip it, or needs tools and has none.
    """
    tool_names = tuple(configured if task.tools is None else dict.fromkeys(task.tools))
    skipped = tuple(name for name in tool_names if name not in configured)
    hint = did_you_mean(skipped[0], configured) if skipped and configured else ""
    if skipped and not task.skips_unknown_tools:
        raise DataError(f"the tool {skipped[0]!r} is not configured.{hint or ' No tool is configured.'}")
    names = tuple(name for name in tool_names if name in configured)
    if task.needs_tools and not names:
        raise DataError(
            f"the row needs tools (need_tools_kwargs) and names {list(tool_names)}, but the configured tools "
            f"are {sorted(configured)}; configure the row's tools in rollout.tools.file or rollout.tools.functions.{hint}"
        )
    return ToolChoice(names, skipped)
