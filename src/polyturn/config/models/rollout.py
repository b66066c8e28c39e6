"""The section `rollout`: episodes, from sampling and limits to the reading and encoding of text.

    rollout: {sampling: {temperature: 1.0}, limits: {max_turns: 4}, tools: {functions: [tools.py]}}

`evaluation.sets` decode with a `sampling` of their own; the rest holds in evaluation too.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from polyturn.config.parts import BY_NAME, Section
from polyturn.core.generation import Sampling
from polyturn.core.live import NameOrObject
from polyturn.rollout.limits import Limits
from polyturn.tokens.options import ParserOptions
from polyturn.tools.options import ToolsOptions

LIMITS = Limits(timeout_s=7200.0)
"""Those of a run that sets none: more time than 8 turns take of which every call is as slow as its own deadline allows."""


class RolloutConfig(Section):
    """Episodes: their sampling, scheduler, limits and text."""

    sampling: Sampling = Sampling()
    limits: Limits = LIMITS
    tools: ToolsOptions = ToolsOptions()
    interactions: str | list[dict[str, Any]] | None = None
    """YAML file with an `interaction` list, or that list."""
    interaction_timeout_s: float = Field(60.0, gt=0)
    """Seconds of one answer of an interaction; beyond, the trajectory fails."""
    parser: Annotated[ParserOptions, BY_NAME] = ParserOptions()
    scheduler: NameOrObject | None = None
    """A name of a shipped scheduler, or `file.py:Class` of a MultiTurnScheduler; the default answers tool calls first, else
    asks the interaction."""
    scheduler_kwargs: dict[str, Any] = {}
    """Arguments of the scheduler's class."""
    scheduler_timeout_s: float = Field(60.0, gt=0)
    """Deadline of each method of the scheduler or environment: of a plain one, which runs in a thread, for all of it; of an
    async one for each stretch between what it asks of its episode."""
    watchdog_s: float | None = Field(1.0, gt=0)
    """Seconds that an async plug-in may hold the event loop before the log names it; null says nothing."""
    use_inference_chat_template: bool = False
    """Sample each turn from the whole history as the chat template renders it, without the reasoning of earlier turns if the
    template leaves it out; a history that this changes becomes several segments. False keeps all the model wrote."""
    max_concurrent: int = Field(256, ge=1)
    """Live episodes at any moment; rollout workers run equal shares of them."""
    min_concurrent: int | None = Field(None, ge=1)
    """Lets the number of live episodes follow the engine's queue and KV cache between this and max_concurrent; null keeps it
    at max_concurrent."""
    max_failed_share: float = Field(0.1, ge=0, le=1)
    """The run ends with the reasons when more than this share of the latest 1,024 trajectories failed."""
    tokenization_sanity_check_mode: Literal["strict", "ignore_strippable", "disable", "off"] = "strict"
    """Which differences from rendering it all again count: all, all but white space at edges, or none."""
    sanity_every: int = Field(16, ge=0)
    """Every how many episodes the incremental token ids are compared with a full render; 0 never, 1 always."""
    escape_prompts: Literal["delimiters", "all", "none"] = "delimiters"
    """Which control tokens that a task's prompt spells are encoded as ordinary text: those that open and close turns, roles
    and media; all of them, <think> included; none."""
    escape_observations: bool = True
    """Encode tool results, tool calls and user replies as ordinary text, also where they spell control tokens. False lets
    an environment speak in control tokens."""

    @model_validator(mode="after")
    def _check_bounds(self) -> Self:
        if self.min_concurrent is not None and self.min_concurrent > self.max_concurrent:
            raise ValueError(f"min_concurrent is {self.min_concurrent}, above max_concurrent {self.max_concurrent}")
        return self
