"""What can be chosen about training: the optimizer, the critic, the adapter, the supervised start.

    train: {optim: {lr: 1.0e-6, warmup_steps: 0.03, schedule: cosine}}      OptimSettings
    algorithm: {critic: {warmup: 10, optim: {lr: 1.0e-5}}}                  CriticSettings
    model: {lora: {rank: 16}}                                               LoraSettings
    warm_start: {conversations: demos.jsonl, steps: 50}                     SftOptions

The parts of this package take these objects as they are, and a configuration holds the same ones. Separate from the parts,
because a configuration is read where torch is not.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from polyturn.algorithms.options import by_name
from polyturn.core.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleOptions:
    """What the learning rate does after the warm-up: it stays, or it falls."""

    PART: ClassVar[str] = "linear, cosine"

    name: Literal["constant", "linear", "cosine"] = "constant"
    """constant, or the shape of a fall to `min_lr_ratio` at `total_steps`."""
    total_steps: Annotated[int, Field(ge=1)] | None = None
    """Where the fall ends; null takes the steps of the run."""
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = 0.0
    """The learning rate at its end, as a share of `lr`."""

    def __post_init__(self) -> None:
        if self.name not in ("constant", "linear", "cosine"):
            raise ConfigError(f"the schedule is {self.name!r}; it must be 'constant', 'linear' or 'cosine'")


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimSettings:
    """AdamW."""

    lr: Annotated[float, Field(gt=0)] = 1e-6
    """Learning rate."""
    betas: tuple[float, float] = (0.9, 0.99)
    """Of Adam: how long the means of gradients and of their squares last."""
    eps: float = 1e-8
    """Of Adam: added to the root of the mean square."""
    weight_decay: float = 0.0
    """Decoupled from the gradient, as in AdamW; not applied to norms, biases and other vectors."""
    warmup_steps: Annotated[int | float, Field(ge=0)] = 0
    """Steps in which the learning rate rises linearly; the first one already has lr / warmup_steps. Below 1, a share of the
    steps of the schedule."""
    schedule: Annotated[ScheduleOptions, BeforeValidator(by_name)] = ScheduleOptions()
    max_grad_norm: Annotated[float, Field(gt=0)] | None = 1.0
    """Gradients of a larger norm are scaled down to it; null never scales."""
    max_skipped: Annotated[int, Field(ge=0)] = 3
    """Steps in a row that are skipped and counted because loss or gradient is not finite; one more ends the run."""

    def __post_init__(self) -> None:
        if self.warmup_steps > 1 and self.warmup_steps != int(self.warmup_steps):
            raise ConfigError(f"warmup_steps is {self.warmup_steps}; it must be whole, or a share of the steps below 1")
        if self.max_skipped < 0:
            raise ConfigError(f"max_skipped is {self.max_skipped}; it must be 0 (the first bad step ends the run) or more")
        if not self.lr >= 0:
            raise ConfigError(f"lr is {self.lr}; it must be 0 or more")
        if self.max_grad_norm is not None and not self.max_grad_norm > 0:
            raise ConfigError(f"max_grad_norm is {self.max_grad_norm}; it must be positive, or None for no clipping")

    def over(self, steps: int) -> OptimSettings:
        """Return the settings of a run of so many steps, its warm-up and the end of its schedule in steps."""
        total = self.schedule.total_steps or steps
        warmup = int(self.warmup_steps * total if self.warmup_steps < 1 else self.warmup_steps)
        schedule = dataclasses.replace(self.schedule, total_steps=max(total, warmup + 1))
        return dataclasses.replace(self, warmup_steps=warmup, schedule=schedule)


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticSettings:
    """The value function of gae, turn_gae and bilevel_gae: a backbone of its own with one number per token.

    Its loss is the mean over targets of max((v - G)^2, (clip(v, v_old - clip, v_old + clip) - G)^2) / 2. Source: Schulman et
    al. 2017 (PPO), in the form of its implementation; without `clip` it is (v - G)^2 / 2.
    """

    PART: ClassVar[str] = "gae, turn_gae, bilevel_gae"

    path: str | None = None
    """Folder or hub id of the model whose backbone it starts from, with the same vocabulary; null takes the policy's."""
    warmup: Annotated[int, Field(ge=0)] = 0
    """Steps at the start of the run in which only the critic is trained, so that the policy does not follow a critic that
    knows nothing."""
    clip: Annotated[float, Field(gt=0)] | None = 0.2
    """How far a value may move in a step and still be drawn to its return; null does not clip."""
    optim: OptimSettings = OptimSettings(lr=1e-5)

    def __post_init__(self) -> None:
        if self.clip is not None and not self.clip > 0:
            raise ConfigError(f"the critic's clip is {self.clip}; it must be above 0, or None")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraSettings:
    """Train low-rank adapters beside the weights instead of the weights; needs peft (the extra `lora`)."""

    PART: ClassVar[str] = "an adapter"

    rank: Annotated[int, Field(ge=1)] = 16
    """Rank of the update of every adapted layer."""
    alpha: Annotated[float, Field(gt=0)] = 32.0
    """The update is scaled by alpha / rank."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Of the adapter's input while it is trained. Above 0 the policy that is trained is not quite the one that sampled."""
    target_modules: str | list[str] = "all-linear"
    """Names of modules (their ends), a regular expression, or all-linear: every linear layer but the output embedding."""
    exclude_modules: str | list[str] | None = None
    """Of the target modules, those that get no adapter."""
    adapter: str | None = None
    """Folder of an adapter of this shape to start from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SftOptions:
    """Supervised training on conversations, by itself or as a warm start."""

    conversations: str | None = None
    """jsonl file of conversations, `file.py:function` that returns them, or a run's folder (its best trajectories)."""
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the function."""
    min_reward: float = 1.0
    """From a run's trajectories, those with at least this reward are kept (rejection sampling)."""
    steps: Annotated[int, Field(ge=0)] = 0
    """Optimizer steps; 0 is no supervised training."""
    batch_size: Annotated[int, Field(ge=1)] = 32
    """Conversations per step."""
    max_tokens_per_batch: Annotated[int, Field(ge=16)] = 4096
    """Tokens of a micro-batch, padding included."""
    max_seconds: Annotated[float, Field(gt=0)] | None = None
    """Stop after this many seconds, whatever `steps` says."""
    optim: OptimSettings = OptimSettings(lr=1e-4)
