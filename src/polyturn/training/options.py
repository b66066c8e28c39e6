"""Options of training: the loop, the optimizer, the critic, the adapter, the supervised start.

    train: {steps: 200, groups_per_step: 32, distributed: {ranks: 4}}       TrainOptions
    train: {optim: {lr: 1.0e-6, warmup_steps: 0.03, schedule: cosine}}      OptimSettings
    algorithm: {critic: {warmup: 10, optim: {lr: 1.0e-5}}}                  CriticSettings
    model: {lora: {rank: 16}}                                               LoraSettings
    warm_start: {conversations: demos.jsonl, steps: 50}                     SftOptions

The parts of this package take these objects as they are, and a configuration holds the same ones. Separate from the parts,
because a configuration is read where torch is not.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from polyturn.algorithms.options import by_name
from polyturn.batching.options import LayoutOptions
from polyturn.core.errors import ConfigError
from polyturn.core.live import NameOrObject

BACKEND = "torch"
"""The backend of a run that names none."""
Decay = Annotated[float, Field(ge=0, lt=1)]
"""The weight of a moving mean beside what is new."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleOptions:
    """The learning rate after the warm-up: it stays, or it falls."""

    PART: ClassVar[str] = "linear, cosine"

    name: Literal["constant", "linear", "cosine"] = "constant"
    """constant, or the shape of a fall to `min_lr_ratio` at `total_steps`."""
    total_steps: Annotated[int, Field(ge=1)] | None = None
    """The step at which the fall ends; null takes the steps of the run. Steps of `critic.warmup`, which the policy sits out,
    do not count for the policy."""
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
    betas: tuple[Decay, Decay] = (0.9, 0.99)
    """Of Adam: how long the means of gradients and of their squares last."""
    eps: Annotated[float, Field(ge=0)] = 1e-8
    """Of Adam: added to the root of the mean square."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
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

    def over(self, steps: int, *, updates: int = 1) -> OptimSettings:
        """Return the settings of a run of so many steps, its warm-up and the end of its schedule in optimizer updates.

        Args:
            steps: Of the run, in which these parameters are trained.
            updates: Of the optimizer in each step, at most; a step with nothing to learn from has none.
        """
        total = self.schedule.total_steps or steps
        warmup = int((self.warmup_steps * total if self.warmup_steps < 1 else self.warmup_steps) * updates)
        schedule = dataclasses.replace(self.schedule, total_steps=max(total * updates, warmup + 1))
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
    """The distance that a value may move in a step and still be drawn to its return; null does not clip."""
    optim: OptimSettings = OptimSettings(lr=1e-5)

    def __post_init__(self) -> None:
        if self.clip is not None and not self.clip > 0:
            raise ConfigError(f"the critic's clip is {self.clip}; it must be above 0, or None")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraSettings:
    """Train low-rank adapters beside the weights instead of the weights; needs peft (the extra `lora`)."""

    PART: ClassVar[str] = "an adapter"

    rank: Annotated[int, Field(ge=1, le=2**16)] = 16
    """Rank of the update of every adapted layer."""
    alpha: Annotated[float, Field(gt=0)] = 32.0
    """The update is scaled by alpha / rank."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Of the adapter's input while it is trained. Above 0 the policy that is trained is not quite the one that sampled."""
    target_modules: str | list[str] = "all-linear"
    """Names of modules (their ends), a regular expression, or all-linear: every linear layer but the output embedding
    and routers of experts."""
    exclude_modules: str | list[str] | None = None
    """Of the target modules, those that get no adapter."""
    adapter: str | None = None
    """Folder of an adapter of this shape to start from."""


def _of_the_user(path: Any) -> Any:
    """Return a path with the user's folder in place of a leading ~."""
    return os.path.expanduser(path) if isinstance(path, str) else path


@dataclass(frozen=True, slots=True, kw_only=True)
class SftOptions:
    """Supervised training on conversations, by itself or as a warm start."""

    conversations: Annotated[NameOrObject | None, AfterValidator(_of_the_user)] = None
    """jsonl file of conversations, `file.py:function` that returns them, or a run's folder (its best trajectories)."""
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the function."""
    min_reward: float = 1.0
    """From a run's trajectories, those with at least this reward are kept (rejection sampling)."""
    steps: Annotated[int, Field(ge=0)] = 0
    """Optimizer steps; 0 means no supervised training."""
    batch_size: Annotated[int, Field(ge=1)] = 32
    """Conversations per step."""
    max_tokens_per_batch: Annotated[int, Field(ge=16)] = 4096
    """Tokens of a micro-batch, padding included."""
    max_seconds: Annotated[float, Field(gt=0)] | None = None
    """Stop after this many seconds, whatever `steps` says."""
    optim: OptimSettings = OptimSettings(lr=1e-4)


@dataclass(frozen=True, slots=True, kw_only=True)
class DistributedOptions:
    """The distribution of the trained model over devices, by `train.backend`."""

    ONLY: ClassVar[Mapping[str, Sequence[str]]] = {
        "tensor_parallel": ("torch", "megatron"),
        "pipeline_parallel": ("megatron",),
        "expert_parallel": ("torch", "megatron"),
        "context_parallel": ("torch", "megatron"),
        "gradient_sync": ("torch",),
    }
    """Keys that belong to a backend, and to which."""

    ranks: Annotated[int, Field(ge=1)] = 1
    """Processes that train together, a GPU each where there are GPUs; the run starts them, and is none of them itself. Under
    torchrun its own number counts."""
    tensor_parallel: Annotated[int, Field(ge=1)] = 1
    """Ranks that split every layer among them and see the same samples; for models too wide for one device."""
    pipeline_parallel: Annotated[int, Field(ge=1)] = 1
    """Ranks that have a share of the layers each and see the same samples, one after the other."""
    expert_parallel: Annotated[int, Field(ge=1)] = 1
    """Ranks that have a share of the experts of each layer and send each other tokens, which are of different samples."""
    context_parallel: Annotated[int, Field(ge=1)] = 1
    """Ranks that split the tokens of the same packed samples among them; for conversations too long for one device."""
    gradient_sync: Literal["each", "last"] = "each"
    """Sum gradients over ranks after each micro-batch, or once, after the last one of an update. The second communicates
    less and keeps a whole float32 gradient on every rank meanwhile: 4 bytes a parameter."""


def _steps_or_time(value: int | str) -> int | str:
    if not (value >= 0 if isinstance(value, int) else re.fullmatch(r"(?=.*[1-9])\d+(\.\d+)?[smh]", value)):
        raise ValueError("write a number of steps, or a time such as 30s, 10m or 2h")
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainOptions:
    """The training loop."""

    steps: Annotated[int, Field(ge=0)] = 100
    """Training steps of the run."""
    epochs: Annotated[int, Field(ge=1, le=2**20)] | None = None
    """Passes over the tasks, which replace `steps` once the tasks are counted; a last step that is not full is not taken."""
    groups_per_step: Annotated[int, Field(ge=1, le=2**20)] = 32
    """Tasks whose groups are trained in one step; where it is not set, 4 in training on a machine without a CUDA GPU."""
    group_size: Annotated[int, Field(ge=1, le=2**16)] = 8
    """Trajectories of one task that are compared with one another."""
    minibatches: Annotated[int, Field(ge=1)] = 1
    """Optimizer updates per pass, each on its share of the step's trajectories."""
    passes: Annotated[int, Field(ge=1)] = 1
    """Passes over a step's trajectories, which PPO calls epochs; ratios are to the policy before the first of them."""
    max_tokens_per_batch: Annotated[int, Field(ge=16)] = 4096
    """Tokens in one forward and backward, padding included."""
    layout: Annotated[LayoutOptions, BeforeValidator(by_name)] = field(default_factory=LayoutOptions)
    max_staleness: Annotated[int, Field(ge=0)] = 0
    """Number of policy versions that a token may be behind when it is trained on; 0 is synchronous training."""
    oversample: Annotated[float, Field(ge=0, le=8)] = 0.0
    """Groups that are started beyond those that a step trains on, as a share of these; the first complete ones are taken."""
    leftover: Literal["cancel", "carry"] = "cancel"
    """The fate of the others: they are cut off and counted (cancel), or go on and are trained in a later step, within
    max_staleness (carry), so that no length is left out."""
    dynamic_sampling: Annotated[int, Field(ge=0)] = 0
    """Number of further tasks that are tried in place of a group whose rewards are all equal (for an estimator of turns also
    the scores of their turns); 0 is none."""
    replay: Annotated[float, Field(ge=0, le=4)] = 0.0
    """Groups of earlier steps that are trained on again beside the new ones, as a share of these, within max_staleness."""
    checkpoint_every: Annotated[int | str, AfterValidator(_steps_or_time)] = "10m"
    """Steps between checkpoints, or the time between them as 30s, 10m or 2h, further apart where writing one takes more than
    a fiftieth of it; 0 saves only at the start, at the end, and when the run is interrupted by anything but kill -9. A warm
    start is saved by time alone."""
    keep_checkpoints: Annotated[int, Field(ge=1)] = 2
    """Number of the newest ones that stay; the best one always does."""
    keep_checkpoint_every: Annotated[int, Field(ge=0)] = 0
    """Checkpoints of every so many steps stay for good; 0 is none."""
    on_checkpoint_error: Literal["stop", "warn"] = "stop"
    """The consequence of a checkpoint that cannot be written, as on a full disk: the run ends, with the last good one
    intact (stop), or goes on and tries again at the next (warn)."""
    backend: NameOrObject = BACKEND
    """The backend of the trained model: torch (FSDP2 where there are several ranks), megatron (megatron-core, the
    extra `megatron`; docs/guides/megatron.md), or another entry point of `polyturn.backends`."""
    distributed: DistributedOptions = DistributedOptions()
    optim: OptimSettings = OptimSettings()

    def __post_init__(self) -> None:
        if self.leftover == "carry" and not 0 < self.oversample <= self.max_staleness:
            raise ConfigError(
                f"train.leftover is carry with train.oversample {self.oversample:g} and train.max_staleness "
                f"{self.max_staleness}; a group that is carried over is trained by newer weights, so set oversample above 0 "
                "and at most to max_staleness"
            )
        if self.replay and not self.max_staleness:
            raise ConfigError(
                f"train.replay is {self.replay:g} and train.max_staleness is 0; groups of earlier steps are of older "
                "weights, so set max_staleness to 1 or more"
            )
        if self.dynamic_sampling and self.group_size == 1:
            raise ConfigError(
                f"train.dynamic_sampling is {self.dynamic_sampling} and train.group_size is 1: the rewards of a group of "
                "one are always equal; raise group_size, or set dynamic_sampling to 0"
            )

    @property
    def updates_per_step(self) -> int:
        """Optimizer updates of a step, at most."""
        return self.minibatches * self.passes

    @property
    def extra_groups(self) -> int:
        """Groups that are started beyond those of a step."""
        return math.ceil(self.oversample * self.groups_per_step)

    @property
    def carries_over(self) -> bool:
        """Whether what is left of them is trained in a later step."""
        return self.leftover == "carry"

    @property
    def replayed_groups(self) -> int:
        """Groups of earlier steps that a step trains on again."""
        return math.ceil(self.replay * self.groups_per_step)

    @property
    def checkpoint_every_s(self) -> float | None:
        """Seconds between checkpoints; None where steps are counted."""
        every = self.checkpoint_every
        return None if isinstance(every, int) else float(every[:-1]) * {"s": 1, "m": 60, "h": 3600}[every[-1]]
