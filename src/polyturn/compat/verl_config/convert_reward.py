"""Converters for verl's rewards: the function and the reward manager."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polyturn.core.errors import did_you_mean

if TYPE_CHECKING:
    from polyturn.config.translate.source import Source


MANAGER = "reward_model.reward_manager"
SOURCE, MODULE = "reward_manager.source", "reward_manager.module.path"
MANAGERS = ("naive", "prime", "batch", "dapo", "rate_limited", "limited")
"""The managers that are replaced by native settings."""
NUM_PROCESSES = 4
"""Number of processes that call the function in their main threads, as in verl, so that it may use signals."""
MANAGER_S = 600.0
"""Seconds that a project's own manager, which may call other models, has per trajectory; verl has no limit."""


def reward_function(s: Source) -> None:
    """Set one function for all data sources; step rewards of tools are recorded with weight 0, as in verl."""
    key = "custom_reward_function.path"
    s.put("reward.weights", {"outcome": 1.0}, by=key)
    s.put("reward.text", "turns", by=key)
    if (where := s.get(key)) is not None and not str(where).startswith("pkg://") and not str(where).endswith(".py"):
        s.refuse(key, "it must be a Python file, or pkg://MODULE")
        return
    name = None if where is None else f"{module_of(where)}:{s.get('custom_reward_function.name', 'compute_score')}"
    if s.get(MANAGER, "naive") not in MANAGERS or s.get(SOURCE) == "importlib":
        _managed(s, name)
        return
    if name is None:
        return
    s.put("reward.function.name", name, by=key)
    s.put("reward.num_processes", NUM_PROCESSES, by=key)
    if ".py:" in name:
        s.paths.append(("reward", "function", "name"))
    _arguments(s, s.get("custom_reward_function.reward_kwargs", {}), by="custom_reward_function.reward_kwargs")


def module_of(where: str) -> str:
    """Return the path or module name of `file.py`, `file://…`, `pkg://a.b` or `pkg://a/b`."""
    if where.startswith("pkg://"):
        return where.removeprefix("pkg://").replace("/", ".")
    return str(Path(os.path.expanduser(where.removeprefix("file://"))))


def _arguments(s: Source, arguments: Mapping[str, Any], *, by: str) -> None:
    """Set further arguments of the function."""
    for name, value in arguments.items():
        if name == "name":
            s.refuse(by, "an argument cannot be called `name`, which is the function's own key; rename the argument")
        else:
            s.put(f"reward.function.{name}", value, by=by)


def _managed(s: Source, function: str | None) -> None:
    """Set a project's own manager, which calls the function."""
    model, manager = s.text("data.tokenizer", s.text("actor_rollout_ref.model.path", "")), s.get(MANAGER)
    if s.get(SOURCE) == "importlib":
        manager = as_absolute(f"{module_of(str(s.get(MODULE)))}:{manager}")
    own = {
        "manager": manager,
        "function": None if function is None else as_absolute(function),
        "tokenizer": as_absolute(model),
        "config": s.sections("actor_rollout_ref", "algorithm", "data", "reward", "reward_model", "trainer"),
        "manager_kwargs": s.get("reward_model.reward_kwargs", {}),
        "function_kwargs": s.get("custom_reward_function.reward_kwargs", {}),
    }
    s.put("reward.function.name", "polyturn.compat.verl.managed_reward:score", by=MANAGER)
    _arguments(s, own, by=MANAGER)
    s.put("reward.timeout_s", MANAGER_S, by=MANAGER)


def as_absolute(name: str) -> str:
    """Return a path, or the path in `file.py:name`, as absolute; a module or a name on the hub is unchanged."""
    file, colon, attribute = name.partition(".py:")
    path = Path(os.path.expanduser(f"{file}.py" if colon else file))
    return f"{path.absolute()}{colon[3:]}{attribute}" if name and path.exists() else name


def reward_manager(s: Source) -> None:
    """Set the manager's additions to the function: a length penalty, or limits on its calls."""
    key, name = MANAGER, s.text(MANAGER, "naive")
    if s.get(SOURCE) == "importlib":
        _check_imported(s, name)
        return
    if name not in MANAGERS:
        _check_registered(s, name)
        return
    kwargs = dict(s.get("reward_model.reward_kwargs", {}))
    overlong = {**s.get("reward_model.overlong_buffer", {}), **(kwargs.pop("overlong_buffer_cfg", None) or {})}
    longest = kwargs.pop("max_resp_len", None)
    if kwargs:
        s.refuse("reward_model.reward_kwargs", f"no reward manager reads {sorted(kwargs)[0]!r}; remove it")
    if name == "dapo" and overlong.get("enable"):
        s.put("reward.overlong.buffer", overlong.get("len", 0), by=key)
        s.put("reward.overlong.penalty", overlong.get("penalty_factor", 0.0), by=key)
        s.put("reward.overlong.max_tokens", longest, by=key)
    if name == "batch":
        s.put("reward.batch.size", None, by=key)
        s.put("reward.batch.wait_s", 1.0, by=key)
    if name.endswith("limited"):
        s.put("reward.rate.max_concurrent", s.get("reward_model.max_concurrent", 1), by=key)
        s.put("reward.rate.calls_per_minute", s.get("reward_model.max_rpm"), by=key)
        s.put("reward.rate.tokens_per_minute", s.get("reward_model.max_tpm"), by=key)
        s.put("reward.rate.tokens_per_call", s.get("reward_model.estimated_tokens_per_request", 2000), by=key)
        s.put("reward.timeout_s", s.get("reward_model.timeout", 300.0), by=key)


def _check_imported(s: Source, name: str) -> None:
    """Refuse a file of managers that does not exist or does not mention the class; nothing is imported."""
    if (where := s.get(MODULE)) is None:
        s.refuse(SOURCE, f"it needs the manager's file; set {MODULE} to the file, and {MANAGER} to the class")
        return
    file = Path(module_of(str(where)))
    if str(where).startswith("pkg://"):
        return
    if file.suffix != ".py" or not file.is_file():
        s.refuse(MODULE, "it must be an existing Python file, or pkg://MODULE")
    elif name not in (known := re.findall(r"\w+", file.read_text(encoding="utf-8"))):
        s.refuse(MANAGER, f"{where} has no class of that name.{did_you_mean(name, [w for w in known if w[0].isupper()])}")


def _check_registered(s: Source, name: str) -> None:
    """Refuse a manager that the reward function's file does not register; nothing is imported."""
    where = s.get("custom_reward_function.path")
    if str(where).startswith("pkg://"):
        return
    file = None if where is None else Path(module_of(str(where)))
    text = file.read_text(encoding="utf-8") if file is not None and file.is_file() else ""
    if re.search(rf"register\(\s*['\"]{re.escape(name)}['\"]", text) is None:
        here = "custom_reward_function.path is not set" if where is None else f"{where} does not register one of that name"
        s.refuse(MANAGER, f"there is no such reward manager, and {here}.{did_you_mean(name, MANAGERS)}")
