"""The configuration of a run as frozen pydantic models, with the type, default and meaning of every key.

    run.py     RunConfig: the root, a key for each section; compat, dump and tracking
    model.py   model and policies         data.py   data and evaluation         rollout.py   rollout and its tools
    algorithm.py    reward.py    env.py    cluster.py

A section that occurs several times (optimizers of the policy, the critic and the warm start; tasks for training and
evaluation; models, engines and sampling of the run and of further policies) is one class. Occurrences may have other
defaults, never other keys. The options of a part are a dataclass in its package (`engines/options.py`, `tools/options.py`,
…), used here directly.

A config file is YAML with these keys. `config/load.py` reads it, and `build` makes objects from it. Paths are relative to
the config file. A plug-in is named by a registered name, `package.module:Attr` or `file.py:Attr`.
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
