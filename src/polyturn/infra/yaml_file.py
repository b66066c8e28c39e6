"""Reads the keys of a YAML file, with a readable message for a file that cannot be read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from polyturn.core.errors import ConfigError, did_you_mean, one_line
from polyturn.infra.nesting import MAX_DEPTH

MAX_VALUES = 1_000_000
"""The most values in a file; a value that an alias repeats counts each time."""


def check_config_file(path: Path) -> None:
    """Raise unless there is a file at `path`; the message names the YAML files nearby.

    Raises:
        ConfigError: there is a folder, or nothing.
    """
    if path.is_dir():
        inside = [str(p) for p in sorted(path.iterdir()) if p.suffix in (".yaml", ".yml")][:3]
        hint = f"; give {' or '.join(map(repr, inside))}" if inside else ", and there is no YAML file in it"
        raise ConfigError(f"the config {str(path)!r} is a folder, not a config file{hint}")
    if not path.is_file():
        near = [p.name for p in path.parent.iterdir() if p.suffix in (".yaml", ".yml")] if path.parent.is_dir() else []
        hint = did_you_mean(path.name, near) if near else " Check the path."
        raise ConfigError(f"the config {str(path)!r} does not exist.{hint}")


def read_yaml(path: Path) -> dict[str, Any]:
    """Return the keys and values of a YAML file; interpolations are not resolved.

    Raises:
        ConfigError: the file cannot be read, or its content is not a mapping.
    """
    try:
        num = _num_values(path)
        values = OmegaConf.to_container(OmegaConf.load(path), resolve=False) if num <= MAX_VALUES else None
    except yaml.MarkedYAMLError as error:
        line = f" line {error.problem_mark.line + 1}" if error.problem_mark else ""
        what = "it is indented with a tab; use spaces" if _is_tab(error, path) else f"{error.problem}; correct it"
        raise ConfigError(f"{path}{line}: this is not YAML ({what})") from error
    except (AssertionError, OmegaConfBaseException, OSError, ValueError, TypeError, yaml.YAMLError) as error:
        # OmegaConf raises one of these two for a file with just a number.
        if isinstance(error, AssertionError) or (isinstance(error, OSError) and error.errno is None):
            raise ConfigError(f"{path} holds one value; write keys with values") from error
        raise ConfigError(f"{path} cannot be read as a config: {one_line(error):.500}") from error
    except RecursionError as error:
        raise ConfigError(f"{path} is nested deeper than {MAX_DEPTH} lists and mappings; write it flatter") from error
    if num > MAX_VALUES:
        raise ConfigError(
            f"{path} has {num:,} values where its aliases (*name) are written out; at most {MAX_VALUES:,} are read"
        )
    if not isinstance(values, dict):
        raise ConfigError(f"{path} holds a {type(values).__name__}; write keys with values")
    return {str(k): v for k, v in values.items()}


def _num_values(path: Path) -> int:
    """Count the values in a file; a value that an alias repeats counts each time.

    Raises:
        RecursionError: a part contains itself, or is nested too deeply.
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
