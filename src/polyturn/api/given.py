"""Convert a program's arguments to a configuration, with objects in it and short names expanded to full keys.

    read(model="Qwen/Qwen3-0.6B", tasks=rows, tools=[price], overrides={"steps": 100, "lr": 1e-5})
      ->  {"model": {"path": "Qwen/Qwen3-0.6B"}, "data": {"train": {"generator": LiveObject(rows)}},
           "rollout": {"tools": {"functions": [LiveObject(price)]}}, "train": {"steps": 100, "optim": {"lr": 1e-5}}}

Common mistakes in notebooks, such as a generator that was already read, raise an error that shows the correct call.
"""

from __future__ import annotations

import functools
import glob
import inspect
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from polyturn.api.given_rows import FILES, PROMPTS, called, check_first, checked, refuse_coroutine, rows_of, tasks_of
from polyturn.api.keywords import paths_of
from polyturn.api.step_size import with_step_size
from polyturn.config.config_source import ConfigSource, model_folder
from polyturn.config.load import base_of, load_config
from polyturn.config.models import RunConfig
from polyturn.config.schema import KeyPath, dotted
from polyturn.config.sources import leaves, merge, nested
from polyturn.core.errors import ConfigError, DataError
from polyturn.core.reward import brief
from polyturn.data.conversations import Conversation
from polyturn.infra.live import LiveObject, NameOrObject
from polyturn.infra.plugin_shape import required
from polyturn.interactions.base import BaseInteraction
from polyturn.interactions.registry import check_interaction, default_name
from polyturn.rollout.scheduler import MultiTurnScheduler
from polyturn.store.stored_run import StoredRun
from polyturn.tools.base import BaseTool
from polyturn.tools.function import FunctionTool

_YAML = (".yaml", ".yml")
_OF_TASKS = {("data", "train"): "train", ("evaluation", "data"): "eval"}
"""Key of the configuration that holds tasks -> their split."""
_CONVERSATIONS = ("warm_start", "conversations")
_EMPTY: Mapping[str, Any] = {"streaming": False, "columns": {}, "kwargs": {}}


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenArguments:
    """The arguments of a call such as `polyturn.train`; None leaves an argument to the configuration."""

    model: Any = None
    tokenizer: Any = None
    tasks: Any = None
    eval_tasks: Any = None
    tools: Any = None
    interaction: Any = None
    reward: Any = None
    scheduler: Any = None
    engine: Any = None
    ray: str | None = None
    config: Any = None
    former: tuple[Mapping[str, Any], ...] = ()
    """Keywords that `overrides` replace, weakest first, such as those of the calls that this one resumes."""
    overrides: Mapping[str, Any] = field(default_factory=dict)
    evaluates: bool = False
    """Whether `eval_tasks` came from the caller's argument `tasks`."""

    @classmethod
    def of(cls, keywords: Mapping[str, Any], **own: Any) -> GivenArguments:
        """Return the arguments of a call.

        `own` has the function's parameters. `keywords` has all others: those that name a field of this class set it, and the
        rest become `overrides`. A YAML file given as `model` is taken as `config`.

        Raises:
            ConfigError: a keyword belongs to another function.
        """
        if "on_step" in keywords:
            raise ConfigError("'on_step' is for polyturn.train; with polyturn.steps, put its code into the loop")
        if "dry_run" in keywords:
            raise ConfigError("'dry_run' is for polyturn.train; remove it")
        if strange := [name for name in keywords if name in own or name == "resume"]:
            raise ConfigError(f"{strange[0]!r} is for polyturn.train and polyturn.steps; remove it")
        if isinstance(own["model"], str | Path) and own["config"] is None and Path(own["model"]).suffix in _YAML:
            own |= {"model": None, "config": own["model"]}
        ours = _own(keywords)
        return cls(**own, **ours, overrides={name: value for name, value in keywords.items() if name not in ours})

    def changed(self, changes: Mapping[str, Any], *, name: str) -> GivenArguments:
        """Return the arguments with changes, to resume the run `name`.

        Raises:
            ConfigError: a change would start another run instead of continuing this one.
        """
        if fixed := [key for key in ("name", "out", "resume", "config") if key in changes]:
            raise ConfigError(
                f"run.resume continues in the folder of the run with its configuration, so {fixed[0]!r} cannot change; "
                f"remove it, or start another run: polyturn.train(…, {fixed[0]}=…)"
            )
        ours = _own(changes)
        rest = {key: value for key, value in changes.items() if key not in ours}
        replaced = (*self.former, self.overrides)
        former = tuple({key: value for key, value in one.items() if key not in rest} for one in replaced)
        return replace(self, **ours, former=former, overrides={**rest, "name": name})


def _own(keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keywords that are fields of `GivenArguments`, not keys of the configuration."""
    fields = GivenArguments.__dataclass_fields__.keys() - {"former", "overrides", "evaluates"}
    return {name: value for name, value in keywords.items() if name in fields}


def read(arguments: GivenArguments, *, resume: bool | Literal["auto"] | None = None) -> tuple[ConfigSource, dict[str, Any]]:
    """Return the configuration with its objects, and its values for `write_resolved`.

    `resume` is whether training resumes; None for runs without training.

    Raises:
        ConfigError, DataError: an argument is invalid.
    """
    reader = _Reader()
    values: dict[str, Any] = {}
    path: Path | None = None
    if isinstance(arguments.config, Mapping):
        merge(values, reader.plain(reader.with_rows((), arguments.config)))
    elif isinstance(arguments.config, str | Path):
        path = Path(arguments.config)
        if path.suffix not in (*_YAML, ".json") and not path.exists():
            raise ConfigError(
                f"config is {str(path)!r}, and there is no such file; to pass a model, write model={str(path)!r}"
            )
    elif arguments.config is not None:
        raise ConfigError(f"config is {brief(arguments.config)}; give the path of a YAML file, or the same as a dict")
    for part in (
        reader.model(arguments.model, arguments.tokenizer),
        reader.interaction(arguments.interaction),
        reader.tasks(arguments.tasks, "tasks"),
        reader.tasks(arguments.eval_tasks, "tasks" if arguments.evaluates else "eval_tasks", is_eval=True),
        reader.tools(arguments.tools),
        reader.reward(arguments.reward),
        reader.scheduler(arguments.scheduler),
        {} if arguments.engine is None else {"engine": reader.plain(_engine(arguments.engine))},
        {} if arguments.ray is None else {"cluster": {"address": arguments.ray}},
        *map(reader.overrides, (*arguments.former, arguments.overrides)),
    ):
        merge(values, part)
    if path is None and isinstance(about := values.get("model", {}), Mapping) and not {"path", "init"} & about.keys():
        raise ConfigError("model is not given; name one on the hub, or its folder: model='Qwen/Qwen3-0.6B'")
    loaded = load_config(RunConfig, path, values=values)
    if resume is not None:
        loaded = with_step_size(loaded, resume=resume)
    base = Path() if path is None else base_of(path)
    return ConfigSource(config=loaded.config, base=base.resolve()), loaded.resolved


class _Reader:
    """Turns arguments into a configuration."""

    def __init__(self) -> None:
        self.default_interaction: str | None = None
        """Name of the only interaction, which tasks then get by default; None if there are several or none."""

    def plain(self, value: Any) -> Any:
        """Convert a value to plain data, except for objects in it."""
        if isinstance(value, Mapping):
            return {str(key): self.plain(inner) for key, inner in value.items()}
        if isinstance(value, list | tuple):
            return [self.plain(inner) for inner in value]
        if isinstance(value, Path):
            return str(value)
        if isinstance(value, np.generic):
            return self.plain(value.item())
        if value is None or isinstance(value, str | int | float | LiveObject):
            return value
        refuse_coroutine(value, "a value")
        return LiveObject(value)

    def with_rows(self, path: tuple[str, ...], value: Any) -> Any:
        """Convert the value of the key `path`: rows of tasks or conversations become a section or an object with them."""
        if path in _OF_TASKS and value is not None:
            return value if isinstance(value, Mapping) else self._tasks(value, ".".join(path), split=_OF_TASKS[path])
        if path == _CONVERSATIONS and not isinstance(value, str | Path) and hasattr(value, "__iter__"):
            what, rows = ".".join(path), rows_of(value, ".".join(path))
            if not len(rows):
                raise DataError(f"{what} has no row; give at least one: {what}=[{{'messages': […]}}]")
            if not isinstance(rows[0], Conversation):
                Conversation.from_row(rows[0], where=f"{what}[0]")
            return LiveObject(functools.partial(list, rows), name=f"{_kind(value)} of {len(rows)}")
        is_above = any(one[: len(path)] == path for one in (*_OF_TASKS, _CONVERSATIONS))
        if isinstance(value, Mapping) and is_above:
            return {key: self.with_rows((*path, str(key)), inner) for key, inner in value.items()}
        return value

    def model(self, model: Any, tokenizer: Any) -> dict[str, Any]:
        """Return the section `model` for a name, a folder, a run, a section, or a transformers model."""
        named = _tokenizer_name(tokenizer)
        of_tokenizer = {} if tokenizer is None else {"tokenizer": named or LiveObject(tokenizer, name=_kind(tokenizer))}
        nothing = {"init": None, "tokenizer": None}
        if model is None:
            return {"model": of_tokenizer} if of_tokenizer else {}
        if isinstance(model, Mapping) and any(hasattr(value, "dtype") for value in model.values()):
            raise ConfigError(
                "model is a dict of weights; load them into a model with model.load_state_dict(…), and give the model"
            )
        if isinstance(model, Mapping):
            return {"model": {**self.plain(model), **of_tokenizer}}
        if isinstance(model, StoredRun):
            model = model.folder
        if isinstance(model, str | Path) and str(model).strip():
            folder = Path(os.path.expanduser(model))
            weights = model_folder(folder if os.path.isdir(folder) else None)
            return {"model": {"path": _here(weights or model), **nothing, **of_tokenizer}}
        if isinstance(model, type):
            raise ConfigError(f"model is the class {model.__name__}; give a model, {model.__name__}.from_pretrained('…')")
        refuse_coroutine(model, "model")
        if not (hasattr(model, "save_pretrained") and hasattr(model, "config")):
            raise ConfigError(
                f"model is {brief(model)}; give the name of a model on the hub, its folder, or a causal language model of "
                "transformers: model='Qwen/Qwen3-0.6B'"
            )
        if (heads := getattr(model, "get_output_embeddings", None)) is not None and heads() is None:
            raise ConfigError(
                f"model is a {type(model).__name__}, which does not predict tokens; load the causal language model: "
                "AutoModelForCausalLM.from_pretrained('…')"
            )
        name = str(getattr(model.config, "_name_or_path", "") or "")
        if not of_tokenizer and not name:
            raise ConfigError(
                f"model is a {type(model).__name__} that was not loaded by name, so its tokenizer is unknown; give it: "
                "polyturn.train(model=model, tokenizer=tokenizer, …)"
            )
        dtype = str(model.dtype).removeprefix("torch.")
        if dtype not in ("float32", "bfloat16"):
            raise ConfigError(f"model has parameters in {dtype}; convert it first: model.bfloat16() or model.float()")
        path = LiveObject(model, name=_kind(model))
        return {"model": {"path": path, "dtype": dtype, **nothing, "tokenizer": name, **of_tokenizer}}

    def tasks(self, value: Any, what: str, *, is_eval: bool = False) -> dict[str, Any]:
        """Return the source of tasks, under the key for `tasks` or `eval_tasks`."""
        if value is None:
            return {}
        split = "eval" if is_eval else "train"
        source = self._tasks(value, what, split=split)
        if self.default_interaction is not None:
            source = {**source, "interaction": self.default_interaction}
        return {"evaluation": {"data": source}} if is_eval else {"data": {"train": source}}

    def _tasks(self, value: Any, what: str, *, split: str) -> dict[str, Any]:
        nothing: dict[str, Any] = {**dict.fromkeys(("files", "dataset", "subset", "split", "generator", "limit")), **_EMPTY}
        if isinstance(value, Mapping) and not PROMPTS & value.keys() and {"files", "dataset", "generator"} & value.keys():
            return self.plain(value)  # type: ignore[no-any-return]
        value = checked(value, what)
        if isinstance(value, str | Path):
            is_file = str(value).endswith(FILES) or os.path.isfile(value) or _is_pattern(str(value))
            return {**nothing, **({"files": _files_here(value)} if is_file else {"dataset": _here(value)})}
        if callable(value) and not hasattr(value, "__getitem__"):
            name = getattr(value, "__name__", type(value).__name__)
            return self._tasks(called(value, what, name), what, split=split)
        rows = rows_of(value, what)
        if len(rows) and all(isinstance(row, str | Path) for row in rows):
            if all(str(row).endswith(FILES) for row in rows):
                return {**nothing, "files": [_files_here(row) for row in rows]}
            rows = [{"prompt": str(row)} for row in rows]
        if not len(rows):
            raise DataError(f"{what} has no row; give at least one: {what}=[{{'prompt': '…'}}]")
        check_first(rows[0], what, has_columns=hasattr(value, "rename_column"))
        make = functools.partial(tasks_of, rows, split=split, name=what)
        return {**nothing, "generator": LiveObject(make, name=f"{_kind(value)} of {len(rows)}")}

    def tools(self, value: Any) -> dict[str, Any]:
        """Return the section `rollout.tools` for functions, tools, names, or the path of a tools file."""
        if value is None:
            return {}
        if isinstance(value, str | Path) and str(value).endswith((".yaml", ".yml", ".json")):
            return {"rollout": {"tools": {"file": _here(value), "functions": []}}}
        if isinstance(value, Mapping):
            raise ConfigError(f"tools is a dict; give a list of the functions: tools=[{', '.join(map(str, value))}]")
        items = list(value) if isinstance(value, list | tuple | set | Iterator) else [value]
        if isinstance(value, Iterator) and not items:
            raise ConfigError("tools is a generator, which can be read only once; give a list: tools=[…]")
        names = [self._tool(item, f"tools[{number}]") for number, item in enumerate(items)]
        return {"rollout": {"tools": {"file": None, "functions": names}}}

    def _tool(self, tool: Any, where: str) -> NameOrObject:
        refuse_coroutine(tool, where)
        if isinstance(tool, str | Path):
            return _path_of_code(str(tool), where, "tools=[price]")
        is_class = isinstance(tool, type)
        cls = tool if is_class else type(tool)
        for kind, base in (("interaction", BaseInteraction), ("scheduler", MultiTurnScheduler)):
            if issubclass(cls, base):
                raise ConfigError(f"{where} is of {cls.__name__}, which is not a tool; give it as {kind}={cls.__name__}")
        if is_class and issubclass(tool, BaseTool):
            raise ConfigError(f"{where} is the class {tool.__name__}; give a tool: {tool.__name__}(config, tool_schema)")
        if not isinstance(tool, BaseTool):
            if not inspect.isroutine(tool):
                public = inspect.getmembers(tool, lambda one: inspect.isfunction(one) or inspect.ismethod(one))
                methods = [name for name, one in public if one.__doc__ and name != "reset" and name[0] != "_"]
                if methods and not isinstance(tool, functools.partial):
                    each = ", ".join(f"it.{name}" for name in methods)
                    kind = f"the class {tool.__name__}" if is_class else f"a {type(tool).__name__}"
                    raise ConfigError(f"{where} is {kind}; give methods of an object: tools=[{each}]")
                raise ConfigError(
                    f"{where} is {brief(tool)}, which is not a function; write a function with annotations and a docstring, "
                    "and give it: tools=[price]"
                )
            FunctionTool(tool)  # raises now if signature or docstring are incomplete
        return LiveObject(tool)

    def interaction(self, value: Any) -> dict[str, Any]:
        """Return `rollout.interactions`; if there is only one interaction, it becomes the default."""
        if value is None:
            return {}
        if isinstance(value, str | Path) and str(value).endswith((".yaml", ".yml", ".json")):
            return {"rollout": {"interactions": _here(value)}}
        if isinstance(value, Mapping) and "class_name" not in value:
            items = [self._interaction(one, name=str(name)) for name, one in value.items()]
        else:
            items = [self._interaction(one) for one in (value if isinstance(value, list | tuple) else [value])]
        self.default_interaction = items[0]["name"] if len(items) == 1 else None
        return {"rollout": {"interactions": items}}

    def _interaction(self, value: Any, *, name: str | None = None) -> dict[str, Any]:
        refuse_coroutine(value, "interaction")
        if isinstance(value, Mapping):
            entry = self.plain(value)
            written = entry.get("class_name")
            if not isinstance(written, str | LiveObject):
                raise ConfigError(f"interaction has {brief(value)} without class_name; give the class: interaction=Customer")
            cls_name = written.name if isinstance(written, LiveObject) else written
            return {"name": name or default_name(cls_name.replace(".", ":").rpartition(":")[2]), **entry}
        if isinstance(value, str):
            _path_of_code(value, "interaction", "interaction=Customer")
            return {"name": name or default_name(value.replace(".", ":").rpartition(":")[2]), "class_name": value}
        cls = value if isinstance(value, type) else type(value)
        if inspect.isroutine(value) or not isinstance(value, type | BaseInteraction):
            raise ConfigError(
                f"interaction is {brief(value)}; give a class with `async def generate_response(self, instance_id, "
                "messages, **kwargs)` that inherits from polyturn.BaseInteraction: interaction=Customer"
            )
        check_interaction(cls, where="interaction")
        needed = [one for one in required(value) if one not in ("base", "policies")] if isinstance(value, type) else []
        if needed and not (len(needed) == 1 and re.search("conf|cfg", needed[0])):
            raise ConfigError(
                f"interaction is the class {cls.__name__}, which requires ({', '.join(needed)}), but would only get a "
                f"config; give an object: interaction={cls.__name__}(…)"
            )
        return {"name": name or default_name(cls.__name__), "class_name": LiveObject(value)}

    def reward(self, value: Any) -> dict[str, Any]:
        """Return the section `reward` for a function, a name, or a section with functions."""
        if value is None:
            return {}
        refuse_coroutine(value, "reward")
        if isinstance(value, Mapping):
            return {"reward": self.plain(value)}
        if isinstance(value, list | tuple):
            names = ", ".join(getattr(one, "__name__", "…") + "(trajectory)" for one in value)
            raise ConfigError(
                f"reward is a list of {len(value)}; give one function, which may sum the others: reward=lambda trajectory: "
                f"sum([{names}])"
            )
        if isinstance(value, type):
            raise ConfigError(f"reward is the class {value.__name__}; give a callable: reward={value.__name__}(…)")
        if not isinstance(value, str) and not callable(value):
            raise ConfigError(f"reward is {brief(value)}; give a function of a trajectory: reward=lambda trajectory: 1.0")
        return {"reward": {"function": self.plain(value)}}

    def scheduler(self, value: Any) -> dict[str, Any]:
        """Return `rollout.scheduler` for a class, an object or a name."""
        if value is None:
            return {}
        refuse_coroutine(value, "scheduler")
        if inspect.isfunction(value):
            raise ConfigError(
                f"scheduler is the function {value.__name__}; write it as `step(self, episode, turn)` of a class that "
                "inherits from polyturn.MultiTurnScheduler, and give the class: scheduler=MyScheduler"
            )
        if not isinstance(value, str | type | MultiTurnScheduler):
            raise ConfigError(f"scheduler is {brief(value)}; give a MultiTurnScheduler, its class, or the name of one")
        kwargs: dict[str, Any] = {} if isinstance(value, str) else {"scheduler_kwargs": {}}
        return {"rollout": {"scheduler": self.plain(value), **kwargs}}

    def overrides(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Convert keywords (sections, full keys, keys by their last name) to configuration.

        Raises:
            ConfigError: no key, or several keys, match a name; or two keywords set a key to different values.
        """
        values: dict[str, Any] = {}
        setters: dict[KeyPath, tuple[str, Any]] = {}
        paths = paths_of(arguments)
        for name, path in sorted(paths.items(), key=lambda one: len(one[1])):  # a part before its options
            section = self.plain(self.with_rows(tuple(path), arguments[name]))
            for key, value in leaves(section, tuple(path)):
                other, former = setters.setdefault(key, (name, value))
                if former != value:
                    raise ConfigError(
                        f"{other!r} sets {dotted(key)} to {brief(former)}, and {name!r} to {brief(value)}; remove one"
                    )
            merge(values, nested(tuple(path), section))
        return values


def _engine(engine: Any) -> Any:
    if isinstance(engine, Mapping):
        return dict(engine)
    if not isinstance(engine, str):
        raise ConfigError(f"engine is {brief(engine)}; name one: engine='embedded', 'vllm' or 'sglang'")
    return {"kind": engine}


def _path_of_code(value: str, what: str, write: str) -> str:
    """Return an import path; raise for any other text, such as the name of an object in quotes or the result of a call."""
    if not {":", "."} & set(value):
        raise ConfigError(
            f"{what} is the text {value!r:.60}; give the object itself, without quotes and without a call: {write}"
        )
    return value


def _here(path: str | Path) -> str:
    """Return the absolute path of a file or folder; return other names, such as names on the hub, unchanged."""
    folder = Path(os.path.expanduser(path))
    is_file = str(path).endswith(FILES) or isinstance(path, Path)
    return str(folder.absolute()) if is_file or os.path.exists(folder) else str(path)


def _files_here(path: str | Path) -> str:
    """Return the absolute path of a file or pattern; brackets in the name of this folder do not become part of a pattern."""
    files = os.path.expanduser(path)
    if os.path.exists(files) or not _is_pattern(files):
        return _here(path)
    return str(Path(glob.escape(str(Path.cwd())), files))


def _is_pattern(path: str) -> bool:
    return any(c in path for c in "*?[")


def _kind(value: Any) -> str:
    return f"{type(value).__module__.partition('.')[0]}:{type(value).__qualname__}"


def _tokenizer_name(tokenizer: Any) -> str | None:
    if isinstance(tokenizer, str | Path):
        return _here(tokenizer)
    if isinstance(tokenizer, type):
        name = tokenizer.__name__
        raise ConfigError(f"tokenizer is the class {name}; give a tokenizer: {name}.from_pretrained('…')")
    if tokenizer is not None and not hasattr(tokenizer, "apply_chat_template"):
        raise ConfigError(
            f"tokenizer is {brief(tokenizer)}; give a transformers tokenizer, its folder, or its name on the hub"
        )
    return None
