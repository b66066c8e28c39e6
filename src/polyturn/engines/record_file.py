"""A record in a YAML file: a dataclass's fields as keys. For what is no part of a run's configuration, such as a workload.

    tasks: 16
    group: 8        ->  read_record(Path("mine.yaml"), Workload, name="mine")

Whatever is wrong with the file is one sentence that names the file, the key and the value.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from polyturn.core.errors import ConfigError, did_you_mean
from polyturn.infra.yaml_file import read_yaml

T = TypeVar("T")


def read_record(path: Path, kind: type[T], *, hidden: tuple[str, ...] = (), **given: Any) -> T:
    """Return what the file says as a `kind`, a dataclass; a file may not set `given` nor `hidden`.

    Raises:
        ConfigError: it is no YAML, has a key that `kind` does not have, lacks one, or a value cannot be.
    """
    values = read_yaml(path)
    known = [one.name for one in dataclasses.fields(kind) if one.name not in {*hidden, *given}]  # type: ignore[arg-type]
    for key in values:
        if key not in known:
            raise ConfigError(f"{path}: there is no {key!r}.{did_you_mean(str(key), known)}")
    try:
        return TypeAdapter(kind).validate_python({**given, **values})
    except ValidationError as problem:
        first = problem.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        if first["type"] in {"missing", "missing_keyword_only_argument"}:
            raise ConfigError(f"{path}: {where} is missing; known keys: {', '.join(known)}") from problem
        said = first["msg"].removeprefix("Value error, ")
        raise ConfigError(f"{path}: {where} is {first['input']!r}; {said}" if where else f"{path}: {said}") from problem
