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


def _is(*keys: str, call: str = "") -> WellKnown:
    return WellKnown(keys, call=call)


_TASKS = "data.train.files (or dataset, generator)"
_EVAL_TASKS = "evaluation.data.files (or dataset, generator)"
_PER_DEVICE = "train.groups_per_step=16 train.group_size=8; train.max_tokens_per_batch bounds a micro-batch"
_CLIP = "algorithm.loss.clip_low={value} algorithm.loss.clip_high={value}"
_MINIBATCHES = "train.minibatches=4, the number of updates per step"
_PIECES = "train.max_tokens_per_batch, the tokens of a micro-batch"
_WITH_MINIBATCHES = "minibatches=4, the number of updates per step"
_OF_SECTION = WellKnown(
    write="its keys by their names here (polyturn config migrate FILE translates a whole file)",
    call="its keys as keywords: group_size=8, lr=1e-6 (in a shell, polyturn config migrate FILE translates a whole file)",
)
_EVERY = "**{'evaluation.every': {value}}"

WELL_KNOWN: Mapping[str, WellKnown] = {
    # Tasks, model, reward
    "dataset": WellKnown(write=_TASKS, call="tasks=dataset"),
    "train_dataset": WellKnown(write=_TASKS, call="tasks=dataset"),
    "eval_dataset": WellKnown(write=_EVAL_TASKS, call="eval_tasks=dataset"),
    "train_files": _is("data.train.files", call="tasks={value}"),
    "val_files": _is("evaluation.data.files", call="eval_tasks={value}"),
    "model_name_or_path": _is("model.path", call="model={value}"),
    "processing_class": WellKnown(write="model.tokenizer", call="tokenizer=tokenizer"),
    "reward_funcs": WellKnown(
        write="reward.function=file.py:my_reward", call="reward=my_reward, a function of one trajectory"
    ),
    "args": WellKnown(
        write="each of its settings as a key", call="its settings as keywords: steps=100, lr=1e-6, group_size=8"
    ),
    "peft_config": WellKnown(write="model.lora.rank=16", call="**{'model.lora.rank': 16}"),
    "lora_rank": _is("model.lora.rank"),
    "lora_alpha": _is("model.lora.alpha"),
    "callbacks": WellKnown(write="tracking", call="on_step=my_function, or for step in polyturn.steps(…): …"),
    "optimizers": WellKnown(
        write="train.optim.lr, train.optim.weight_decay, train.optim.schedule",
        call="lr=1e-6, weight_decay=0.0, schedule='cosine'",
    ),
    "environment": WellKnown(write="env=game.py:Game", call="env=Game"),
    "environments": WellKnown(write="env=game.py:Game", call="env=Game"),
    "environment_factory": WellKnown(write="env=trl:game.py:Game", call="env='trl:game.py:Game'"),
    "rollout_func": WellKnown(
        write="rollout.scheduler=file.py:MyScheduler",
        call="scheduler=MyScheduler, a subclass of polyturn.MultiTurnScheduler",
    ),
    "actor_rollout_ref": _OF_SECTION,
    "trainer": _OF_SECTION,
    # Batch sizes and length
    "num_generations": _is("train.group_size"),
    "n": _is("train.group_size"),
    "train_batch_size": _is("train.groups_per_step"),
    "batch_size": _is("train.groups_per_step", "train.group_size", "warm_start.batch_size"),
    "per_device_train_batch_size": WellKnown(
        write=_PER_DEVICE,
        call="groups_per_step=16, group_size=8; **{'train.max_tokens_per_batch': 16384} bounds a micro-batch",
    ),
    "gradient_accumulation_steps": WellKnown(
        write="train.groups_per_step: a step has that many groups, in micro-batches that fit into memory",
        call="groups_per_step=16: a step has that many groups, in micro-batches that fit into memory",
    ),
    "ppo_mini_batch_size": WellKnown(write=_MINIBATCHES, call=_WITH_MINIBATCHES),
    "num_iterations": _is("train.passes"),
    "ppo_epochs": _is("train.passes"),
    "ppo_micro_batch_size": WellKnown(write=_PIECES, call="**{'train.max_tokens_per_batch': 16384}"),
    "ppo_micro_batch_size_per_gpu": WellKnown(write=_PIECES, call="**{'train.max_tokens_per_batch': 16384}"),
    "ppo_max_token_len_per_gpu": _is("train.max_tokens_per_batch"),
    "max_steps": _is("train.steps"),
    "total_training_steps": _is("train.steps"),
    "num_train_epochs": _is("train.epochs"),
    "total_epochs": _is("train.epochs"),
    # Lengths of prompts and completions
    "max_completion_length": _is("rollout.limits.max_tokens_per_turn"),
    "max_new_tokens": _is("rollout.limits.max_tokens_per_turn"),
    "max_response_length": _is("rollout.limits.max_tokens_per_turn", "rollout.limits.max_tokens"),
    "response_length": _is("rollout.limits.max_tokens_per_turn", "rollout.limits.max_tokens"),
    "max_prompt_length": _is("rollout.limits.max_prompt_tokens"),
    "prompt_length": _is("rollout.limits.max_prompt_tokens"),
    "max_model_len": _is("rollout.limits.max_context"),
    "max_seq_length": _is("rollout.limits.max_context"),
    "max_assistant_turns": _is("rollout.limits.max_turns"),
    # Optimizer and loss
    "learning_rate": _is("train.optim.lr"),
    "top_entropy_quantile": _is("algorithm.high_entropy_share"),
    "use_bias_correction_kl": _is("algorithm.kl.importance"),
    "lr_scheduler_type": _is("train.optim.schedule"),
    "warmup_ratio": _is("train.optim.warmup_steps"),
    "lr_warmup_steps": _is("train.optim.warmup_steps"),
    "lr_warmup_steps_ratio": _is("train.optim.warmup_steps"),
    "grad_clip": _is("train.optim.max_grad_norm"),
    "beta": _is("algorithm.kl.coef"),
    "kl_coef": _is("algorithm.kl.coef"),
    "kl_loss_coef": _is("algorithm.kl.coef"),
    "entropy_coeff": _is("algorithm.entropy_coef"),
    "epsilon": WellKnown(write=_CLIP, call="clip_low={value}, clip_high={value}"),
    "clip_ratio": WellKnown(write=_CLIP, call="clip_low={value}, clip_high={value}"),
    "epsilon_high": _is("algorithm.loss.clip_high"),
    "clip_ratio_low": _is("algorithm.loss.clip_low"),
    "clip_ratio_high": _is("algorithm.loss.clip_high"),
    "clip_ratio_c": _is("algorithm.loss.dual_clip"),
    "adv_estimator": _is("algorithm.advantage"),
    "loss_type": WellKnown(write="algorithm.loss=ppo_clip", call="loss='ppo_clip'"),
    "loss_agg_mode": _is("algorithm.aggregate"),
    "scale_rewards": WellKnown(write="algorithm.advantage.norm_by_std=true", call="norm_by_std=True"),
    # Outputs, evaluation and devices
    "output_dir": _is("out"),
    "default_local_dir": _is("out"),
    "run_name": _is("name"),
    "experiment_name": _is("name"),
    "save_steps": _is("train.checkpoint_every"),
    "save_freq": _is("train.checkpoint_every"),
    "save_every": _is("train.checkpoint_every"),
    "save_total_limit": _is("train.keep_checkpoints"),
    "eval_steps": _is("evaluation.every", call=_EVERY),
    "eval_every": _is("evaluation.every", call=_EVERY),
    "test_freq": _is("evaluation.every", call=_EVERY),
    "val_before_train": _is("evaluation.before", call="**{'evaluation.before': {value}}"),
    "logging_steps": WellKnown(
        write="nothing: every step is recorded, in metrics.jsonl", call="nothing: every step is recorded, in run.metrics"
    ),
    "report_to": WellKnown(write="tracking=[{value}]", call="tracking=[{value}]"),
    "logger": WellKnown(write="tracking=[wandb]", call="tracking=['wandb']"),
    "resume_from_checkpoint": WellKnown(write="--resume on the command line", call="resume=True"),
    "use_vllm": WellKnown(write="engine.kind=vllm", call="engine='vllm'"),
    "bf16": WellKnown(write="model.dtype=bfloat16", call="dtype='bfloat16'"),
    "n_gpus_per_node": _is("train.distributed.ranks"),
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
