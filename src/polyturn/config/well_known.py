"""Other trainers' names of settings, with polyturn's equivalents for Python and the command line.

    suggestion("learning_rate", 1e-5)   ->  "train.optim.lr=1e-05"
    WELL_KNOWN["batch_size"].keys       ->  several keys, from which the user has to choose

Error messages about unknown keys, keywords and options use it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

MAX_VALUE = 60
"""Largest number of characters of a value in a suggestion."""


class WellKnown(NamedTuple):
    """The equivalent of another trainer's name."""

    keys: tuple[str, ...] = ()
    """The key for the unchanged value. If there are several, the user has to choose."""
    write: str = ""
    """Text for a configuration, if the value cannot be used unchanged; `{value}` stands for the user's value."""
    call: str = ""
    """Text for Python, if it is more than the key as a keyword."""


_KEYS: Mapping[str, str] = {
    "lora_rank": "model.lora.rank",
    "lora_alpha": "model.lora.alpha",
    # Batch sizes and length
    "num_generations n": "train.group_size",
    "train_batch_size": "train.groups_per_step",
    "batch_size": "train.groups_per_step train.group_size warm_start.batch_size",
    "num_iterations ppo_epochs": "train.passes",
    "ppo_max_token_len_per_gpu": "train.max_tokens_per_batch",
    "max_steps total_training_steps": "train.steps",
    "num_train_epochs total_epochs": "train.epochs",
    # Lengths of prompts and completions
    "max_completion_length max_new_tokens": "rollout.limits.max_tokens_per_turn",
    "max_response_length response_length": "rollout.limits.max_tokens_per_turn rollout.limits.max_tokens",
    "max_prompt_length prompt_length": "rollout.limits.max_prompt_tokens",
    "max_model_len max_seq_length": "rollout.limits.max_context",
    "max_assistant_turns": "rollout.limits.max_turns",
    # Optimizer and loss
    "learning_rate": "train.optim.lr",
    "top_entropy_quantile": "algorithm.high_entropy_share",
    "use_bias_correction_kl": "algorithm.kl.importance",
    "lr_scheduler_type": "train.optim.schedule",
    "warmup_ratio lr_warmup_steps lr_warmup_steps_ratio": "train.optim.warmup_steps",
    "grad_clip": "train.optim.max_grad_norm",
    "beta kl_coef kl_loss_coef": "algorithm.kl.coef",
    "entropy_coeff": "algorithm.entropy_coef",
    "epsilon_high clip_ratio_high": "algorithm.loss.clip_high",
    "clip_ratio_low": "algorithm.loss.clip_low",
    "clip_ratio_c": "algorithm.loss.dual_clip",
    "adv_estimator": "algorithm.advantage",
    "loss_agg_mode": "algorithm.aggregate",
    # Outputs, evaluation and devices
    "output_dir default_local_dir": "out",
    "run_name experiment_name": "name",
    "save_steps save_freq save_every": "train.checkpoint_every",
    "save_total_limit": "train.keep_checkpoints",
    "n_gpus_per_node": "train.distributed.ranks",
}
"""Names -> the key for the unchanged value, or several keys."""

_TEXTS: Mapping[str, WellKnown] = {
    # Tasks, model, reward
    "dataset train_dataset": WellKnown(write="data.train.files (or dataset, generator)", call="tasks=dataset"),
    "eval_dataset": WellKnown(write="evaluation.data.files (or dataset, generator)", call="eval_tasks=dataset"),
    "model_name_or_path": WellKnown(("model.path",), call="model={value}"),
    "train_files": WellKnown(("data.train.files",), call="tasks={value}"),
    "val_files": WellKnown(("evaluation.data.files",), call="eval_tasks={value}"),
    "processing_class": WellKnown(write="model.tokenizer", call="tokenizer=tokenizer"),
    "reward_funcs": WellKnown(
        write="reward.function=file.py:my_reward", call="reward=my_reward, a function of one trajectory"
    ),
    "args": WellKnown(
        write="each of its settings as a key", call="its settings as keywords: steps=100, lr=1e-6, group_size=8"
    ),
    "peft_config": WellKnown(write="model.lora.rank=16", call="**{'model.lora.rank': 16}"),
    "callbacks": WellKnown(write="tracking", call="on_step=my_function, or for step in polyturn.steps(…): …"),
    "optimizers": WellKnown(
        write="train.optim.lr, train.optim.weight_decay, train.optim.schedule",
        call="lr=1e-6, weight_decay=0.0, schedule='cosine'",
    ),
    "environment environments": WellKnown(write="env=game.py:Game", call="env=Game"),
    "environment_factory": WellKnown(write="env=trl:game.py:Game", call="env='trl:game.py:Game'"),
    "rollout_func": WellKnown(
        write="rollout.scheduler=file.py:MyScheduler",
        call="scheduler=MyScheduler, a subclass of polyturn.MultiTurnScheduler",
    ),
    "actor_rollout_ref trainer": WellKnown(
        write="its keys by their names here (polyturn config migrate FILE translates a whole file)",
        call="its keys as keywords: group_size=8, lr=1e-6 "
        "(in a shell, polyturn config migrate FILE translates a whole file)",
    ),
    # Batch sizes and length
    "per_device_train_batch_size": WellKnown(
        write="train.groups_per_step=16 train.group_size=8; train.max_tokens_per_batch bounds a micro-batch",
        call="groups_per_step=16, group_size=8; **{'train.max_tokens_per_batch': 16384} bounds a micro-batch",
    ),
    "gradient_accumulation_steps": WellKnown(
        write="train.groups_per_step: a step has that many groups, in micro-batches that fit into memory",
        call="groups_per_step=16: a step has that many groups, in micro-batches that fit into memory",
    ),
    "ppo_mini_batch_size": WellKnown(
        write="train.minibatches=4, the number of updates per step", call="minibatches=4, the number of updates per step"
    ),
    "ppo_micro_batch_size ppo_micro_batch_size_per_gpu": WellKnown(
        write="train.max_tokens_per_batch, the tokens of a micro-batch", call="**{'train.max_tokens_per_batch': 16384}"
    ),
    # Loss
    "epsilon clip_ratio": WellKnown(
        write="algorithm.loss.clip_low={value} algorithm.loss.clip_high={value}",
        call="clip_low={value}, clip_high={value}",
    ),
    "loss_type": WellKnown(write="algorithm.loss=ppo_clip", call="loss='ppo_clip'"),
    "scale_rewards": WellKnown(write="algorithm.advantage.norm_by_std=true", call="norm_by_std=True"),
    # Outputs, evaluation and devices
    "eval_steps eval_every test_freq": WellKnown(("evaluation.every",), call="**{'evaluation.every': {value}}"),
    "val_before_train": WellKnown(("evaluation.before",), call="**{'evaluation.before': {value}}"),
    "logging_steps": WellKnown(
        write="nothing: every step is recorded, in metrics.jsonl", call="nothing: every step is recorded, in run.metrics"
    ),
    "report_to": WellKnown(write="tracking=[{value}]", call="tracking=[{value}]"),
    "logger": WellKnown(write="tracking=[wandb]", call="tracking=['wandb']"),
    "resume_from_checkpoint": WellKnown(write="--resume on the command line", call="resume=True"),
    "use_vllm": WellKnown(write="engine.kind=vllm", call="engine='vllm'"),
    "bf16": WellKnown(write="model.dtype=bfloat16", call="dtype='bfloat16'"),
}
"""Names -> the texts to write."""

WELL_KNOWN: Mapping[str, WellKnown] = {
    name: known
    for names, known in {**{names: WellKnown(tuple(keys.split())) for names, keys in _KEYS.items()}, **_TEXTS}.items()
    for name in names.split()
}


def suggestion(name: str, value: Any) -> str:
    """Return polyturn's setting for another trainer's name, with the user's value; "" for other names."""
    known = WELL_KNOWN.get(name, WellKnown())
    text = str(value).lower() if isinstance(value, bool) else _short(str(value), value)
    return known.write.replace("{value}", text) or " or ".join(f"{key}={text}" for key in known.keys)


def call_for(name: str, value: Any, *, keyword_of: Callable[[str], str | None]) -> str:
    """Return the Python call; `keyword_of` returns the keyword for a key, None if it has none."""
    known, text = WELL_KNOWN.get(name, WellKnown()), _short(repr(value), value)
    keys = [(keyword_of(key), key) for key in known.keys]
    as_keys = [f"{keyword}={text}" if keyword else f"**{{{key!r}: {text}}}" for keyword, key in keys]
    return known.call.replace("{value}", text) or " or ".join(as_keys)


def _short(text: str, value: Any) -> str:
    is_plain = isinstance(value, str | bool | int | float | list | tuple | dict)
    return text if is_plain and len(text) <= MAX_VALUE and "\n" not in text else "…"
