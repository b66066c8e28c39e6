"""Resolve `${…}` (other keys and environment variables), and restore the expressions before writing to disk.

    {"path": "${oc.env:MODEL,tiny}"}  ->  {"path": "tiny"},  {("path",): "${oc.env:MODEL,tiny}"}

Values are resolved twice, the second time with a mark in place of environment variables. A value that contains the mark
depends on the environment, directly or not, and is written as the configured expression.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel
from pydantic_core import to_jsonable_python

from polyturn.config import schema
from polyturn.config.schema import KeyPath, dotted
from polyturn.config.sources import Sources, merge
from polyturn.core.errors import ConfigError

_ENV = re.compile(r"\$\{\s*oc\.env\s*:")
_MARK = "\u27e6environment\u27e7"
"""Replaces environment variables; a resolved value that contains it depends on the environment."""


def resolve(model: type[BaseModel], sources: Sources) -> tuple[dict[str, Any], dict[KeyPath, str]]:
    """Resolve every `${…}`.

    Returns:
        The resolved values, without the model's defaults, and path -> expression for values that depend on the environment.
    """
    if not _refers(sources.values):
        return _mask(sources.values), {}  # nothing to resolve: return a copy
    tree = schema.default_tree(model)
    merge(tree, sources.values)
    real = OmegaConf.create(tree, flags={"allow_objects": True})
    masked = OmegaConf.create(_mask(tree), flags={"allow_objects": True})
    raw_env: dict[KeyPath, str] = {}

    def walk(raw: Any, node: Any, hidden: Any, path: KeyPath) -> Any:
        if isinstance(raw, dict):
            return {k: one(raw[k], node, hidden, k, path) for k in raw}
        return [one(v, node, hidden, i, path) for i, v in enumerate(raw)]

    def one(raw: Any, node: Any, hidden: Any, key: Any, above: KeyPath) -> Any:
        path = (*above, key)
        if isinstance(raw, dict | list):
            return walk(raw, node[key], hidden[key], path)
        if not isinstance(raw, str) or "${" not in raw:
            return raw
        if _depends_on_environment(hidden, key):
            raw_env[path] = raw
        try:
            return _plain(node[key])
        except (OmegaConfBaseException, RecursionError) as error:
            why = "it refers to itself" if isinstance(error, RecursionError) else str(error).partition("\n")[0]
            raise ConfigError(
                f"{dotted(path)} is {raw!r}{sources.of(path)}, which cannot be resolved: {why}; correct the reference, or "
                "add a fallback as in ${oc.env:NAME,fallback}"
            ) from error

    return walk(sources.values, real, masked, ()), raw_env


def _refers(value: Any) -> bool:
    """Return whether a value contains `${` anywhere."""
    if isinstance(value, dict | list):
        return any(map(_refers, value.values() if isinstance(value, dict) else value))
    return isinstance(value, str) and "${" in value


def _mask(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _mask(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_mask(v) for v in value]
    return _MARK if isinstance(value, str) and _ENV.search(value) else value


def _depends_on_environment(node: Any, key: Any) -> bool:
    """Return whether the value contains the mark, or cannot be resolved with the mark."""
    try:
        return _MARK in str(_plain(node[key]))
    except (OmegaConfBaseException, RecursionError):
        return True  # treated as a secret: writing the expression is always safe


def _plain(value: Any) -> Any:
    return OmegaConf.to_container(value, resolve=True) if isinstance(value, DictConfig | ListConfig) else value


def writable(config: BaseModel, resolved: Mapping[str, Any], raw_env: Mapping[KeyPath, str]) -> dict[str, Any]:
    """Return the whole configuration as plain data, without values from the environment."""
    dump = to_jsonable_python(config, fallback=str)
    secrets = secrets_in(resolved, raw_env)

    def clean(value: Any, path: KeyPath) -> Any:
        if path in raw_env:
            return raw_env[path]
        if isinstance(value, dict):
            return {k: clean(v, (*path, k)) for k, v in value.items()}
        if isinstance(value, list):
            return [clean(v, (*path, i)) for i, v in enumerate(value)]
        if not isinstance(value, str):
            return value
        reference = next((raw for secret, raw in secrets.items() if secret in value), None)
        return value.replace("${", r"\${") if reference is None else reference

    cleaned: dict[str, Any] = clean(dump, ())
    return cleaned


def secrets_in(resolved: Mapping[str, Any], raw_env: Mapping[KeyPath, str]) -> dict[str, str]:
    """Return text from the environment -> the configured expression.

    A validator may copy such a text into another key or a message. Short texts are left out, because they may occur by
    chance.
    """
    texts = {value_at(resolved, path): raw for path, raw in raw_env.items() if isinstance(value_at(resolved, path), str)}
    return {text: raw for text, raw in texts.items() if len(text) >= 8}


def value_at(values: Any, path: KeyPath) -> Any:
    """Return the value at `path`."""
    for step in path:
        values = values[step]
    return values
