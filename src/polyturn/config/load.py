"""Load a configuration: YAML, its `defaults:` files, dotted overrides and `${…}`, into a validated pydantic model.

    load_config(RunConfig, Path("run.yaml"), ["train.steps=5", "model.path=${oc.env:MODEL,tiny}"])
      ->  Loaded(config=RunConfig(...), resolved={"train": {"steps": 5, ...}, "model": {"path": "${oc.env:MODEL,tiny}"}})

Separate so that nothing else reads configuration files. Two promises: every problem is one sentence that names the key,
shows the value and says where it came from; and what `resolved` holds can be written to disk, because whatever depends on
an environment variable stays the expression that was configured, also when it got there through another key.
`sources.py` merges, `references.py` resolves `${…}`, `explain.py` says what is wrong.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar, get_args

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, ValidationError

from polyturn.config import schema
from polyturn.config.explain import as_shown, explain
from polyturn.config.references import resolve, writable
from polyturn.config.schema import KeyPath, dotted, schema_table
from polyturn.config.sources import Sources, leaves, merge
from polyturn.core.errors import ConfigError, did_you_mean, one_line
from polyturn.core.nesting import MAX_DEPTH, is_deep
from polyturn.core.secret import masked

__all__ = ["Loaded", "load_config", "load_values", "schema_table", "write_resolved"]

ModelT = TypeVar("ModelT", bound=BaseModel)

RESOLVED_HEAD = (
    "# Everything this run used, defaults included. ${oc.env:...} is read from the environment and never written.\n"
)
"""The first line of a run's own configuration, which tells it from one that a person wrote."""
MAX_VALUES = 1_000_000
"""Values of a file, each counted wherever an alias repeats it."""
MAX_NAME = 1000
"""Characters of a file's path, far below what systems take."""


class Loaded(NamedTuple, Generic[ModelT]):
    """A configuration that was read."""

    config: ModelT
    resolved: dict[str, Any]
    """Everything with defaults filled in and `${…}` resolved, except what depends on the environment."""


def load_config(
    model: type[ModelT],
    path: Path | None,
    overrides: Sequence[str] = (),
    *,
    defaults: Mapping[str, Any] | None = None,
) -> Loaded[ModelT]:
    """Read a configuration.

    From weakest to strongest: the model's own defaults, `defaults`, the files that the YAML names under `defaults:`, the
    YAML itself, the overrides. Mappings merge, everything else replaces.

    Args:
        model: The pydantic model; unknown keys are errors in it and in the models inside it.
        path: The YAML file; None for overrides alone.
        overrides: `key.path=value`, the value read as YAML; `+key=value` is the same. List entries go by number.
        defaults: Values below the file.

    Raises:
        ConfigError: a missing or damaged file, an unknown key, a wrong type, a `${…}` that leads nowhere: one sentence each.
    """
    sources = Sources()
    if defaults:
        sources.merge(defaults, "from the built-in defaults")
    if path is not None:
        for file, values in _read_chain(path, ()):
            sources.merge(values, f"in {file}")
    for override in overrides:
        _override(model, sources, override)
    return _load(model, sources)


def load_values(model: type[ModelT], values: Mapping[str, Any], *, origin: Mapping[KeyPath, str]) -> Loaded[ModelT]:
    """Read a configuration that a program made.

    Args:
        model: The pydantic model.
        values: The configuration as plain data.
        origin: Native key to the key it was made of and where that was written: {("train", "steps"): "trainer.steps"}.

    Raises:
        ConfigError: as `load_config` does.
    """
    sources = Sources()
    sources.merge(values, "")
    sources.translated = origin
    return _load(model, sources)


def _load(model: type[ModelT], sources: Sources) -> Loaded[ModelT]:
    if is_deep(sources.values):
        raise ConfigError(f"the configuration is nested deeper than {MAX_DEPTH} lists and mappings; write it flatter")
    written, raw_env = resolve(model, sources)
    written = schema.with_choices(model, written)
    resolved = schema.with_instance_defaults(model, written)
    problems = [
        f"unknown key {dotted(u.path)!r}, set to {as_shown(u.value, u.path, raw_env)}{sources.of(u.path)}.{u.hint}"
        for u in schema.unknown_keys(model, written)
    ]
    try:
        config = model.model_validate(resolved)
    except ValidationError as error:
        problems += explain(error, model, resolved, sources, raw_env)
    if problems:
        raise ConfigError("\n".join(problems))
    return Loaded(config, writable(config, resolved, raw_env))


def write_resolved(resolved: Mapping[str, Any], path: Path) -> None:
    """Write `Loaded.resolved` as YAML; a crash leaves no half a file.

    It loads again to the same configuration, except that a secret which was written into it is not there.
    """
    text = yaml.safe_dump(masked(resolved), sort_keys=False, allow_unicode=True, width=1000)
    temporary = path.with_name(f".{path.name}.tmp")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary.write_text(RESOLVED_HEAD + text, encoding="utf-8")
    os.replace(temporary, path)


# --- files and overrides ----------------------------------------------------------------------------------------------


def _read_chain(path: Path, above: tuple[Path, ...]) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yield the files below `path`, the weakest first, then `path` itself."""
    if path.resolve() in above:
        chain = " -> ".join(str(p) for p in (*above, path.resolve()))
        raise ConfigError(f"the 'defaults' of these files go round in a circle: {chain}; remove one of them")
    values = _read(path)
    below = values.pop("defaults", None) or []
    below = [below] if isinstance(below, str) else below
    if not isinstance(below, list) or not all(isinstance(b, str) for b in below):
        raise ConfigError(f"'defaults' in {path} must be a file name or a list of them, not {below!r}")
    for name in below:
        if len(name) > MAX_NAME or "\0" in name:
            raise ConfigError(f"'defaults' in {path} names {name!r:.80}…, which no file can be called")
        yield from _read_chain(path.parent / Path(name).expanduser(), (*above, path.resolve()))
    yield path, values


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        near = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
        what = "is a folder, not a config file" if path.is_dir() else "does not exist"
        raise ConfigError(f"the config {str(path)!r} {what}.{did_you_mean(path.name, near) if near else ' Check the path.'}")
    return read_yaml(path)


def read_yaml(path: Path) -> dict[str, Any]:
    """Return the keys of a YAML file, interpolations left as they are.

    Raises:
        ConfigError: it cannot be read, or holds something else.
    """
    try:
        num = _num_values(path)
        values = OmegaConf.to_container(OmegaConf.load(path), resolve=False) if num <= MAX_VALUES else None
    except yaml.MarkedYAMLError as error:
        line = f" line {error.problem_mark.line + 1}" if error.problem_mark else ""
        what = "a tab indents it; YAML takes spaces alone" if _is_tab(error, path) else f"{error.problem}; correct it"
        raise ConfigError(f"{path}{line}: this is not YAML ({what})") from error
    except AssertionError as error:  # what OmegaConf says of a file that holds one number
        raise ConfigError(f"{path} must hold keys with values, and it holds one value") from error
    except (OmegaConfBaseException, OSError, ValueError, TypeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} cannot be read as a config: {one_line(error):.500}") from error
    except RecursionError as error:
        raise ConfigError(f"{path} is nested deeper than {MAX_DEPTH} lists and mappings; write it flatter") from error
    if num > MAX_VALUES:
        raise ConfigError(
            f"{path} has {num:,} values where its aliases (*name) are written out; at most {MAX_VALUES:,} are read"
        )
    if not isinstance(values, dict):
        raise ConfigError(f"{path} must hold keys with values, and it holds a {type(values).__name__}")
    return {str(k): v for k, v in values.items()}


def _num_values(path: Path) -> int:
    """Return how many values a file has, each counted wherever an alias repeats it.

    Raises:
        RecursionError: a part holds itself, or is nested too deep.
    """
    sizes: dict[yaml.Node, int] = {}

    def size(node: yaml.Node) -> int:
        if node not in sizes:
            below = [one for pair in node.value for one in pair] if isinstance(node, yaml.MappingNode) else node.value
            sizes[node] = 1 + (0 if isinstance(node, yaml.ScalarNode) else sum(map(size, below)))
        return sizes[node]

    with path.open(encoding="utf-8") as file:
        root = yaml.compose(file, Loader=yaml.SafeLoader)
    return 0 if root is None else size(root)


def _is_tab(error: yaml.MarkedYAMLError, path: Path) -> bool:
    mark = error.problem_mark
    if mark is None:
        return False
    line = path.read_text(encoding="utf-8", errors="replace").splitlines()[mark.line : mark.line + 1]
    return "".join(line)[mark.column : mark.column + 1] == "\t"


def _named(model: type[BaseModel], path: KeyPath, at: Any) -> Any:
    """Return a section that was written as its name alone, `env: a:B`, with the key `name`; all else as it is."""
    if not isinstance(at, str) or len(path) != 1 or (field := model.model_fields.get(str(path[0]))) is None:
        return at
    sections = [a for a in get_args(field.annotation) if isinstance(a, type) and issubclass(a, BaseModel)]
    return {"name": at} if any("name" in section.model_fields for section in sections) else at


def _override(model: type[BaseModel], sources: Sources, override: str) -> None:
    key, equals, text = override.partition("=")
    key = key.strip().removeprefix("+")
    if not equals or not key:
        raise ConfigError(f"the override {override!r} has no '='; write it as key.path=value")
    try:
        parsed = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text}"]), resolve=False)
    except (OmegaConfBaseException, yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        why = f"{one_line(error):.300}"
        raise ConfigError(f"the value in the override {override!r:.200} cannot be read ({why}); quote it") from error
    assert isinstance(parsed, dict)
    value = parsed["value"]
    path: KeyPath = ()
    at: Any = sources.values
    parts = key.split(".")
    for depth, part in enumerate(parts):
        is_last = depth == len(parts) - 1
        if isinstance(at, list):
            if not part.isdigit() or int(part) >= len(at):
                known = f"0 to {len(at) - 1}" if at else "nothing"
                raise ConfigError(f"the override {override!r}: {dotted(path)} is a list, {part!r} is not one of {known}")
            step: str | int = int(part)
        elif isinstance(at, dict):
            step = part
            if not is_last and at.get(step) is None:
                at[step] = {}
        else:
            raise ConfigError(f"the override {override!r}: {dotted(path)} is {at!r}, which has no keys to set")
        path = (*path, step)
        if is_last and isinstance(value, dict) and isinstance(at, dict) and isinstance(at.get(step), dict):
            merge(at[step], value)
        elif is_last:
            at[step] = value
        else:
            at[step] = at = _named(model, path, at[step])
    for leaf, _ in leaves(value, path):
        sources.origin[leaf] = f"from the override {override!r}"
