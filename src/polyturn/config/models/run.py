"""The root of a configuration: all sections, and the rules between sections.

    name: quickstart
    model: {…}
    rollout: {…}
    train: {…}

A rule about one section is in that section's class; rules about several sections are here.
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
from polyturn.data.options import MixOptions
from polyturn.engines.options import AnyEngineOptions, EmbeddedOptions, OwnEngineOptions, is_deterministic
from polyturn.infra.live import NameOrObject
from polyturn.store.options import StoreSettings
from polyturn.training.options import SftOptions, TrainOptions

TAKEN = ("policy", "random", SELF)
"""Reserved names of policies."""
MAX_NAME = 200
"""Largest length of a folder's name in bytes, with room for suffixes; file systems allow 255."""


class DumpConfig(Section):
    """Dump trajectories as JSON lines, one file per step, in addition to the run's records."""

    train: str | None = None
    """Folder for training trajectories, relative to the working directory."""
    evaluation: str | None = None
    """Folder for evaluation trajectories, relative to the working directory."""


class TrackerConfig(OwnPart):
    """A tracker that receives the metrics of a run. Further keys are its arguments, for instance `project`."""

    PART: ClassVar[str] = "any tracker"

    name: NameOrObject
    """tensorboard, wandb, mlflow, trackio, otel, a registered name or `file.py:Class`."""
    samples: int = Field(4, ge=0)
    """Number of trajectories per step in its table of samples."""


class CompatConfig(Section):
    """Compatibility with rows and dashboards of other trainers."""

    require_interaction_name: bool = False
    """Raise for `interaction_kwargs` without a name; false takes the interaction "gsm8k"."""
    validation_metrics: bool = False
    """Also record evaluations under val-core/ and val-aux/."""


class RunConfig(Section):
    """A whole run."""

    name: str = "run"
    """Name of the run, and of its folder."""
    out: str = "runs"
    """Folder of runs, relative to the working directory; the run's folder is `out/name`."""
    seed: int = 0
    """Seed of tasks, sampling and initial weights."""
    num_threads: int | None = Field(None, ge=1)
    """Number of torch threads; null leaves the choice to torch."""
    plugins: list[str] = []
    """Python files to import first, which register their plug-ins."""
    model: ModelConfig
    data: DataConfig = DataConfig()
    env: NameOrObject | EnvConfig | list[NameOrObject | EnvConfig] | None = None
    """One or several environments in place of `data`, `rollout.scheduler` and a reward: `textarena:GuessTheNumber-v0`."""
    policies: dict[str, PolicyConfig] = {}
    """Further policies, which sample and are not trained; their names can be used for players, simulated users and
    judges."""
    rollout: RolloutConfig = RolloutConfig()
    engine: AnyEngineOptions = EmbeddedOptions()
    """The engine that samples completions: embedded in this process, or servers. Its keys depend on `kind`."""
    reward: RewardConfig = RewardConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    warm_start: SftOptions = SftOptions()
    train: TrainOptions = TrainOptions()
    evaluation: EvalConfig = EvalConfig()
    cluster: ClusterConfig = ClusterConfig()
    dump: DumpConfig = DumpConfig()
    store: StoreSettings = StoreSettings()
    tracking: list[NameOrObject | TrackerConfig] = []
    """Trackers in addition to metrics.jsonl: names, or {name: wandb, project: …} with the tracker's arguments."""
    compat: CompatConfig = CompatConfig()

    @property
    def deadline_s(self) -> float:
        """The longest deadline of a plug-in's call, in seconds."""
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
        return os.path.expanduser(out)  # a shell does not expand the ~ of out=~/runs

    @field_validator("name")
    @classmethod
    def _stays_below_out(cls, name: str) -> str:
        if {"", ".", ".."} & set(name.split("/")):
            raise ValueError("a run's folder is out/name, inside `out`; set out to the parent folder")
        if any(len(part.encode()) > MAX_NAME for part in name.split("/")):
            raise ValueError(f"a run's folder has this name, which may have at most {MAX_NAME} bytes")
        return name

    @field_validator("policies")
    @classmethod
    def _names(cls, policies: dict[str, PolicyConfig]) -> dict[str, PolicyConfig]:
        for name in policies:
            if name in TAKEN or not re.fullmatch(r"[A-Za-z_][\w-]*", name):
                what = "has another meaning in lists of players" if name in TAKEN else "is not a valid name"
                raise ValueError(f"a policy is named {name!r}, which {what}; choose a name such as 'opponent'")
        return policies

    @model_validator(mode="after")
    def _promises(self) -> RunConfig:
        train = self.train
        if isinstance(self.data.sampler, MixOptions) and train.epochs is not None:
            raise ValueError("the sampler mix has no epochs; set train.steps instead of train.epochs")
        if self.evaluation.before_warm_start and self.cluster.address is not None:
            raise ValueError(
                f"evaluation.before_warm_start is true and cluster.address is {self.cluster.address!r}: the process "
                "that starts a run would have to evaluate the untouched model; remove evaluation.before_warm_start, and "
                "use polyturn eval"
            )
        late = {"train.max_staleness": train.max_staleness, "train.oversample": train.oversample}
        for name, value in late.items():
            if is_deterministic(self.engine) and value:
                raise ValueError(
                    f"engine.deterministic promises equal bits, and with {name} {value:g} the trained groups depend on "
                    f"how long episodes take; set {name} to 0, or engine.deterministic to false"
                )
        return self
