"""Keywords that name a key of the configuration: its last name, its whole name, or what another trainer calls it.

    path_of("lr")  ->  ["train", "optim", "lr"]          path_of("learning_rate")  ->  ConfigError: … it is lr: lr=1e-6

Separate from `given`, which knows what may stand for a key's value.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from difflib import get_close_matches

from polyturn.config.models import RunConfig
from polyturn.config.retired import RETIRED
from polyturn.config.schema import schema_table
from polyturn.core.errors import ConfigError, did_you_mean

FIRST = ("", "train")
"""Sections whose keys have their last name to themselves, where other sections have one of that name too."""
INNER = ("train.optim", "train.distributed", "rollout.limits", "rollout.sampling")
"""Sections within sections whose keys go by their last name; those of others are written whole."""
PARTS = ("algorithm.advantage", "algorithm.loss")
"""Of these, the arguments whose names no other key has."""
ELSEWHERE: Mapping[str, str] = {
    "reward_funcs": "reward=right, a function of one trajectory",
    "dataset": "tasks=dataset",
    "train_dataset": "tasks=dataset",
    "eval_dataset": "eval_tasks=dataset",
    "processing_class": "tokenizer=tokenizer",
    "args": "its settings as keywords: steps=100, lr=1e-6, group_size=8",
    "peft_config": "**{'model.lora.rank': 16}",
    "callbacks": "for step in polyturn.steps(…): …",
    "optimizers": "lr=1e-6, weight_decay=0.0, schedule='cosine'",
    "environment": "env=Game",
    "environments": "env=Game",
    "environment_factory": "env='trl:game.py:Game'",
    "rollout_func": "scheduler=MyScheduler, a subclass of polyturn.MultiTurnScheduler",
    "num_generations": "group_size=8",
    "max_completion_length": "max_tokens_per_turn=512",
    "max_new_tokens": "max_tokens_per_turn=512",
    "max_prompt_length": "max_prompt_tokens=512",
    "learning_rate": "lr=1e-6",
    "max_steps": "steps=100",
    "num_train_epochs": "epochs=1",
    "output_dir": "out='runs'",
    "run_name": "name='mine'",
    "beta": "**{'algorithm.kl.coef': 0.001}",
    "epsilon": "clip_low=0.2, clip_high=0.2",
    "epsilon_high": "clip_high=0.28",
    "loss_type": "loss='ppo_clip'",
    "scale_rewards": "norm_by_std=True",
    "num_iterations": "minibatches=2",
    "per_device_train_batch_size": "groups_per_step=16, group_size=8",
    "gradient_accumulation_steps": "groups_per_step=16: a step has that many groups, in as many pieces as memory asks",
    "use_vllm": "engine='vllm'",
    "bf16": "dtype='bfloat16'",
    "logging_steps": "nothing: every step is recorded, in run.metrics",
    "save_steps": "checkpoint_every=20",
    "report_to": "tracking=['wandb']",
    "resume_from_checkpoint": "resume=True",
    "lr_scheduler_type": "schedule='cosine'",
}
"""Other trainers' names of a keyword -> ours."""


@functools.cache
def _keys() -> Mapping[str, tuple[str, ...]]:
    """Return the keys of a run by their last names; sections go by their whole name alone."""
    found: dict[str, list[str]] = {}
    of_parts: dict[str, list[str]] = {}
    for row in schema_table(RunConfig):
        if "<" in row.key or "[" in row.key:
            continue
        above, _, last = row.key.rpartition(".")
        if "." in above and above not in (*INNER, *PARTS):
            continue
        if row.type != "section" or "." not in row.key:
            (of_parts if above in PARTS else found).setdefault(last, []).append(row.key)
    return {name: tuple(dict.fromkeys(keys)) for name, keys in (of_parts | found).items()}


OWN = (
    *("model", "tokenizer", "tasks", "eval_tasks", "tools", "interaction", "reward", "scheduler", "engine"),
    *("config", "resume", "ray"),
)
"""Keywords of the functions themselves, for the nearest one to a misspelt keyword."""


def path_of(name: str) -> list[str]:
    if "." in name:
        return name.split(".")
    keys = _keys().get(name, ())
    if not keys and name in ELSEWHERE:
        raise ConfigError(f"there is no keyword {name!r}; write {ELSEWHERE[name]}")
    if not keys and (retired := [then.says for key, then in RETIRED.items() if key.rpartition(".")[2] == name]):
        raise ConfigError(f"there is no keyword {name!r} any more; {retired[0]}")
    if not keys:
        known = [*OWN, *_keys()]
        near = did_you_mean(name, known) if get_close_matches(name, known) else ""
        for theirs in [] if near else get_close_matches(name, ELSEWHERE, n=1):
            near = f" If you mean {theirs!r}, write {ELSEWHERE[theirs]}."
        raise ConfigError(
            f"there is no keyword {name!r}.{near} A keyword is one of "
            f"{', '.join(OWN)}, a section of the configuration, or the last part of a key of it, such as steps or max_turns"
        )
    if name in keys:
        return [name]
    if len(keys) > 1:
        chosen = [key for section in FIRST for key in keys if key.rpartition(".")[0] == section]
        if not chosen:
            whole = ", ".join(f"**{{{key!r}: …}}" for key in keys[:4])
            raise ConfigError(f"the keyword {name!r} may be any of {', '.join(keys)}; write the whole key: {whole}")
        return chosen[0].split(".")
    return keys[0].split(".")
