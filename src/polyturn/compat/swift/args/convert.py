"""Converters for arguments of ms-swift whose native form depends on more than their own value.

Each function reads arguments from a `Source` and writes native keys to it; `keys.yaml` maps arguments to functions.
"""

from __future__ import annotations

import logging
import math
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from polyturn.compat.swift.args.convert_loss import (
    advantage,
    correction,
    has_only_teacher,
    kl_in_reward,
    lora,
    loss_type,
    ref_model,
    resample,
    teacher,
    uses_gym,
)
from polyturn.compat.swift.args.convert_megatron import decay, iterations, megatron, put_epochs, updates_per_rollout
from polyturn.config.translate.source import Source

logger = logging.getLogger(__name__)

_HUB = re.compile(r"(?:(?P<hub>hf|ms)::)?(?P<name>[\w-][\w.-]*/[\w.-]+)(?::(?P<subset>[\w.-]+))?", re.IGNORECASE)
"""A data set of a hub, optionally with a configuration."""
_READ = (".jsonl", ".parquet", ".ndjson")
_FILES = (*_READ, ".json", ".csv", ".tsv", ".txt", ".arrow", ".gz", ".zip")
"""Endings of files with rows."""

NO_LIMIT_TURNS = 100
"""Number of turns for `max_turns: null`, because an episode must end."""
REWARD_OPTIONS = (
    "cosine_min_len_value_wrong", "cosine_max_len_value_wrong", "cosine_min_len_value_correct",
    "cosine_max_len_value_correct", "cosine_max_len", "repetition_n_grams", "repetition_max_penalty", "soft_max_length",
    "soft_cache_length",
    "max_completion_length",
)  # fmt: skip


def model(s: Source) -> None:
    """Set the model: a folder or a name on the hub."""
    path = str(s.get("model", ""))
    if (folder := Path(os.path.expanduser(path))).is_dir():
        s.put_path("model.path", str(folder), by="model")
    else:
        s.put("model.path", path, by="model")


def plugins(s: Source) -> None:
    """Set the plug-in files."""
    s.put_path("plugins", [str(f) for f in as_list(s.get("external_plugins"))], by="external_plugins")


def dataset(s: Source) -> None:
    """Set the training files, or the data set on the hub; `file#500` uses the first 500 rows."""
    _rows(s, "dataset", "data.train")


def val_dataset(s: Source) -> None:
    """Set the evaluation data."""
    if not _rows(s, "val_dataset", "evaluation.data"):
        return
    sampling = {"temperature": s.get("temperature", 0.9)}
    s.put(
        "evaluation.sets",
        {"val": {"samples": s.whole("num_generations_eval", 1, least=1), "sampling": sampling}},
        by="val_dataset",
    )


def columns(s: Source) -> None:
    """Set the names of columns. ms-swift maps columns to fields, and polyturn maps fields to columns."""
    columns = s.get("columns", {})
    if not isinstance(columns, Mapping) or not all(
        isinstance(name, str) and name for pair in columns.items() for name in pair
    ):
        s.refuse("columns", 'map each column of the files to the field that it holds, as JSON: {"question": "query"}')
        return
    names = list(columns.values())
    if {"query", "prompt"} <= {*names}:
        s.refuse("columns", "two columns would be the prompt, as query and prompt; keep one of them")
        return
    if twice := next((name for name in names if names.count(name) > 1), None):
        s.refuse("columns", f"two columns would be {twice!r}; keep one of them")
        return
    renamed = {name: own for name, own in zip(names, columns, strict=True) if name != own}
    for part, of in (("data.train", "dataset"), ("evaluation.data", "val_dataset")):
        if renamed and s.get(of):
            s.put(f"{part}.columns", renamed, by="columns")


def system(s: Source) -> None:
    """Set the system message of rows without one: a text, or the content of a file."""
    text = str(s.get("system", ""))
    if text.endswith((".txt", ".md")):
        if not os.path.isfile(text):
            s.refuse("system", "there is no such file; its path is relative to the working directory")
            return
        text = Path(text).read_text(encoding="utf-8")
    if text:
        s.put("data.train.system", text, by="system")
        if s.get("val_dataset") is not None:
            s.put("evaluation.data.system", text, by="system")


def rewards(s: Source) -> None:
    """Set the reward functions, with their weights and options."""
    names = [str(n) for n in as_list(s.get("reward_funcs"))]
    weights = s.get("reward_weights")
    use_gym = uses_gym(s)
    if has_only_teacher(s):
        for key in ("val_dataset", "reward_weights"):
            if s.get(key):
                s.refuse(key, "there are no rewards; name reward_funcs, or remove it")
        return
    if not names and not use_gym:
        s.refuse(
            "reward_funcs", f"there is no reward: name functions, or set use_gym_env with an environment{_of_server(s)}"
        )
        return
    num = len(names) + use_gym
    if weights is not None and len(as_list(weights)) != num:
        named = ", ".join([*names, *["gym"] * use_gym])
        s.refuse("reward_weights", f"the number of rewards is {num} ({named}); give as many weights")
        return
    if not all(isinstance(w, int | float) and math.isfinite(w) for w in as_list(weights)):
        s.refuse("reward_weights", "every weight must be a finite number")
        return
    if "soft_overlong" in names and s.get("soft_cache_length") is None:
        s.refuse("soft_cache_length", "The soft_cache_length must be set when using soft overlong rewards.")
        return
    kwargs: dict[str, Any] = {"names": names, "use_gym_env": use_gym}
    if weights is not None:
        kwargs["weights"] = [float(w) for w in as_list(weights)]
    if options := {name: s.values[name] for name in REWARD_OPTIONS if s.get(name) is not None}:
        kwargs["options"] = options
    s.put("reward.function", {"name": "polyturn.compat.swift.reward_adapter:score", **kwargs}, by="reward_funcs")


def scheduler(s: Source) -> None:
    """Set the scheduler and its limit on turns."""
    name, environment = s.get("multi_turn_scheduler"), s.get("gym_env")
    if name is None and (environment is not None or uses_gym(s)):
        name = "gym_scheduler"
    stops = [str(w) for w in as_list(s.get("stop_words"))]
    if name is None:
        if s.get("vllm_mode") == "server" and "multi_turn_scheduler" not in s.written:
            s.notes["vllm_mode"] = (
                "no rollout server is used, and multi_turn_scheduler is not set, so every episode is a single turn; if "
                "`swift rollout` had a multi_turn_scheduler, set it here too, with max_turns and external_plugins"
            )
        if stops:
            why = "stop words need a multi_turn_scheduler; the model's end token always ends a turn"
            s.refuse("stop_words", why + _of_server(s))
        s.put("rollout.scheduler", "single_turn", by="multi_turn_scheduler")
        s.put("rollout.limits.max_turns", 1, by="max_turns")
        return
    s.put("rollout.scheduler", str(name), by="multi_turn_scheduler")
    kwargs = {"gym_env": environment, "stop_words": stops, "context_manager": s.get("context_manager")}
    if kwargs := {k: v for k, v in kwargs.items() if v}:
        s.put("rollout.scheduler_kwargs", kwargs, by="gym_env" if environment else "stop_words")
    turns = s.whole("max_turns", NO_LIMIT_TURNS, least=0)
    s.put("rollout.limits.max_turns", turns or NO_LIMIT_TURNS, by="max_turns")


def async_engine(s: Source) -> None:
    """Refuse a scheduler with an engine that would run all trajectories in lockstep."""
    if s.get("multi_turn_scheduler") is not None and s.get("vllm_use_async_engine") is False:
        s.refuse("vllm_use_async_engine", "please set vllm_use_async_engine to True with multi-turn scheduler.")


def engine_size(s: Source) -> None:
    """Set the number of vLLM servers and of GPUs per server; the embedded engine runs in one process."""
    tensor, data = s.whole("vllm_tensor_parallel_size", 1, least=1), s.whole("vllm_data_parallel_size", 1, least=1)
    if s.polyturn("engine.kind") != "vllm" or s.polyturn("engine.urls"):
        for key, value in (("vllm_tensor_parallel_size", tensor), ("vllm_data_parallel_size", data)):
            if value > 1:
                s.notes[key] = (
                    "the embedded engine is one process; polyturn.engine.kind=vllm starts vllm_data_parallel_size servers, "
                    "with vllm_tensor_parallel_size GPUs each"
                )
        return
    if data > 1:
        s.put("engine.launch.replicas", data, by="vllm_data_parallel_size")
    if tensor > 1:
        s.put("engine.launch.args", ["--tensor-parallel-size", str(tensor)], by="vllm_tensor_parallel_size")


def sequence_parallel(s: Source) -> None:
    """Set the number of ranks that split the tokens of a sample."""
    if (size := s.whole("sequence_parallel_size", 1, least=1)) > 1:
        s.put("train.distributed.context_parallel", size, by="sequence_parallel_size")
        s.put("train.distributed.ranks", size, by="sequence_parallel_size")


def lengths(s: Source) -> None:
    """Set the largest number of tokens of a turn, and of all turns."""
    length = s.whole("max_completion_length", 512, least=1)
    s.put("rollout.limits.max_tokens_per_turn", length, by="max_completion_length")
    if s.get("completion_length_limit_scope") == "total":
        s.put("rollout.limits.max_tokens", length, by="completion_length_limit_scope")


def batches(s: Source) -> None:
    """Set the number of tasks per rollout and of updates on it."""
    group = s.whole("num_generations", 8, least=1)
    device = s.whole("per_device_train_batch_size", 1, least=1)
    accumulation = s.whole("gradient_accumulation_steps", 1, least=1)
    processes = s.whole("nproc_per_node", 1, least=1)
    generation_size, steps = s.get("generation_batch_size"), s.get("steps_per_generation")
    if generation_size is not None and steps is not None:
        s.refuse("generation_batch_size", "steps_per_generation sets the same number; keep one of them")
        return
    steps = s.whole("steps_per_generation", accumulation, least=1)
    total = s.whole("generation_batch_size", processes * device * steps, least=1)
    if s.problems:
        return
    if total % group or total < group:
        near = [n for n in range(2, min(total, 1024) + 1) if total % n == 0]
        s.refuse(
            "num_generations",
            f"a rollout has {total} completions (generation_batch_size, or per_device_train_batch_size x "
            f"steps_per_generation x {processes} processes), which must be a multiple of num_generations"
            + (f"; possible values are {near}" if near else f"; set generation_batch_size to {group}"),
        )
        return
    update = processes * device * accumulation
    if update % total == 0 and s.whole("num_iterations", 1, least=1) == 1:
        total = update  # the rollouts before one update have the same weights, so they are one rollout here
    s.put(
        "train.groups_per_step",
        total // group,
        by="generation_batch_size" if generation_size else "per_device_train_batch_size",
    )
    updates = max(1, total // update)
    if total % update:
        s.refuse(
            "gradient_accumulation_steps",
            f"{total} completions cannot be divided into updates of {update} "
            f"(per_device_train_batch_size x gradient_accumulation_steps x {processes} processes)",
        )
    s.put("train.minibatches", updates, by="gradient_accumulation_steps")


def steps(s: Source) -> None:
    """Set the length of the run."""
    updates = s.whole("max_steps", -1)
    per_rollout = updates_per_rollout(s)
    if updates > 0:
        s.put("train.steps", max(1, updates // per_rollout), by="max_steps")
        return
    epochs = s.number("num_train_epochs", 1)
    if int(epochs) != epochs or epochs < 1:
        s.refuse("num_train_epochs", "it must be a whole number of passes; use max_steps for a part of a pass")
        return
    put_epochs(s, int(epochs))


def every(s: Source) -> None:
    """Set the intervals of saving and evaluation; the default for evaluation is that of saving."""
    per_rollout = updates_per_rollout(s)
    has_tasks = bool(as_list(s.get("val_dataset")))
    is_off = any(s.get(name) in ("no", False) for name in ("eval_strategy", "save_strategy"))
    for key, native in (("save_steps", "train.checkpoint_every"), ("eval_steps", "evaluation.every")):
        by = "save_steps" if s.get(key) is None and has_tasks and not is_off else key
        if s.get(by) is None:
            continue
        value = s.whole(by, 1, least=1)
        if key == "eval_steps" and not has_tasks:
            logger.warning("eval_steps is %s and val_dataset is not set: nothing is evaluated during training", value)
        else:
            s.put(native, max(1, value // per_rollout), by=by)


def folder(s: Source) -> None:
    """Set the folder of the run."""
    path = Path(os.path.expanduser(str(s.get("output_dir", "output/run"))))
    s.put("out", str(path.parent), by="output_dir")
    s.put("name", path.name, by="output_dir")


def betas(s: Source) -> None:
    """Set AdamW's betas."""
    s.put("train.optim.betas", [s.number("adam_beta1", 0.9), s.number("adam_beta2", 0.95)], by="adam_beta2")


def warmup(s: Source) -> None:
    """Set the warm-up in steps, or as a share of the run's steps."""
    steps, ratio = s.number("warmup_steps", 0), s.number("warmup_ratio", 0.0)
    if ratio >= 1 and not steps:
        s.refuse("warmup_ratio", "it is a share of the run's steps, so it must be below 1")
    if steps >= 1:  # ms-swift counts optimizer updates
        steps = max(1, round(steps / updates_per_rollout(s)))
    s.put("train.optim.warmup_steps", steps or ratio, by="warmup_steps" if steps else "warmup_ratio")


def clip(s: Source) -> None:
    """Set the clip range of the ratio."""
    low = s.number("epsilon", 0.2)
    s.put("algorithm.loss.clip_low", low, by="epsilon")
    s.put(
        "algorithm.loss.clip_high", s.number("epsilon_high", low), by="epsilon_high" if s.get("epsilon_high") else "epsilon"
    )


def as_list(value: Any) -> list[Any]:
    """Return a value as a list; None gives an empty list."""
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]


def _of_server(s: Source) -> str:
    """Return the end of a message about what only the command of the rollout server may set."""
    is_server = s.get("vllm_mode") == "server"
    return "; no rollout server is used, so set here what `swift rollout` had" if is_server else ""


def _rows(s: Source, key: str, to: str) -> bool:
    """Set the source and number of rows; return whether an argument names a source."""
    entries = [str(one) for one in as_list(s.get(key))]
    files = []
    for entry in entries:
        path, mark, number = entry.partition("#")
        hub = None if os.path.exists(path) or path.endswith(_FILES) else _HUB.fullmatch(path)
        if mark and not number.isdigit():
            s.refuse(key, f"{entry!r}: the part after # must be a number of rows")
        elif len(entries) > 1 and (mark or hub):
            kind = "takes a part of its rows" if mark else "is a data set of the hub"
            s.refuse(key, f"{entry!r} {kind} and cannot be combined with other entries; name it alone")
        elif hub and (hub["hub"] or "").lower() == "ms":
            s.refuse(key, f"{entry!r} is on ModelScope, which is not supported; use the Hugging Face hub, or a file")
        elif hub:
            for part, value in (("dataset", hub["name"]), ("subset", hub["subset"]), ("split", "train")):
                if value is not None:
                    s.put(f"{to}.{part}", value, by=key)
        elif path.endswith(".json"):
            s.refuse(key, f"{entry!r} is one JSON list; write a .jsonl file, with one row per line")
        elif not path.endswith(_READ):
            s.refuse(key, f"{entry!r} is neither a file of rows nor a data set (owner/name); write it to .jsonl or .parquet")
        else:
            files.append(path)
        if number.isdigit():
            s.put(f"{to}.limit", int(number), by=key)
    if files:
        s.put_path(f"{to}.files", files, by=key)
    return bool(entries)


CONVERTERS: Mapping[str, Callable[[Source], None]] = {
    f.__name__: f
    for f in (
        model, plugins, async_engine, engine_size, system, columns, dataset, val_dataset, rewards, scheduler, lengths,
        batches, steps, every, folder, betas, warmup, clip, advantage, kl_in_reward, resample, loss_type, correction, lora,
        ref_model, teacher, sequence_parallel, megatron, iterations, decay,
    )
}  # fmt: skip
