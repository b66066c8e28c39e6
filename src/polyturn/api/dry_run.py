"""The dry run: check a training run and report its settings, first task and estimates, without starting it.

report = polyturn.train(..., dry_run=True)     report.settings, report.first_task, report.estimates, report.verdict
polyturn train CONFIG --dry-run                 prints str(report)
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import yaml

from polyturn import build
from polyturn.build.memory_plan import (
    Demand,
    MemoryVerdict,
    columns,
    layout_of,
    load_of,
    memory_of,
    parameters_of,
    verdict_of,
)
from polyturn.build.ranks import row_width
from polyturn.config.load import load_config
from polyturn.config.models import SELF, PolicyConfig, RunConfig
from polyturn.core.errors import ConfigError
from polyturn.core.secrets import masked
from polyturn.core.task import Task
from polyturn.engines.options import EmbeddedOptions, ServerOptions
from polyturn.infra.loop import run_loop
from polyturn.rollout.context import RolloutContext
from polyturn.rollout.episode import Episode
from polyturn.training.memory import ModelSize, server_bytes

if TYPE_CHECKING:
    import torch


async def with_first_prompt(context: RolloutContext, task: Task) -> Task:
    """Start an episode of `task`, and return the task with the prompt that its environment writes."""
    episode, scheduler = Episode(context, task, id="dry-run"), context.scheduler_for_episode()
    episode.resources.bridge.enter()
    try:
        await episode.call(scheduler, scheduler.on_trajectory_start, episode)
        return dataclasses.replace(task, prompt=episode.messages)
    finally:
        await episode.call(scheduler, scheduler.on_trajectory_end, episode)


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRunReport:
    """The report of a dry run. `polyturn train --dry-run` prints `str(report)`."""

    config: Mapping[str, Any]
    """All settings of the run, with secrets masked."""
    settings: Mapping[str, Any]
    """The settings that differ from the defaults."""
    first_task: Task
    prompt_ids: tuple[int, ...]
    """Token ids of the first task's prompt."""
    prompt: str
    """Text of the first task's prompt, as the model reads it."""
    facts: tuple[str, ...]
    """Lines about the template's strategy, further policies, and the numbers of tasks."""
    estimates: Mapping[str, str]
    """Name -> upper estimate of memory or time, or another fact about the size of the run."""
    verdict: MemoryVerdict | None
    """Whether the run fits into this machine's memory; None if it would run on other machines."""
    obstacles: tuple[str, ...] = ()
    """Reasons why the run would not start on this machine."""

    def __str__(self) -> str:
        return self.text()

    def text(self, *, with_ids: bool = False) -> str:
        """Return the report as lines; `with_ids` adds the ids of the first prompt's tokens."""
        lines = [
            "settings       all that differ from the defaults; `polyturn config CONFIG` prints the others too\n",
            yaml.safe_dump(dict(self.settings), sort_keys=False, allow_unicode=True),
            f"first task     {self.first_task.id}: {len(self.prompt_ids)} prompt tokens",
            self.prompt,
            *([" ".join(map(str, self.prompt_ids))] if with_ids else []),
            "",
            *self.facts,
            "",
            columns({**self.estimates, **({} if self.verdict is None else {"memory": str(self.verdict)})}),
        ]
        return "\n".join(lines)

    def require_start(self) -> None:
        """Raise if the run would not start on this machine.

        Raises:
            ConfigError: with the first reason.
        """
        if self.obstacles:
            raise ConfigError(f"the run would not start on this machine: {self.obstacles[0]}")


def report_of(parts: build.Parts, tasks: build.RunTasks, resolved: Mapping[str, Any]) -> DryRunReport:
    """Return the changed settings, the first task as the engine sees it, and estimates of memory and time."""
    task = tasks.train[0]
    if parts.source.config.env is not None:
        task = run_loop(with_first_prompt(parts.context, task))
    ids = parts.context.encoder_for(task).start(task.prompt)
    defaults = load_config(RunConfig, None, ["model.path=none"]).resolved
    defaults["model"]["path"] = None
    sets = ", ".join(f"{s.name} ({len(s.tasks)} tasks)" for s in tasks.eval_sets) or "none"
    policies = [
        f"policy         {name}: {_model_text(one)}; context of {parts.policies.by_name[name].max_context} tokens"
        for name, one in parts.source.config.policies.items()
    ]
    estimates, verdict = estimates_of(parts, num_prompt_tokens=len(ids))
    return DryRunReport(
        config=masked(resolved),
        settings=masked(changed(resolved, defaults, parts.source.config.model_dump(exclude_defaults=True))),
        first_task=task,
        prompt_ids=tuple(ids.tolist()),
        prompt=parts.context.codec.decode(ids),
        facts=(
            f"template       {parts.template.strategy}: {parts.template.reason}",
            *policies,
            f"tasks          {len(tasks.train)} to train on; evaluation sets: {sets}",
        ),
        estimates=estimates,
        verdict=verdict,
        obstacles=tuple(parts.source.obstacles),
    )


def _model_text(one: PolicyConfig) -> str:
    """Describe the model of a further policy."""
    if one.model == SELF:
        when = "when training starts" if one.refresh_every is None else f"every {one.refresh_every} steps"
        return f"a copy of the trained policy, made {when}"
    return str(one.checkpoint or (one.model if isinstance(one.model, str) else "a model with separate settings"))


def changed(values: Mapping[str, Any], defaults: Mapping[str, Any], unlike_model: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that differ both from the defaults of a run and from the defaults of their own section.

    An optional section is None in `defaults`, or absent, so its keys are compared with the section's own defaults only.
    `unlike_model` has the settings that differ from those, nested like `values`.

    {"train": {"steps": 5, "epochs": 1}}, with the defaults {"train": {"steps": 9, "epochs": 1}}  ->  {"train": {"steps": 5}}
    """
    differ = {}
    for key, value in values.items():
        if key not in unlike_model or (key in defaults and value == defaults[key]):
            continue
        default, inner = defaults.get(key), unlike_model[key]
        if isinstance(value, Mapping) and isinstance(inner, Mapping):
            differ[key] = changed(value, default if isinstance(default, Mapping) else {}, inner)
        else:
            differ[key] = value
    return differ


def estimates_of(parts: build.Parts, *, num_prompt_tokens: int) -> tuple[dict[str, str], MemoryVerdict | None]:
    """Return estimates of each rank's memory and of a step's time, as text, and whether this machine has enough.

    The estimates assume the first task's prompt and turns as long as their limits. They leave out results of tools and
    messages of users, whose lengths are not known before the run.

    Memory is a rank's peak (`training.memory`) plus the engine's KV cache. The time of a step is extrapolated from a forward
    and a backward pass over a few tokens, measured on this machine; generation counts as one more forward pass.
    """
    import torch

    config = parts.source.config
    ranks = max(1, config.train.distributed.ranks)
    turns = config.rollout.limits.max_turns or 8
    per_turn = config.rollout.limits.max_tokens_per_turn or 512
    longest = min(parts.max_context, num_prompt_tokens + turns * per_turn)
    episodes = config.train.groups_per_step * config.train.group_size
    tokens = min(longest * episodes, max(longest, config.train.max_tokens_per_batch))
    layout, launch = layout_of(config), config.engine.launch if isinstance(config.engine, ServerOptions) else None
    names_gpus = launch is not None and bool(launch.devices)
    load = load_of(parts.source, tokens=tokens, on_gpu=names_gpus or torch.cuda.is_available())
    size = ModelSize.of(parts.model, engine=config.engine.kind)
    demand = Demand(size, load, parts.max_context, row_width(config))
    bytes_by_part, tables = demand.rank(ranks), demand.tables(layout)
    engine = config.engine
    if isinstance(engine, EmbeddedOptions) and parts.engine.capabilities.shares_weights:  # other caches are not known
        bytes_by_part["KV cache of the engine"] = server_bytes(size, tokens=engine.num_slots * longest)["KV cache"]
        tables["each rank"] = bytes_by_part
    devices = device_plan(config, holds_weights=build.holds_weights(parts.source))
    out = {"model": parameters_of(size), "layout": str(layout)} | devices | memory_of(tables)
    verdict = verdict_of(config, size, bytes_by_part, layout=layout, max_context=parts.max_context)
    out["episodes"] = f"{episodes} a step, {episodes * config.train.steps} in total"
    out["tokens a step"] = (
        f"about {longest * episodes} with the first task's prompt, without results of tools and users' messages; at most "
        f"{parts.max_context * episodes} (rollout.limits.max_context)"
    )
    if parts.model.device.type == "meta":
        out["time of a step"] = "not measured, because a dry run does not read the weights of such a large model"
        return out, verdict
    probe = _probe(parts.model)
    seconds = longest * episodes / ranks * (probe.forward_s + probe.backward_s + probe.forward_s) / probe.tokens
    out["time of a step"] = (
        f"about {seconds:.1f} s of computation if all turns are as long as allowed (measured here on {probe.tokens} tokens: "
        f"forward {probe.forward_s:.3f} s, backward {probe.backward_s:.3f} s; without tools, users and waiting)"
    )
    return out, verdict


def device_plan(config: RunConfig, *, holds_weights: bool = False) -> dict[str, str]:
    """Return the GPU of each rank and of each server that the run starts, the shared GPUs, and the rollout workers.

    For a cluster it returns `cluster_plan`; `holds_weights` is whether the driver loads the whole model.

    {"rank 0": "GPU 0", "rank 1": "GPU 1", "server 0": "GPU 1", "shared": "GPU 1 (rank 1, server 0)"}
    """
    ranks, engine = config.train.distributed.ranks, config.engine
    launch = engine.launch if isinstance(engine, ServerOptions) else None
    if config.cluster.address is not None:
        return cluster_plan(config, holds_weights=holds_weights)
    workers = config.cluster.workers.count
    rollout_workers = (
        {f"{workers} rollout workers": "processes on this machine; tokenizer and config, no weights"} if workers > 1 else {}
    )
    if ranks <= 1 and launch is None:
        return rollout_workers
    users: dict[str, list[str]] = {}
    gpus_of: dict[str, str] = {}
    servers = [] if launch is None else [launch.devices[n] if launch.devices else "0" for n in range(launch.replicas)]
    named = [(f"rank {n}", str(n)) for n in range(max(1, ranks))] + [(f"server {n}", gpus) for n, gpus in enumerate(servers)]
    for name, gpus in named:
        gpus_of[name] = f"GPU {gpus}"
        for gpu in gpus.split(","):
            users.setdefault(gpu.strip(), []).append(name)
    shared = [f"GPU {gpu} ({', '.join(names)})" for gpu, names in users.items() if len(names) > 1]
    return gpus_of | ({"shared": "; ".join(shared)} if shared else {}) | rollout_workers


def cluster_plan(config: RunConfig, *, holds_weights: bool) -> dict[str, str]:
    """Return the processes of a run on a cluster, with their resources and contents.

    {"driver": "…", "4 servers (vllm)": "{'GPU': 2} each, on different nodes if possible; …"}
    """
    cluster, engine = config.cluster, config.engine
    apart = "on different nodes if possible"
    weights = "one copy of the whole model" if holds_weights else "no weights"
    plan = {"driver": f"this process: the loop, the tasks, checkpoints; {weights}"}
    if isinstance(engine, ServerOptions) and engine.urls:
        plan["servers"] = f"running already: {', '.join(engine.urls)}"
    else:
        kind = "embedded engines" if engine.kind == "embedded" else f"servers ({engine.kind})"
        engines = f"{dict(cluster.engines.resources)} each, {apart}; the model's weights and the KV cache"
        plan[f"{cluster.engines.count} {kind}"] = engines
    ranks, workers = max(1, config.train.distributed.ranks), cluster.workers
    plan[f"{ranks} trainer ranks"] = f"{dict(cluster.rank_resources)} each, on as few nodes as possible; a shard"
    plan[f"{workers.count} rollout workers"] = f"{dict(workers.resources)} each, {apart}; tokenizer and config, no weights"
    return plan


_PROBES, _PROBES_S = 8, 5.0
"""Largest number of passes, including one to warm up; seconds after which no further pass starts."""


class Probe(NamedTuple):
    """The duration of a forward and a backward pass over a few tokens."""

    tokens: int
    forward_s: float
    backward_s: float


def _probe(model: torch.nn.Module, *, num_tokens: int = 64) -> Probe:
    """Return the shortest forward and backward pass of a few, after one pass to warm up, within seconds."""
    import torch

    ids = torch.zeros((1, num_tokens), dtype=torch.long, device=next(model.parameters()).device)
    forward_s, backward_s = list[float](), list[float]()
    start = time.perf_counter()
    while len(forward_s) < 2 or (len(forward_s) < _PROBES and time.perf_counter() - start < _PROBES_S):
        began = time.perf_counter()
        total = model(input_ids=ids).logits.float().mean()
        total.item()  # waits for the device
        middle = time.perf_counter()
        total.backward()
        total.item()
        forward_s.append(middle - began)
        backward_s.append(time.perf_counter() - middle)
        model.zero_grad(set_to_none=True)
    return Probe(num_tokens, min(forward_s[1:]), min(backward_s[1:]))
