"""The section `rollout`: episodes, with sampling, limits, parsing and encoding.

    rollout: {sampling: {temperature: 1.0}, limits: {max_turns: 4}, tools: {functions: [tools.py]}}

`evaluation.sets` have their own `sampling`; all other keys also apply to evaluation.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from polyturn.config.parts import BY_NAME, Section
from polyturn.core.generation import Sampling
from polyturn.infra.live import NameOrObject
from polyturn.rollout.limits import Limits
from polyturn.tokens.options import ParserOptions
from polyturn.tools.options import ToolsOptions

LIMITS = Limits(timeout_s=7200.0)
"""Default limits. The time is enough for 8 turns in which every call takes its whole deadline."""


class RolloutConfig(Section):
    """Episodes: their sampling, scheduler, limits and text."""

    sampling: Sampling = Sampling()
    limits: Limits = LIMITS
    tools: ToolsOptions = ToolsOptions()
    interactions: str | list[dict[str, Any]] | None = None
    """A YAML file with an `interaction` list, or the list."""
    interaction_timeout_s: float = Field(60.0, gt=0)
    """Deadline of an interaction's answer, in seconds; a later answer fails the trajectory."""
    parser: Annotated[ParserOptions, BY_NAME] = ParserOptions()
    scheduler: NameOrObject | None = None
    """A built-in scheduler, or `file.py:Class` of a MultiTurnScheduler; the default runs tool calls first, otherwise the
    interaction answers."""
    scheduler_kwargs: dict[str, Any] = {}
    """Arguments of the scheduler's class."""
    scheduler_timeout_s: float = Field(60.0, gt=0)
    """Deadline of each method of the scheduler or environment, in seconds. For a synchronous method, which runs in a thread,
    it covers the whole call; for an async method, each stretch between two calls of its episode."""
    watchdog_s: float | None = Field(1.0, gt=0)
    """Seconds for which an async plug-in may block the event loop before a warning names it; null never warns."""
    use_inference_chat_template: bool = False
    """Sample each turn from the history as rendered by the chat template, which may leave out the reasoning of earlier
    turns. A history that changes this way becomes several segments. False keeps all tokens of the model."""
    max_concurrent: int = Field(256, ge=1)
    """Largest number of live episodes; rollout workers run equal shares."""
    min_concurrent: int | None = Field(None, ge=1)
    """Smallest number of live episodes: the number adapts to the engine's queue and KV cache up to max_concurrent; null
    keeps it at max_concurrent."""
    max_failed_share: float = Field(0.1, ge=0, le=1)
    """Largest share of failed trajectories among the latest 1,024; a larger share ends the run with the reasons."""
    tokenization_sanity_check_mode: Literal["strict", "ignore_strippable", "disable", "off"] = "strict"
    """Which differences between incremental and full encoding count: all, all except white space at edges, or none."""
    sanity_every: int = Field(16, ge=0)
    """Compare incremental token ids with a full render in every n-th episode; 0 never, 1 always."""
    escape_prompts: Literal["delimiters", "all", "none"] = "delimiters"
    """Which control tokens in the text of a task's prompt are encoded as ordinary text. delimiters: those that open and
    close turns, roles and media. all: all, including <think>. none: none."""
    escape_observations: bool = True
    """Encode tool results, tool calls and user replies as ordinary text even if they contain the text of control tokens.
    False lets an environment write control tokens."""

    @model_validator(mode="after")
    def _check_bounds(self) -> Self:
        if self.min_concurrent is not None and self.min_concurrent > self.max_concurrent:
            raise ValueError(f"min_concurrent is {self.min_concurrent}, above max_concurrent {self.max_concurrent}")
        return self
