"""The composition root: make the live objects of a run from a `RunConfig`.

    RunConfig  ->  tokenizer, model  ->  Codec, engine, ModelPolicy  ->  RolloutContext  ->  Trainer
    source         model.py              engine.py, parts.py             tasks.py             training.py

Mistakes in a configuration are reported here, before any training time is spent: every function raises `ConfigError` for
a part that the configuration names and that does not exist, cannot be made or does not fit the others, and `DataError` for
tasks that cannot be read. Each file imports only files to its left. Other packages take no config.
"""

from polyturn.build.checks import (
    check_before_weights,
    check_eval_sets,
    check_first_tasks,
    check_run,
    check_training,
    check_warm_start,
    fitting,
    settle,
)
from polyturn.build.cluster import check_cluster, check_workers, cluster_parts, pool_of, start_ranks, with_workers
from polyturn.build.endpoint import build_endpoint_context, check_endpoint_run, for_endpoint
from polyturn.build.engine import sends_adapter, untrained
from polyturn.build.environments import close_adapters
from polyturn.build.model import build_codec, build_model
from polyturn.build.parts import Parts, build_parts, build_rewarder, build_scheduler, check_plugins, rollout_pool
from polyturn.build.policies import build_policies
from polyturn.build.ranks import check_ranks, holds_weights, with_rank_here
from polyturn.build.tasks import (
    RunTasks,
    build_eval_sets,
    build_run_tasks,
    build_tasks,
    build_train_tasks,
)
from polyturn.build.training import (
    build_estimator,
    build_policy,
    build_records,
    build_trainer,
    exporter,
    stored_exporter,
    warm_start_samples,
)
from polyturn.build.trial import try_credit
from polyturn.config.config_source import ConfigSource, model_folder

__all__ = [
    "ConfigSource", "Parts", "RunTasks", "build_codec", "build_endpoint_context", "build_estimator", "build_eval_sets",
    "build_model", "build_parts", "build_policies", "build_policy", "build_records", "build_rewarder",
    "build_run_tasks", "build_scheduler", "build_tasks", "build_train_tasks", "build_trainer", "check_before_weights",
    "check_cluster", "check_endpoint_run", "check_eval_sets", "check_first_tasks", "check_plugins", "check_ranks",
    "check_run", "check_training", "check_warm_start", "check_workers", "close_adapters", "cluster_parts", "exporter",
    "fitting", "for_endpoint", "holds_weights", "model_folder", "pool_of", "rollout_pool", "sends_adapter", "settle",
    "start_ranks", "stored_exporter", "try_credit", "untrained", "warm_start_samples", "with_rank_here", "with_workers",
]  # fmt: skip
