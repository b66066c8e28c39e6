"""Reads ms-swift's command line or its YAML form as a tree of arguments, on top of its defaults.

parse(["--model", "Qwen/Qwen3-1.7B", "--reward_funcs", "accuracy", "format", "--use_vllm", "true"])
read(Path("grpo.yaml"), ["max_turns=3"])
read_command(["grpo.yaml", "--max_turns", "3"])
"""

from __future__ import annotations

import functools
import logging
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from polyturn.compat.swift.args.convert import CONVERTERS
from polyturn.compat.swift.args.convert_loss import TUNER_KEYS
from polyturn.config.load import warn_of_repeated
from polyturn.config.sources import merge, nested
from polyturn.config.translate.table import Table, read_table
from polyturn.config.translate.translation import Translation, translate
from polyturn.config.translate.tree import Composed
from polyturn.core.errors import ConfigError
from polyturn.infra.yaml_file import check_config_file, read_yaml

logger = logging.getLogger(__name__)

KEYS = Path(__file__).parent / "keys.yaml"
MEGATRON_KEYS = Path(__file__).parent / "megatron_keys.yaml"
ROLLOUT_KEYS = Path(__file__).parent / "rollout_keys.yaml"
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")

DEFAULTS: Mapping[str, Any] = {
    "rlhf_type": "grpo",
    "seed": 42,
    "output_dir": "output/grpo",
    "num_generations": 8,
    "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 1,
    "max_completion_length": 512,
    "temperature": 0.9,
    "top_p": 1.0,
    "top_k": -1,
    "weight_decay": 0.1,
    "adam_beta1": 0.9,
    "adam_beta2": 0.95,
    "lr_scheduler_type": "cosine",
    "warmup_ratio": 0.0,
    "max_grad_norm": 1.0,
    "num_train_epochs": 3,
    "max_steps": -1,
    "save_steps": 500,
    "beta": 0.04,
    "epsilon": 0.2,
    "loss_type": "grpo",
    "advantage_estimator": "grpo",
    "kl_in_reward": None,
    "scale_rewards": None,
    "dynamic_sample": False,
    "reward_funcs": [],
    "multi_turn_scheduler": None,
    "bf16": None,
}
"""ms-swift's defaults that differ from native ones."""
_OTHER_IN_MEGATRON = (
    "output_dir", "gradient_accumulation_steps", "lr_scheduler_type", "warmup_ratio", "num_train_epochs", "max_steps",
)  # fmt: skip
MEGATRON_DEFAULTS: Mapping[str, Any] = {
    **{name: value for name, value in DEFAULTS.items() if name not in _OTHER_IN_MEGATRON},
    "tensor_model_parallel_size": 1,
    "global_batch_size": 16,
    "train_iters": None,
    "lr_decay_style": "cosine",
}
"""Defaults of `megatron rlhf` that differ from native ones."""
_TEXTS = frozenset({
    "model", "model_revision", "ref_model", "teacher_model", "system", "output_dir", "save", "api_key", "host", "adapters",
    "dataset", "val_dataset", "external_plugins", "custom_register_path", "reward_funcs", "multi_turn_scheduler", "gym_env",
    "context_manager", "stop_words", "loss_scale", "config",
})  # fmt: skip
"""Arguments that are always texts or lists of texts: a token 0123 is not a number, and a stop word [/INST] not a list."""


@functools.cache
def table() -> Table:
    """Return the table of arguments."""
    return read_table(KEYS)


@functools.cache
def megatron_table() -> Table:
    """Return the table of the arguments of `megatron rlhf`, including those of `swift rlhf`."""
    return read_table(MEGATRON_KEYS, KEYS)


def read_command(arguments: Sequence[str], defaults: Mapping[str, Any] = DEFAULTS) -> Composed:
    """Read a command line: flags, or a file of arguments (first, or as `--config FILE`) with flags on top of it.

    Raises:
        ConfigError: as for `parse` and `read`.
    """
    is_first = bool(arguments) and not arguments[0].startswith("-")
    flags = parse(arguments[1:] if is_first else arguments, {})
    path = arguments[0] if is_first else flags.values.pop("config", None)
    if path is None:
        return over_defaults(flags.values, flags.origin, defaults)
    file = read(Path(path), defaults=defaults)
    values = {**file.values, **flags.values}
    if isinstance(native := file.values.get("polyturn"), dict):
        merge(native, flags.values.get("polyturn", {}))
        values["polyturn"] = native
    return Composed(values=values, origin={**file.origin, **{k: v for k, v in flags.origin.items() if k != "config"}})


def parse(arguments: Sequence[str], defaults: Mapping[str, Any] = DEFAULTS) -> Composed:
    """Read flags on top of `defaults`. A flag without a value is true; several values form a list.

    Raises:
        ConfigError: there is a text before the first flag, a flag occurs twice, or a text flag has no value.
    """
    values: dict[str, Any] = {}
    origin: dict[str, str] = {}
    rest = list(arguments)
    while rest:
        head = rest.pop(0)
        if not head.startswith("--") or len(head) < 3:
            raise ConfigError(f"the argument {head!r} does not belong to a flag; write --name value")
        name, equals, value = head[2:].partition("=")
        name = name.replace("-", "_") if not name.startswith("polyturn") else name
        raw = [value] if equals else []
        while rest and not equals and not rest[0].startswith("--"):
            raw.append(rest.pop(0))
        if name in values:
            raise ConfigError(f"the argument --{name} is given twice; keep one of them")
        if name in _TEXTS and not raw:
            raise ConfigError(f"the argument --{name} has no value; write --{name} VALUE, or remove it")
        parsed = [_value_of(name, one) for one in raw]
        values[name] = True if not parsed else parsed[0] if len(parsed) == 1 else parsed
        origin[name] = f"from the argument '--{name}'"
    return over_defaults(values, origin, defaults)


def read(path: Path, overrides: Sequence[str] = (), defaults: Mapping[str, Any] = DEFAULTS) -> Composed:
    """Read a YAML file of arguments on top of `defaults`, and overrides `name=value` on top of the file.

    The variables of its section ENV are set unless the environment has them.

    Raises:
        ConfigError: the file does not exist, or has no arguments.
    """
    check_config_file(path)
    written = read_yaml(path)
    for name, value in (written.pop("ENV", None) or {}).items():
        if os.environ.setdefault(name, str(value)) != str(value):
            logger.warning("%s: %s is %r in the environment, which takes precedence", path, name, os.environ[name])
    for role in ("rollout", "train"):  # the file of a Ray run has a section for each role
        written |= written.pop(role) if isinstance(written.get(role), dict) else {}
    written = {name: _value_of(name, v) if isinstance(v, str) else v for name, v in written.items()}
    values = _as_tree(written)
    origin = dict.fromkeys(written, f"in {path}")
    warn_of_repeated(overrides)
    for text in overrides:
        name, equals, raw = text.partition("=")
        if not equals or not name or name.startswith("-"):
            raise ConfigError(f"the override {text!r} cannot be read; write name=value")
        key, _, below = name.lstrip("+").partition(".")
        value = _value_of(key, raw)
        if below:
            at = values[key] = _section(values.get(key), key, text)
            *above, last = below.split(".")
            for part in above:
                at[part] = at = _section(at.get(part), part, text)
            at[last] = value
        else:
            values[key] = value
        origin[name.lstrip("+")] = f"from the override {text!r}"
    return over_defaults(values, origin, defaults)


def read_value(text: str) -> Any:
    """Return the value of a text: a number, true or false, null, a list or mapping as JSON or YAML, else the text."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    if text in ("None", "null"):
        return None
    if _NUMBER.fullmatch(text):
        return int(text) if text.lstrip("+-").isdigit() and len(text) < 400 else float(text)
    if text.lstrip().startswith(("{", "[")):
        try:
            return yaml.safe_load(text)  # YAML includes JSON
        except (yaml.YAMLError, ValueError, RecursionError):
            return text
    return text


def _value_of(name: str, text: str) -> Any:
    """Return an argument's value. For `_TEXTS` it is the text, or a list of texts if the text is a list in brackets.

    Stop words, the system message and the API key may begin with a bracket, so only a JSON list of texts counts as a list.
    """
    if name not in _TEXTS or text in ("None", "null"):
        return read_value(text)
    value = read_value(text) if text.startswith('["' if name in {"stop_words", "system", "api_key"} else "[") else text
    return value if isinstance(value, list) else text


def _as_tree(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments as a tree: dotted keys `polyturn.…` become nested mappings."""
    tree = {k: v for k, v in values.items() if not k.startswith("polyturn.")}
    for key in (k for k in values if k.startswith("polyturn.")):
        section = nested(tuple(key.split(".")), values[key])["polyturn"]
        tree["polyturn"] = _joined(tree.get("polyturn"), section, "polyturn")
    return tree


def _joined(one: Any, other: Any, key: str) -> Any:
    """Merge two values of a key.

    Raises:
        ConfigError: both are set, and one of them is not a section.
    """
    if one is None:
        return other
    if not isinstance(one, Mapping) or not isinstance(other, Mapping):
        raise ConfigError(f"{key} is given twice, as {one!r:.80} and as {other!r:.80}; keep one of them")
    return {k: _joined(one.get(k), other[k], f"{key}.{k}") if k in other else one[k] for k in {**one, **other}}


def _section(value: Any, name: str, override: str) -> dict[str, Any]:
    if not isinstance(value, Mapping | None):
        raise ConfigError(f"the override {override!r}: {name} is {value!r:.80}, which has no keys to set")
    return dict(value or {})


def over_defaults(values: Mapping[str, Any], origin: Mapping[str, str], defaults: Mapping[str, Any] = DEFAULTS) -> Composed:
    """Return the arguments on top of ms-swift's defaults; dotted keys `polyturn.…` become nested mappings.

    Raises:
        ConfigError: a native key is both a value and a section, or is set twice.
    """
    merged = {**defaults, **_as_tree(values)}
    return Composed(values=merged, origin=dict(origin))


@functools.cache
def rollout_table() -> Table:
    """Return the table of the arguments of `swift rollout`."""
    return read_table(ROLLOUT_KEYS)


def rollout_to_native(arguments: Sequence[str]) -> Translation:
    """Translate the flags of `swift rollout` to native keys: those of a run, and the server's host, port and token.

    Raises:
        ConfigError: an argument is unknown, unsupported, or contradicts another; one line each.
    """
    tree = read_command(arguments)
    names = dict.fromkeys(name.partition(".")[0] if name.startswith("polyturn.") else name for name in tree.origin)
    own_values = {name: tree.values[name] for name in names}
    if not own_values.get("model"):
        raise ConfigError("the argument model is missing; name a folder or hub id of a model")
    values = {"multi_turn_scheduler": None, "max_turns": None, **own_values}
    return translate(Composed(values=values, origin=tree.origin), keys=rollout_table(), converters=CONVERTERS)


def to_native(tree: Composed, *, num_processes: int = 1) -> Translation:
    """Translate arguments.

    Args:
        tree: The arguments.
        num_processes: Number of processes that ms-swift would start, each with its own batch.

    Raises:
        ConfigError: an argument is unknown, unsupported, or contradicts another; one line each.
    """
    processes = {} if num_processes == 1 else {"nproc_per_node": num_processes}
    values = tree.values if any(name in tree.values for name in TUNER_KEYS) else {"tuner_type": "lora", **tree.values}
    return _translated({"learning_rate": _learning_rate(values), **values, **processes}, tree, table())


def megatron_to_native(tree: Composed) -> Translation:
    """Translate the arguments of `megatron rlhf`, whose batch is global, independently of the number of processes.

    Raises:
        ConfigError: as for `to_native`.
    """
    stem = str(tree.values.get("model", "")).rstrip("/").rpartition("/")[2]
    own = {"learning_rate": _learning_rate(tree.values), "output_dir": f"megatron_output/{stem}"}
    return _translated({**own, **tree.values}, tree, megatron_table())


def _learning_rate(values: Mapping[str, Any]) -> float:
    """Return ms-swift's default learning rate, which is higher for an adapter than for all weights."""
    return 1e-4 if "lora" in map(values.get, TUNER_KEYS) else 1e-5


def _translated(values: Mapping[str, Any], tree: Composed, keys: Table) -> Translation:
    if not values.get("model"):
        raise ConfigError("the argument model is missing; name a folder or hub id of a model")
    return translate(Composed(values=dict(values), origin=tree.origin), keys=keys, converters=CONVERTERS)
