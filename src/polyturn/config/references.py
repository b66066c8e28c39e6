"""Resolve `${…}` (other keys and environment variables), and restore the expressions before writing to disk.

    {"path": "${oc.env:MODEL,tiny}"}  ->  {"path": "tiny"},  {("path",): "${oc.env:MODEL,tiny}"}

If resolving a value reads an environment variable, directly or through another key, the configured expression is written to
disk in place of the value.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from omegaconf.resolvers import oc
from pydantic import BaseModel
from pydantic_core import to_jsonable_python

from polyturn.config import schema
from polyturn.config.schema import KeyPath, dotted
from polyturn.config.sources import Sources, leaves, merge
from polyturn.core.errors import ConfigError

_READ: ContextVar[list[str]] = ContextVar("names of the environment variables that were read")


def resolve(model: type[BaseModel], sources: Sources) -> tuple[dict[str, Any], dict[KeyPath, str]]:
    """Resolve every `${…}`.

    Returns:
        The resolved values, without the model's defaults, and path -> expression for values that depend on the environment.
    """
    raw_env: dict[KeyPath, str] = {}
    if not any(isinstance(value, str) and "${" in value for _, value in leaves(sources.values, ())):
        values: dict[str, Any] = {}
        merge(values, sources.values)  # nothing to resolve: return a copy
        return values, raw_env
    tree = schema.default_tree(model)
    merge(tree, sources.values)
    OmegaConf.register_new_resolver("oc.env", _recorded, replace=True)
    read: list[str] = []

    def resolved(raw: Any, node: Any, key: Any, above: KeyPath) -> Any:
        path = (*above, key)
        if isinstance(raw, dict | list):
            inner = node[key]
            if isinstance(raw, dict):
                return {k: resolved(v, inner, k, path) for k, v in raw.items()}
            return [resolved(v, inner, i, path) for i, v in enumerate(raw)]
        if not isinstance(raw, str) or "${" not in raw:
            return raw
        read.clear()
        try:
            value = node[key]
            value = OmegaConf.to_container(value, resolve=True) if isinstance(value, DictConfig | ListConfig) else value
        except (OmegaConfBaseException, RecursionError) as error:
            why = "it refers to itself" if isinstance(error, RecursionError) else str(error).partition("\n")[0]
            raise ConfigError(
                f"{dotted(path)} is {raw!r}{sources.of(path)}, which cannot be resolved: {why}; correct the reference, or "
                "add a fallback as in ${oc.env:NAME,fallback}"
            ) from error
        if read:
            raw_env[path] = raw
        return value

    root, token = OmegaConf.create(tree, flags={"allow_objects": True}), _READ.set(read)
    try:
        return {key: resolved(raw, root, key, ()) for key, raw in sources.values.items()}, raw_env
    finally:
        _READ.reset(token)


def _recorded(name: str, *default: Any) -> Any:
    """Return an environment variable, like OmegaConf's own resolver, and record that it was read."""
    if (read := _READ.get(None)) is not None:
        read.append(name)
    return oc.env(name, *default)


def writable(config: BaseModel, resolved: Mapping[str, Any], raw_env: Mapping[KeyPath, str]) -> dict[str, Any]:
    """Return the whole configuration as plain data, without values from the environment."""
    dump = to_jsonable_python(config, fallback=str)
    secrets = secrets_in(resolved, raw_env)
    longest_first = sorted(map(re.escape, secrets), key=len, reverse=True)
    unsafe = re.compile("|".join([*longest_first, re.escape("${")]))
    clean: dict[str, Any] = restored(
        dump, raw_env, change=lambda text: unsafe.sub(lambda match: secrets.get(match[0], r"\${"), text)
    )
    return clean


def restored(
    value: Any, raw_env: Mapping[KeyPath, str], path: KeyPath = (), *, change: Callable[[str], str] = lambda text: text
) -> Any:
    """Return the value at `path` with the configured expressions in place of values from the environment; `change` is
    applied to all other texts."""
    if path in raw_env:
        return raw_env[path]
    if isinstance(value, dict):
        return {k: restored(v, raw_env, (*path, k), change=change) for k, v in value.items()}
    if isinstance(value, list):
        return [restored(v, raw_env, (*path, i), change=change) for i, v in enumerate(value)]
    return change(value) if isinstance(value, str) else value


def secrets_in(resolved: Mapping[str, Any], raw_env: Mapping[KeyPath, str]) -> dict[str, str]:
    """Return a mapping from each text that came from the environment to its configured expression.

    A validator may copy such a text into another key or a message. Short texts are left out, because they may occur by
    chance.
    """
    values = dict(leaves(resolved, ()))
    texts = {values[path]: raw for path, raw in raw_env.items() if isinstance(values.get(path), str)}
    return {text: raw for text, raw in texts.items() if len(text) >= 8}


def value_at(values: Any, path: KeyPath) -> Any:
    """Return the value at `path`."""
    for step in path:
        values = values[step]
    return values
