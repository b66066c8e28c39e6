"""The root of a configuration: every section by its name, and what holds between sections.

    name: quickstart
    model: {…}
    rollout: {…}
    train: {…}

A rule about keys of one section stands with that section; a rule about keys of several stands here.
"""

from __future__ import annotations

import os
import re
from typing import ClassVar

from pydantic import Field, field_validator, model_validator

from polyturn.config.models.algorithm import AlgorithmConfig
from polyturn.config.models.cluster import ClusterConfig
from polyturn.config.models.data import DataConfig, EvalConfig
from polyturn.config.models.env import EnvConfig
from polyturn.config.models.model import SELF, ModelConfig, PolicyConfig
from polyturn.config.models.reward import RewardConfig
from polyturn.config.models.rollout import RolloutConfig
from polyturn.config.parts import OwnPart, Section
from polyturn.core.live import NameOrObject
from polyturn.data.options import MixOptions
from polyturn.engines.options import AnyEngineOptions, EmbeddedOptions, OwnEngineOptions, is_deterministic
from polyturn.store.options import StoreSettings
from polyturn.training.options import SftOptions, TrainOptions

TAKEN = ("policy", "random", SELF)
"""Names that no further policy may have."""
MAX_NAME = 200
"""Bytes of a folder's name, with room for what is written behind it; file systems end at 255."""


class DumpConfig(Section):
    """Trajectories as plain JSON lines, one file a step, beside the run's own records."""

    train: str | None = None
    """Folder for training, relative to the working directory."""
    evaluation: str | None = None
    """Folder for evaluation, relative to the working directory."""


class TrackerConfig(OwnPart):
    """A program that the numbers of a run are passed on to. Further keys are its own, for instance `project`."""

    PART: ClassVar[str] = "any tracker"

    name: NameOrObject
    """tensorboard, wandb, mlflow, trackio, otel, a registered name or `file.py:Class`."""
    samples: int = Field(4, ge=0)
    """Trajectories of each step in its table of samples."""


class CompatConfig(Section):
    """Adjustments for rows and dashboards made for other trainers."""

    require_interaction_name: bool = False
    """Refuse `interaction_kwargs` without a name; else they mean the interaction "gsm8k"."""
    validation_metrics: bool = False
    """Record evaluations also under val-core/ and val-aux/."""


class RunConfig(Section):
    """A whole run."""

    name: str = "run"
    """Name of the run, and of its folder."""
    out: str = "runs"
    """Folder of runs; this one is `out/name`. Relative to the working directory."""
    seed: int = 0
    """Of everything that draws: tasks, sampling, initial weights."""
    num_threads: int | None = Field(None, ge=1)
    """Threads of torch; null leaves torch's own choice."""
    plugins: list[str] = []
    """Python files that are imported before anything is made, and register what they define."""
    model: ModelConfig
    data: DataConfig = DataConfig()
    env: NameOrObject | EnvConfig | list[NameOrObject | EnvConfig] | None = None
    """An environment, or several, instead of `data`, `rollout.scheduler` and a reward: `textarena:GuessTheNumber-v0`."""
    policies: dict[str, PolicyConfig] = {}
    """Further policies, which speak and are not trained: a name of one stands for a player, a simulated user or a judge."""
    rollout: RolloutConfig = RolloutConfig()
    engine: AnyEngineOptions = EmbeddedOptions()
    """The engine that samples the completions: embedded in this process, or servers. Its `kind` says which keys it has."""
    reward: RewardConfig = RewardConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    warm_start: SftOptions = SftOptions()
    train: TrainOptions = TrainOptions()
    evaluation: EvalConfig = EvalConfig()
    cluster: ClusterConfig = ClusterConfig()
    dump: DumpConfig = DumpConfig()
    store: StoreSettings = StoreSettings()
    tracking: list[NameOrObject | TrackerConfig] = []
    """Trackers beside metrics.jsonl: names, or {name: wandb, project: …} with keys of the tracker's own."""
    compat: CompatConfig = CompatConfig()

    @property
    def deadline_s(self) -> float:
        """The longest deadline of a plug-in's call."""
        rollout, engine = self.rollout, self.engine
        of_engine = engine.timeout_s if isinstance(engine, OwnEngineOptions) else 0.0
        return max(
            rollout.tools.timeout_s,
            rollout.interaction_timeout_s,
            rollout.scheduler_timeout_s,
            self.reward.timeout_s,
            of_engine,
        )

    @field_validator("out")
    @classmethod
    def _of_the_user(cls, out: str) -> str:
        return os.path.expanduser(out)  # a shell leaves the ~ of out=~/runs as it is

    @field_validator("name")
    @classmethod
    def _stays_below_out(cls, name: str) -> str:
        if {"", ".", ".."} & set(name.split("/")):
            raise ValueError("a run's folder is out/name and lies below `out`; set out to the folder that it belongs in")
        if any(len(part.encode()) > MAX_NAME for part in name.split("/")):
            raise ValueError(f"a run's folder has this name, and {MAX_NAME} bytes are room enough for one")
        return name

    @field_validator("policies")
    @classmethod
    def _names(cls, policies: dict[str, PolicyConfig]) -> dict[str, PolicyConfig]:
        for name in policies:
            if name in TAKEN or not re.fullmatch(r"[A-Za-z_][\w-]*", name):
                what = "means something else where players are named" if name in TAKEN else "is not a name"
                raise ValueError(f"a policy is called {name!r}, which {what}; call it something like 'opponent'")
        return policies

    @model_validator(mode="after")
    def _promises(self) -> RunConfig:
        train = self.train
        if isinstance(self.data.sampler, MixOptions) and train.epochs is not None:
            raise ValueError("the sampler mix decides the order of tasks and has no epochs; drop train.epochs (set steps)")
        if self.evaluation.before_warm_start and self.cluster.address is not None:
            raise ValueError(
                f"evaluation.before_warm_start is true and cluster.address is {self.cluster.address!r}: the untouched model "
                "is evaluated by the process that starts a run; leave it out, and run polyturn eval beside it"
            )
        late = {"train.max_staleness": train.max_staleness, "train.oversample": train.oversample}
        for name, value in late.items():
            if is_deterministic(self.engine) and value:
                raise ValueError(
                    f"engine.deterministic promises equal bits, and with {name} {value:g} what is trained on depends on how "
                    f"long episodes take; set {name} to 0, or engine.deterministic to false"
                )
        return self
