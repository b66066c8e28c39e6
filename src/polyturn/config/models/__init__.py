"""The configuration of a run, as frozen pydantic models. Every key, its type, its default and its meaning are here.

    run.py     RunConfig: the root, a key for each section; compat, dump and tracking
    model.py   model and policies         data.py   data and evaluation         rollout.py   rollout and its tools
    algorithm.py    reward.py    env.py    cluster.py

A section that stands in several places (optimizers of the policy, the critic and the warm start; tasks to train and to
evaluate on; models, engines and sampling of the run and of further policies) is one class: a place may have other
defaults, never other keys. Options of a part are a dataclass beside it (`engines/options.py`, `tools/options.py`, …),
which stands here as it is.

A config file is YAML with these keys; `config/load.py` reads it, and `build` is the only place that turns it into
objects. Paths are relative to the config file. A name of a plug-in is a registered name, `package.module:Attr` or
`file.py:Attr`.
"""

from __future__ import annotations

from polyturn.config.models.algorithm import AlgorithmConfig
from polyturn.config.models.cluster import ActorsConfig, ClusterConfig
from polyturn.config.models.data import DataConfig, EvalConfig, EvalSetConfig, TaskSourceConfig
from polyturn.config.models.env import EnvConfig
from polyturn.config.models.model import ModelConfig, PolicyConfig, TrainTokenizerConfig
from polyturn.config.models.reward import RewardConfig, RewardFunctionConfig
from polyturn.config.models.rollout import RolloutConfig
from polyturn.config.models.run import CompatConfig, DumpConfig, RunConfig, TrackerConfig

__all__ = [
    "ActorsConfig", "AlgorithmConfig", "ClusterConfig", "CompatConfig", "DataConfig", "DumpConfig", "EnvConfig",
    "EvalConfig", "EvalSetConfig", "ModelConfig", "PolicyConfig", "RewardConfig", "RewardFunctionConfig", "RolloutConfig",
    "RunConfig", "TaskSourceConfig", "TrackerConfig", "TrainTokenizerConfig",
]  # fmt: skip
