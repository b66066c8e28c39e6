"""Task: a dataset row made typed. The one shape that rollout reads; every row format ends here.

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
"""Values of a row's `agent_name` that stand for the native loop: one turn without tools or an interaction, and as many as it
takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InteractionRef:
    """The interaction of a task, and its arguments from the row."""

    name: str
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Passed to `start_interaction` and to every `generate_response`; holds every key of the row, `name` included."""
    is_optional: bool = False
    """Whether a run that configures no interaction at all may ignore it, as rows made for several kinds of run want."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolKwargs:
    """A row's arguments for one tool, at each point of the tool's life in the episode."""

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
    skips_unknown_tools: bool = False
    """Whether a name in `tools` that is not configured is left out, with a warning, instead of being an error."""
    needs_tools: bool = False
    """Whether the task is an error when no tool remains for it."""
    tools_kwargs: Mapping[str, ToolKwargs] = field(default_factory=dict)
    interaction: InteractionRef | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    """The rest of the row, for reward functions and for the records."""

    def __post_init__(self) -> None:
        if any(m.origin is None for m in self.prompt):
            object.__setattr__(self, "prompt", as_rows(self.prompt))


def as_rows(messages: Iterable[Message]) -> tuple[Message, ...]:
    """Return messages of a row: the owner's, but for what a tool says there."""
    return tuple(
        m if m.origin is not None else replace(m, origin=Origin.ENVIRONMENT if m.role == "tool" else Origin.OWNER)
        for m in messages
    )


class ToolChoice(NamedTuple):
    """Which of the configured tools a task may call."""

    names: tuple[str, ...]
    skipped: tuple[str, ...]
    """Names that are not configured and that the task does without."""


def select_tools(task: Task, configured: Collection[str]) -> ToolChoice:
    """Return which of the configured tools a task may call, in the order that it names them, else in theirs.

    Raises:
        DataError: it names a tool that is not configured and that it does not skip, or it needs tools and has none.
    """
    tool_names = tuple(configured if task.tools is None else dict.fromkeys(task.tools))
    skipped = tuple(name for name in tool_names if name not in configured)
    hint = did_you_mean(skipped[0], configured) if skipped and configured else ""
    if skipped and not task.skips_unknown_tools:
        raise DataError(f"the tool {skipped[0]!r} is not configured.{hint or ' No tool is configured.'}")
    names = tuple(name for name in tool_names if name in configured)
    if task.needs_tools and not names:
        raise DataError(
            f"it needs tools (need_tools_kwargs) and has none: it names {list(tool_names)} and configured are "
            f"{sorted(configured)}; configure its tools (rollout.tools.file, rollout.tools.functions).{hint}"
        )
    return ToolChoice(names, skipped)
