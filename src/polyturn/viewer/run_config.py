"""Reads a run's config.yaml as plain data with size limits, because the run may be untrusted."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from polyturn.core.errors import DataError, one_line
from polyturn.core.reward import as_score
from polyturn.infra.contained import read_contained
from polyturn.rewards.options import DEFAULT_WEIGHTS

MAX_BYTES = 1 << 20
"""Largest number of bytes of a configuration."""
MAX_ALIASES = 20
"""Largest number of YAML aliases, each of which may double the size."""
MAX_DEPTH = 100
"""Largest nesting depth; the time to parse grows with its square."""


def section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return a section of a config; empty if it is missing."""
    value = config.get(name)
    return value if isinstance(value, Mapping) else {}


def reward_weights(config: Mapping[str, Any]) -> dict[str, float]:
    """Return component -> weight in the reward; components that are not listed have weight 0."""
    weights = section(section(config, "reward"), "weights") or DEFAULT_WEIGHTS
    return {"overlong": 1.0} | {name: known for name, weight in weights.items() if (known := as_score(weight)) is not None}


class ReadConfig(NamedTuple):
    """The configuration that a run was started with."""

    values: dict[str, Any]
    problem: str = ""
    """Why the values are empty."""


def read_config(folder: Path) -> ReadConfig:
    """Return the configuration of the run in `folder`; if it cannot be read, it is empty, with the reason."""
    try:
        text = read_contained(folder, "config.yaml", max_bytes=MAX_BYTES)
        if text is None:
            return ReadConfig({}, "the run has no config.yaml")
        aliases = depth = 0
        for event in yaml.parse(text):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            aliases += isinstance(event, yaml.AliasEvent)
            if aliases > MAX_ALIASES or depth > MAX_DEPTH:
                what = "refers to its own parts more often" if aliases > MAX_ALIASES else "is nested deeper"
                return ReadConfig({}, f"its config {what} than allowed, and is not shown")
        config = yaml.safe_load(text)
    except (DataError, ValueError, RecursionError, yaml.YAMLError) as problem:
        return ReadConfig({}, f"its config cannot be read ({one_line(problem)})")
    return ReadConfig(config if isinstance(config, dict) else {})
