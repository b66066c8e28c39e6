"""`polyturn doctor PROJECT`: check the parts of a project.

Each part is checked by itself, so that one mistake does not hide another. No weights are loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from polyturn import build
from polyturn.api.step_size import with_step_size
from polyturn.build.parts import check_plugins
from polyturn.cli.dialects import load_native
from polyturn.config.config_source import ConfigSource, folder_or_name
from polyturn.config.load import base_of
from polyturn.core.errors import ConfigError, PolyturnError
from polyturn.infra.model_json import read_model_json
from polyturn.tokens.hub import only_cached


def explain(path: Path) -> Iterator[tuple[str, str, bool]]:
    """Yield (part, description or error, whether the part is valid) for each part of a project.

    Raises:
        ConfigError: there is no config, or it cannot be loaded.
    """
    file = config_of(path)
    loaded = with_step_size(load_native(file, ()), resume=False)
    source = ConfigSource(config=loaded.config, base=base_of(file))
    yield "config", str(file), True
    parts: dict[str, Callable[[ConfigSource], str]] = {
        "model": _model,
        "plug-ins": _plugins,
        "tasks": _tasks,
        "training": _training,
        "tests": _tests,
    }
    for name, part in parts.items():
        try:
            yield name, part(source), True
        except PolyturnError as problem:
            yield name, str(problem), False


def config_of(path: Path) -> Path:
    """Return the config for a path, which may be a project's folder.

    Raises:
        ConfigError: there is no config, or there are several without config.yaml.
    """
    if not path.is_dir():
        return path
    configs = [path / "config.yaml"] if (path / "config.yaml").is_file() else sorted(path.glob("*.yaml"))
    if len(configs) != 1:
        has = f"the YAML files {', '.join(p.name for p in configs)}" if configs else "no YAML file"
        raise ConfigError(f"{str(path)!r} has {has}, and no config.yaml; give the config, or start with `polyturn init`")
    return configs[0]


def _model(source: ConfigSource) -> str:
    model = source.config.model
    if model.path is None:
        return f"random weights, made when the run starts: {model.init}"
    where = folder_or_name(str(model.path), source.base)
    if not Path(where).is_dir():
        return f"{where}, from the hub's cache" if only_cached(where) else f"{where}, fetched from the hub"
    file = Path(where) / "config.json"
    if not file.is_file():
        raise ConfigError(f"{where!r} has no config.json; set model.path to a folder in Hugging Face format, or a hub name")
    fields = read_model_json(file)
    sizes = f"{fields.get('num_hidden_layers')} layers of {fields.get('hidden_size')}"
    names = fields.get("architectures")
    return f"{names[0] if isinstance(names, list) and names else 'a model'} in {where}: {sizes}"


def _plugins(source: ConfigSource) -> str:
    check_plugins(source)
    config, rollout = source.config, source.config.rollout
    written: dict[str, Any] = {
        "tool": [*rollout.tools.functions, *_entries(rollout.tools.file)],
        "interaction": _entries(rollout.interactions),
        "environment": _entries(config.env),
        "scheduler": _entries(rollout.scheduler),
        "reward": _entries(config.reward.function),
    }
    plugins = [f"{kind} {_name(entry)}" for kind, entries in written.items() for entry in entries]
    return ", ".join(plugins) or "none: the model answers once"


def _entries(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]


def _name(entry: Any) -> Any:
    return entry.get("class_name", entry) if isinstance(entry, dict) else getattr(entry, "name", entry)


def _tasks(source: ConfigSource) -> str:
    tasks = build.build_run_tasks(source)
    first = " ".join(tasks.train[0].prompt[-1].text.split())
    held_out = f"; {len(tasks.eval_sets[0].tasks)} to evaluate on" if tasks.eval_sets else ""
    return f"{len(tasks.train)} to train on{held_out}; the first is {first[:80]!r}"


def _training(source: ConfigSource) -> str:
    train, engine = source.config.train, source.config.engine
    episodes = f"{train.groups_per_step} tasks x {train.group_size} episodes"
    return f"{train.steps} steps of {episodes}, sampled by the {engine.kind} engine"


def _tests(source: ConfigSource) -> str:
    files = sorted(path.name for path in source.base.glob("test_*.py"))
    if not files:
        return "none; polyturn.testing has suites that check a tool, an interaction, a scheduler or a reward"
    return f"{', '.join(files)}: run them with pytest"
