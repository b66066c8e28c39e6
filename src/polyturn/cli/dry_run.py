"""`polyturn train --dry-run`: everything a run would start from, shown before any time is spent on it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import yaml

from polyturn import build
from polyturn.cli.console import Output
from polyturn.config.load import load_config
from polyturn.config.models import PolicyConfig, RunConfig
from polyturn.config.models.policies import SELF
from polyturn.core.run_loop import run_loop
from polyturn.core.secret import masked
from polyturn.core.task import Task
from polyturn.rollout.context import RolloutContext
from polyturn.rollout.episode import Episode
from polyturn.training import hf


async def shown_first(context: RolloutContext, task: Task) -> Task:
    """Return a task with the prompt that an episode of it shows first, where its environment writes that.

    Raises:
        SchedulerError: the environment cannot be made or begun.
    """
    episode, scheduler = Episode(context, task, id="dry-run"), context.scheduler_for_episode()
    episode.backstage.bridge.enter()
    try:
        await episode.call(scheduler, scheduler.on_trajectory_start, episode)
        return dataclasses.replace(task, prompt=episode.messages)
    finally:
        await episode.call(scheduler, scheduler.on_trajectory_end, episode)


def show(parts: build.Parts, tasks: build.RunTasks, resolved: Mapping[str, Any], out: Output) -> None:
    """Print what the config changes, the first task as the engine will see it, and estimates of memory and cost."""
    task = tasks.train[0]
    if parts.place.config.env is not None:
        task = run_loop(shown_first(parts.context, task))
    ids = parts.context.encoder_for(task).start(task.prompt)
    defaults = load_config(RunConfig, None, ["model.path=none"]).resolved
    defaults["model"]["path"] = None
    out.text("settings       those that differ from the defaults; `polyturn config CONFIG` prints all of them\n")
    out.text(yaml.safe_dump(masked(changed(resolved, defaults)), sort_keys=False, allow_unicode=True))
    out.text(f"first task     {task.id}: {len(ids)} prompt tokens")
    out.text(parts.context.codec.decode(ids))
    out.text(" ".join(map(str, ids.tolist())), style="dim")
    out.text(f"\ntemplate       {parts.template.strategy}: {parts.template.reason}")
    sets = ", ".join(f"{s.name} ({len(s.tasks)} tasks)" for s in tasks.eval_sets) or "none"
    for name, one in parts.place.config.policies.items():
        out.text(f"policy         {name}: {_who(one)}; context of {parts.policies.by_name[name].max_context} tokens")
    out.text(f"tasks          {len(tasks.train)} to train on; evaluation sets: {sets}\n")
    for name, value in estimates(parts, num_prompt_tokens=len(ids)).items():
        out.text(f"{name:<34}{value}")


def _who(one: PolicyConfig) -> str:
    """Say whose words a further policy's are."""
    if one.model == SELF:
        when = "when training starts" if one.refresh_every is None else f"every {one.refresh_every} steps"
        return f"a copy of the policy that is trained, taken {when}"
    return str(one.checkpoint or (one.model if isinstance(one.model, str) else "a model with settings of its own"))


def changed(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings whose values are not the defaults.

    {"train": {"steps": 5, "epochs": 1}}, with the defaults {"train": {"steps": 9, "epochs": 1}}  ->  {"train": {"steps": 5}}
    """
    differ = {}
    for key, value in values.items():
        default = defaults.get(key)
        if isinstance(value, Mapping) and isinstance(default, Mapping) and value != default:
            differ[key] = changed(value, default)
        elif key not in defaults or value != default:
            differ[key] = written(value) if default is None else value
    return differ


def written(section: Any) -> Any:
    """Return a section that is absent by default without what nobody set: null, and empty mappings."""
    if not isinstance(section, Mapping):
        return section
    return {key: written(value) for key, value in section.items() if value is not None and value != {}}


def estimates(parts: build.Parts, *, num_prompt_tokens: int) -> dict[str, str]:
    """Return upper estimates of what a run needs, in words. Lengths are the limits, so real runs need less."""
    config = parts.place.config
    parameters = hf.count_parameters(parts.model)
    size = 4 if config.model.dtype == "float32" else 2
    turns = config.rollout.limits.max_turns or 8
    per_turn = config.rollout.limits.max_tokens_per_turn or 512
    longest = min(parts.max_context, num_prompt_tokens + turns * per_turn)
    episodes = config.train.groups_per_step * config.train.group_size
    copies = 4 + (config.algorithm.kl_coef > 0)  # weights, gradients, two AdamW moments, a reference
    flops = 6 * parameters * longest * episodes
    return {
        "parameters": f"{parameters / 1e6:.2f} M",
        "weights, gradients, optimizer": f"{parameters * size * copies / 2**20:.0f} MiB",
        "KV cache": f"{_kv_bytes(parts) / 2**20:.0f} MiB for {config.engine.num_slots} slots of {parts.max_context} tokens",
        "episodes": f"{episodes} a step, {episodes * config.train.steps} in all",
        "tokens a step, at most": f"{longest * episodes}",
        "training cost a step, at most": f"{flops / 1e12:.2f} TFLOP",
    }


def _kv_bytes(parts: build.Parts) -> int:
    config = parts.model.config.get_text_config().to_dict()
    heads = config.get("num_key_value_heads") or config["num_attention_heads"]
    width = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    size = next(parts.model.parameters()).element_size()
    slots = parts.place.config.engine.num_slots
    return 2 * config["num_hidden_layers"] * heads * width * size * slots * parts.max_context
