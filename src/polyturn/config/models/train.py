"""The section `train`: the loop that changes weights by reinforcement.

    train: {steps: 200, groups_per_step: 32, group_size: 8, distributed: {ranks: 4}}

What asynchronous keys promise together is checked here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from polyturn.batching.options import LayoutOptions
from polyturn.config.models.base import Section
from polyturn.config.parts import BY_NAME
from polyturn.training.options import OptimSettings

BACKEND = "torch"
"""The backend of a run that names none."""


class DistributedConfig(Section):
    """How the model that trains is spread over devices, by `train.backend`."""

    ONLY: ClassVar[Mapping[str, str]] = {
        "tensor_parallel": "torch, megatron",
        "pipeline_parallel": "megatron",
        "expert_parallel": "megatron",
    }
    """Keys that belong to a backend, and to which."""

    ranks: int = Field(1, ge=1)
    """Processes that train together, a GPU each where there are GPUs; `polyturn train` starts them. Under
    torchrun its own number counts."""
    tensor_parallel: int = Field(1, ge=1)
    """Ranks that split every layer among them and see the same samples; for models too wide for one device."""
    pipeline_parallel: int = Field(1, ge=1)
    """Ranks that have a share of the layers each and see the same samples, one after the other."""
    expert_parallel: int = Field(1, ge=1)
    """Ranks that have a share of the experts of each layer."""


class TrainConfig(Section):
    """The training loop."""

    steps: int = Field(100, ge=0)
    """Optimizer steps of the run."""
    epochs: int | None = Field(None, ge=1)
    """Passes over the tasks, which replace `steps` once the tasks are counted; a last step that is not full is not taken."""
    groups_per_step: int = Field(32, ge=1)
    """Tasks whose groups are trained in one step."""
    group_size: int = Field(8, ge=1)
    """Trajectories of one task that are compared with one another."""
    minibatches: int = Field(1, ge=1)
    """Optimizer updates per step, each on its share of the step's trajectories."""
    max_tokens_per_batch: int = Field(4096, ge=16)
    """Tokens in one forward and backward, padding included."""
    layout: Annotated[LayoutOptions, BY_NAME] = LayoutOptions()
    max_staleness: int = Field(0, ge=0)
    """How many policy versions a token may be behind when it is trained on; 0 is synchronous training."""
    oversample: float = Field(0.0, ge=0, le=8)
    """Groups that are started beyond those that a step trains on, as a share of these; the first complete ones are taken."""
    leftover: Literal["cancel", "carry"] = "cancel"
    """What becomes of the others: they are cut off and counted (cancel), or go on and are trained in a later step, within
    max_staleness (carry), so that no length is left out."""
    dynamic_sampling: int = Field(0, ge=0)
    """How many further tasks are tried in place of a group whose rewards are all equal (for an estimator of turns also
    the scores of their turns); 0 is none."""
    replay: float = Field(0.0, ge=0, le=4)
    """Groups of earlier steps that are trained on again beside the new ones, as a share of these, within max_staleness."""
    checkpoint_every: int | str = "10m"
    """Steps between checkpoints, or the time between them as 30s, 10m or 2h, further apart where writing one takes more than
    a fiftieth of it; 0 saves only at the start, at the end, and when the run is interrupted by anything but kill -9. A warm
    start is saved by time alone."""
    keep_checkpoints: int = Field(2, ge=1)
    """How many of the newest ones stay; the best one always does."""
    keep_checkpoint_every: int = Field(0, ge=0)
    """Checkpoints of every so many steps stay for good; 0 is none."""
    on_checkpoint_error: Literal["stop", "warn"] = "stop"
    """What follows a checkpoint that cannot be written, on a full disk for instance: the run ends, with the last good one
    intact (stop), or goes on and tries again at the next (warn)."""
    backend: str = BACKEND
    """What holds and splits the model that trains: torch (FSDP2 where there are several ranks), megatron (megatron-core, the
    extra `megatron`; docs/guides/megatron.md), or another entry point of `polyturn.backends`."""
    distributed: DistributedConfig = DistributedConfig()
    optim: OptimSettings = OptimSettings()

    @field_validator("checkpoint_every")
    @classmethod
    def _steps_or_time(cls, value: int | str) -> int | str:
        is_fine = value >= 0 if isinstance(value, int) else re.fullmatch(r"(?=.*[1-9])\d+(\.\d+)?[smh]", value)
        if not is_fine:
            raise ValueError("write a number of steps, or a time such as 30s, 10m or 2h")
        return value

    @property
    def checkpoint_every_s(self) -> float | None:
        """Return the seconds between checkpoints; None where steps are counted."""
        every = self.checkpoint_every
        return None if isinstance(every, int) else float(every[:-1]) * {"s": 1, "m": 60, "h": 3600}[every[-1]]

    @model_validator(mode="after")
    def _asynchrony(self) -> TrainConfig:
        if self.leftover == "carry" and not 0 < self.oversample <= self.max_staleness:
            raise ValueError(
                f"train.leftover is carry with train.oversample {self.oversample:g} and train.max_staleness "
                f"{self.max_staleness}; a group that is carried over is trained by newer weights, so set oversample above 0 "
                "and at most to max_staleness"
            )
        if self.replay and not self.max_staleness:
            raise ValueError(
                f"train.replay is {self.replay:g} and train.max_staleness is 0; groups of earlier steps are of older "
                "weights, so set max_staleness to 1 or more"
            )
        if self.dynamic_sampling and self.group_size == 1:
            raise ValueError(
                f"train.dynamic_sampling is {self.dynamic_sampling} and train.group_size is 1: the rewards of a group of "
                "one are always equal; raise group_size, or set dynamic_sampling to 0"
            )
        return self
