"""Options of training: the loop, the optimizer, the critic, the adapter, supervised training.

    train: {steps: 200, groups_per_step: 32, distributed: {ranks: 4}}       TrainOptions
    train: {optim: {lr: 1.0e-6, warmup_steps: 0.03, schedule: cosine}}      OptimSettings
    algorithm: {critic: {warmup: 10, optim: {lr: 1.0e-5}}}                  CriticSettings
    model: {lora: {rank: 16}}                                               LoraSettings
    warm_start: {conversations: demos.jsonl, steps: 50}                     SftOptions

A configuration contains these objects, and the modules of this package take them. This module does not import torch, because
configurations are also read without it.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from polyturn.algorithms.options import by_name
from polyturn.batching.options import LayoutOptions
from polyturn.core.errors import ConfigError
from polyturn.infra.live import NameOrObject

BACKEND = "torch"
"""The default backend."""
Decay = Annotated[float, Field(ge=0, lt=1)]
"""Weight of the old value in a moving mean."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleOptions:
    """The learning rate after the warm-up."""

    PART: ClassVar[str] = "linear, cosine"

    name: Literal["constant", "linear", "cosine"] = "constant"
    """constant, or the shape of the decay to `min_lr_ratio` at `total_steps`."""
    total_steps: Annotated[int, Field(ge=1)] | None = None
    """Step at which the decay ends; null takes the steps of the run. Steps of `critic.warmup` do not count for the policy,
    which is not trained in them."""
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = 0.0
    """The learning rate at the end of the decay, as a share of `lr`."""

    def __post_init__(self) -> None:
        if self.name not in ("constant", "linear", "cosine"):
            raise ConfigError(f"the schedule is {self.name!r}; it must be 'constant', 'linear' or 'cosine'")


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimSettings:
    """AdamW."""

    lr: Annotated[float, Field(gt=0)] = 1e-6
    """Learning rate."""
    betas: tuple[Decay, Decay] = (0.9, 0.99)
    """Adam's decay of the means of gradients and of their squares."""
    eps: Annotated[float, Field(ge=0)] = 1e-8
    """Added to the denominator of Adam's update."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Decoupled weight decay, as in AdamW; not applied to norms, biases and other vectors."""
    warmup_steps: Annotated[int | float, Field(ge=0)] = 0
    """Number of steps in which the learning rate rises linearly, starting at lr / warmup_steps. Below 1, a share of the
    steps of the schedule."""
    schedule: Annotated[ScheduleOptions, BeforeValidator(by_name)] = ScheduleOptions()
    max_grad_norm: Annotated[float, Field(gt=0)] | None = 1.0
    """Gradients of a larger norm are scaled down to this norm; null does not clip."""
    offload: bool = False
    """Keep master weights, moments and summed gradients in the machine's memory, and update there. This saves 16 bytes per
    parameter on the GPUs and makes steps slower. For model.dtype bfloat16."""
    max_skipped: Annotated[int, Field(ge=0)] = 3
    """Number of consecutive steps that may be skipped because loss or gradient is not finite; one more ends the run."""

    def __post_init__(self) -> None:
        if self.warmup_steps > 1 and self.warmup_steps != int(self.warmup_steps):
            raise ConfigError(f"warmup_steps is {self.warmup_steps}; it must be whole, or a share of the steps below 1")
        if self.max_skipped < 0:
            raise ConfigError(f"max_skipped is {self.max_skipped}; it must be 0 (the first bad step ends the run) or more")
        if not self.lr >= 0:
            raise ConfigError(f"lr is {self.lr}; it must be 0 or more")
        if self.max_grad_norm is not None and not self.max_grad_norm > 0:
            raise ConfigError(f"max_grad_norm is {self.max_grad_norm}; it must be positive, or None for no clipping")

    def over(self, steps: int, *, updates: int = 1) -> OptimSettings:
        """Return the settings with the warm-up and the end of the schedule in optimizer updates, for a run of `steps`.

        Args:
            steps: Number of steps of the run that train these parameters.
            updates: Largest number of optimizer updates per step; a step without a trained token has none.
        """
        total = self.schedule.total_steps or steps
        warmup = int((self.warmup_steps * total if self.warmup_steps < 1 else self.warmup_steps) * updates)
        schedule = dataclasses.replace(self.schedule, total_steps=max(total * updates, warmup + 1))
        return dataclasses.replace(self, warmup_steps=warmup, schedule=schedule)


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticSettings:
    """The value function of gae, turn_gae and bilevel_gae: a separate backbone with a value per token.

    Its loss is the mean over targets of max((v - G)^2, (clip(v, v_old - clip, v_old + clip) - G)^2) / 2. Source: Schulman et
    al. 2017 (PPO), in the form of its implementation; without `clip` it is (v - G)^2 / 2.
    """

    PART: ClassVar[str] = "gae, turn_gae, bilevel_gae"

    path: str | None = None
    """Folder or hub id of the model whose backbone the critic starts from, with the same vocabulary; null: the policy's."""
    warmup: Annotated[int, Field(ge=0)] = 0
    """Number of steps at the start of the run that train only the critic, so that the policy does not follow an untrained
    critic."""
    clip: Annotated[float, Field(gt=0)] | None = 0.2
    """Largest distance that a value may move in a step (see the formula above); null does not clip."""
    optim: OptimSettings = OptimSettings(lr=1e-5)

    def __post_init__(self) -> None:
        if self.clip is not None and not self.clip > 0:
            raise ConfigError(f"the critic's clip is {self.clip}; it must be above 0, or None")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraSettings:
    """Train low-rank adapters instead of the weights; needs peft (the extra `lora`)."""

    PART: ClassVar[str] = "an adapter"

    rank: Annotated[int, Field(ge=1, le=2**16)] = 16
    """Rank of the update of every adapted layer."""
    alpha: Annotated[float, Field(gt=0)] = 32.0
    """The update is scaled by alpha / rank."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Dropout of the adapter's input in training. Above 0, the trained policy differs slightly from the sampling policy."""
    target_modules: str | list[str] = "all-linear"
    """Suffixes of module names, a regular expression, or all-linear: every linear layer except the output embedding. In a
    model with experts, all-linear leaves out the routers, the experts and the feed-forward layers beside them."""
    exclude_modules: str | list[str] | None = None
    """Target modules to leave out."""
    adapter: str | None = None
    """Folder of an adapter of the same shape to start from."""


def _of_the_user(path: Any) -> Any:
    """Expand a leading ~ of a path."""
    return os.path.expanduser(path) if isinstance(path, str) else path


@dataclass(frozen=True, slots=True, kw_only=True)
class SftOptions:
    """Supervised training on conversations, on its own or as a warm start."""

    conversations: Annotated[NameOrObject | None, AfterValidator(_of_the_user)] = None
    """A jsonl file of conversations, `file.py:function` that returns them, or the folder of a run, whose best trajectories
    are used."""
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the function."""
    min_reward: float = 1.0
    """Smallest reward of the trajectories that are used from a run's folder (rejection sampling)."""
    steps: Annotated[int, Field(ge=0)] = 0
    """Number of optimizer steps; 0 means no supervised training."""
    batch_size: Annotated[int, Field(ge=1)] = 32
    """Conversations per step."""
    max_tokens_per_batch: Annotated[int, Field(ge=16)] = 4096
    """Largest number of tokens of a micro-batch, padding included."""
    max_seconds: Annotated[float, Field(gt=0)] | None = None
    """Stop after this many seconds even if `steps` is not reached; null: no limit."""
    optim: OptimSettings = OptimSettings(lr=1e-4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Degrees:
    """How `train.backend` distributes the trained model over devices."""

    ONLY: ClassVar[Mapping[str, Sequence[str]]] = {
        "tensor_parallel": ("torch", "megatron"),
        "pipeline_parallel": ("megatron",),
        "expert_parallel": ("torch", "megatron"),
        "context_parallel": ("torch", "megatron"),
        "gradient_sync": ("torch",),
    }
    """Key -> the backends that support it."""

    ranks: Annotated[int, Field(ge=1)] = 1
    """Number of training processes, each on a GPU if there are GPUs. The run starts them in addition to its main process."""
    tensor_parallel: Annotated[int, Field(ge=1)] = 1
    """Number of ranks that split every layer and see the same samples, for models too wide for one device."""
    pipeline_parallel: Annotated[int, Field(ge=1)] = 1
    """Number of ranks that each compute a share of the layers, for the same samples, one after another."""
    expert_parallel: Annotated[int, Field(ge=1)] = 1
    """Number of ranks that each have a share of the experts of every layer. They see different samples and exchange
    tokens."""
    context_parallel: Annotated[int, Field(ge=1)] = 1
    """Number of ranks that split the tokens of the same packed samples, for conversations too long for one device."""
    gradient_sync: Literal["each", "last"] = "each"
    """Sum gradients over ranks after each micro-batch, or only after the last one of an update. last communicates less, but
    keeps a whole float32 gradient on every rank: 4 bytes a parameter."""


def _steps_or_time(value: int | str) -> int | str:
    if not (value >= 0 if isinstance(value, int) else re.fullmatch(r"(?=.*[1-9])\d+(\.\d+)?[smh]", value)):
        raise ValueError("write a number of steps, or a time such as 30s, 10m or 2h")
    return value


def _share_of(share: float, num: int) -> int:
    """Return a share of a number, rounded up; of 50, a share of 1.1 is 55, although 1.1 * 50 > 55 in floating point."""
    return math.ceil(Decimal(str(share)) * num)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainOptions:
    """The training loop."""

    steps: Annotated[int, Field(ge=0)] = 100
    """Number of training steps of the run."""
    epochs: Annotated[int, Field(ge=1, le=2**20)] | None = None
    """Number of passes over the tasks, in place of `steps`. An incomplete last step is left out. Groups that no step takes
    (`oversample`) do not count."""
    groups_per_step: Annotated[int, Field(ge=1, le=2**20)] = 32
    """Number of tasks per step, with a group each; if it is not set, training without a CUDA GPU uses 4."""
    group_size: Annotated[int, Field(ge=1, le=2**16)] = 8
    """Number of trajectories per task, which are compared with each other."""
    minibatches: Annotated[int, Field(ge=1)] = 1
    """Number of optimizer updates per pass, each on a share of the step's trajectories."""
    passes: Annotated[int, Field(ge=1)] = 1
    """Number of passes over a step's trajectories (PPO's epochs); ratios are relative to the policy before the first
    pass."""
    max_tokens_per_batch: Annotated[int, Field(ge=16)] = 4096
    """Largest number of tokens in one forward and backward pass, padding included."""
    layout: Annotated[LayoutOptions, BeforeValidator(by_name)] = field(default_factory=LayoutOptions)
    max_staleness: Annotated[int, Field(ge=0)] = 0
    """Largest number of policy versions that a trained token may be behind; 0 is synchronous training."""
    oversample: Annotated[float, Field(ge=0, le=8)] = 0.0
    """Number of groups started in addition to the groups of a step, as a share of these; a step takes the first to
    finish."""
    leftover: Literal["cancel", "carry"] = "cancel"
    """What happens to the groups that a step does not take. cancel: they are cut off and counted. carry: they continue and
    are trained in a later step, within max_staleness, which avoids a bias against long episodes."""
    dynamic_sampling: Annotated[int, Field(ge=0)] = 0
    """Number of further tasks to try in place of a group whose rewards are all equal (for an estimator of turns, also the
    scores of turns)."""
    replay: Annotated[float, Field(ge=0, le=4)] = 0.0
    """Number of groups of earlier steps that a step trains on again, as a share of its new groups, within max_staleness."""
    checkpoint_every: Annotated[int | str, AfterValidator(_steps_or_time)] = "10m"
    """Number of steps between checkpoints, or the time between them, such as 30s, 10m or 2h. The time grows so that
    writing takes at most a fiftieth of it. 0 saves only at the start, at the end, and when the run is interrupted (except by
    kill -9). A warm start is saved by time only."""
    keep_checkpoints: Annotated[int, Field(ge=1)] = 2
    """Number of newest checkpoints to keep; the best one is always kept."""
    keep_checkpoint_every: Annotated[int, Field(ge=0)] = 0
    """Keep the checkpoint of every n-th step forever; 0 keeps none this way."""
    export: Literal["all", "best", "last"] = "all"
    """The checkpoints that also contain the model in Hugging Face format: all; last: only the one at the run's end or
    interruption; best: that one and the best of an evaluation. A run can resume from any checkpoint, with or without it."""
    on_checkpoint_error: Literal["stop", "warn"] = "stop"
    """If a checkpoint cannot be written, as on a full disk. stop: the run ends with the last good checkpoint intact. warn:
    the run continues and tries again at the next checkpoint."""
    backend: NameOrObject = BACKEND
    """The backend of the trained model: torch (FSDP2 with several ranks), megatron (megatron-core, the extra `megatron`;
    docs/guides/megatron.md), or another entry point of `polyturn.backends`."""
    distributed: Degrees = Degrees()
    optim: OptimSettings = OptimSettings()

    def __post_init__(self) -> None:
        if self.leftover == "carry" and not 0 < self.oversample <= self.max_staleness:
            raise ConfigError(
                f"train.leftover is carry with train.oversample {self.oversample:g} and train.max_staleness "
                f"{self.max_staleness}; a group that is carried over is trained with newer weights, so set oversample "
                "above 0 and at most to max_staleness"
            )
        if self.replay and not self.max_staleness:
            raise ConfigError(
                f"train.replay is {self.replay:g} and train.max_staleness is 0; groups of earlier steps were sampled "
                "by older weights, so set max_staleness to 1 or more"
            )
        if self.dynamic_sampling and self.group_size == 1:
            raise ConfigError(
                f"train.dynamic_sampling is {self.dynamic_sampling} and train.group_size is 1: the rewards of a group of "
                "one are always equal; raise group_size, or set dynamic_sampling to 0"
            )

    @property
    def updates_per_step(self) -> int:
        """Largest number of optimizer updates of a step."""
        return self.minibatches * self.passes

    @property
    def extra_groups(self) -> int:
        """Number of groups that are started in addition to those of a step."""
        return _share_of(self.oversample, self.groups_per_step)

    @property
    def carries_over(self) -> bool:
        """Whether the remaining groups are trained in a later step."""
        return self.leftover == "carry"

    @property
    def replayed_groups(self) -> int:
        """Number of earlier groups that a step trains on again."""
        return _share_of(self.replay, self.groups_per_step)

    @property
    def checkpoint_every_s(self) -> float | None:
        """Seconds between checkpoints; None if steps are counted."""
        every = self.checkpoint_every
        return None if isinstance(every, int) else float(every[:-1]) * {"s": 1, "m": 60, "h": 3600}[every[-1]]
