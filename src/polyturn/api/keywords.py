"""Map keywords to keys of the configuration: by last name, by full name, or by another trainer's name.

    path_of("lr")  ->  ["train", "optim", "lr"]          path_of("learning_rate", 1e-5)  ->  ConfigError: … write lr=1e-05

`given.py` converts the values.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from polyturn.config.models import RunConfig
from polyturn.config.schema import schema_table
from polyturn.config.unknown import CLOSE, RETIRED, nearest_keys
from polyturn.config.well_known import WELL_KNOWN, call_for
from polyturn.core.errors import ConfigError, did_you_mean

FIRST = ("", "train")
"""Sections whose keys win if another section has a key of the same last name; "" is the top level."""
INNER = ("train.optim", "train.distributed", "rollout.limits", "rollout.sampling")
"""Nested sections whose keys can be named by their last name; other nested keys need the full name."""
PARTS = ("algorithm.advantage", "algorithm.loss")
"""Parts whose arguments can be named by their last name, if it is unique."""


@functools.cache
def _keys() -> Mapping[str, tuple[str, ...]]:
    """Return last name -> the keys that it may mean. Keys that can only be named in full are left out."""
    spellings: dict[str, list[str]] = {}
    of_parts: dict[str, list[str]] = {}
    for row in schema_table(RunConfig):
        if "<" in row.key or "[" in row.key:
            continue
        above, _, last = row.key.rpartition(".")
        if "." in above and above not in (*INNER, *PARTS):
            continue
        if row.type != "section" or "." not in row.key:
            (of_parts if above in PARTS else spellings).setdefault(last, []).append(row.key)
    return {name: tuple(dict.fromkeys(keys)) for name, keys in (of_parts | spellings).items()}


OWN = (
    *("model", "tokenizer", "tasks", "eval_tasks", "tools", "interaction", "reward", "scheduler", "engine"),
    *("config", "resume", "ray"),
)
"""Parameters of the functions themselves, which are suggested for misspelt keywords."""


def paths_of(keywords: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return keyword -> path of its key.

    Raises:
        ConfigError: keywords match no key or several; one line for each.
    """
    paths, problems = {}, []
    for name, value in keywords.items():
        try:
            paths[name] = path_of(name, value)
        except ConfigError as problem:
            problems.append(str(problem))
    if problems:
        raise ConfigError("\n".join(problems))
    return paths


def path_of(name: str, value: Any = None) -> list[str]:
    """Return the path of a keyword's key; `value` appears in suggestions.

    Raises:
        ConfigError: no key, or several keys, match the keyword.
    """
    if "." in name:
        return name.split(".")
    keys, theirs = _keys().get(name, ()), WELL_KNOWN.get(name)
    if theirs is not None and len(theirs.keys) > 1:
        candidates = call_for(name, value, keyword_of=_keyword_of)
        raise ConfigError(f"the keyword {name!r} may mean {', '.join(theirs.keys)}; write one of them: {candidates}")
    if not keys and theirs is not None:
        raise ConfigError(f"there is no keyword {name!r}; write {call_for(name, value, keyword_of=_keyword_of)}")
    if not keys and (retired := [text for key, text in RETIRED.items() if key.endswith(f".{name}")]):
        raise ConfigError(f"there is no longer a keyword {name!r}; {retired[0]}")
    if not keys:
        raise ConfigError(
            f"there is no keyword {name!r}.{_near(name, value)} A keyword is one of "
            f"{', '.join(OWN)}, a section of the configuration, or the last part of its keys, such as steps or max_turns"
        )
    if name in keys:
        return [name]
    if len(keys) > 1:
        chosen = [key for section in FIRST for key in keys if key.rpartition(".")[0] == section]
        if not chosen:
            whole = ", ".join(f"**{{{key!r}: …}}" for key in keys[:4])
            raise ConfigError(f"the keyword {name!r} may mean {', '.join(keys)}; write the full key: {whole}")
        return chosen[0].split(".")
    return keys[0].split(".")


def _keyword_of(key: str) -> str | None:
    """Return the last name of a key if, used as a keyword, it means this key; None otherwise."""
    last = key.rpartition(".")[2]
    is_ambiguous = last in WELL_KNOWN and len(WELL_KNOWN[last].keys) > 1
    return last if not is_ambiguous and last in _keys() and path_of(last) == key.split(".") else None


def _near(name: str, value: Any) -> str:
    """Suggest the keyword, another trainer's name, or full key that is nearest to a misspelt keyword."""
    known = [*OWN, *(one for one in _keys() if one not in WELL_KNOWN)]
    whole = nearest_keys(name, (row.key for row in schema_table(RunConfig) if not {"<", "["} & set(row.key)))
    for cutoff in (CLOSE, 0.6):
        if get_close_matches(name, known, cutoff=cutoff):
            return did_you_mean(name, known)
        for theirs in get_close_matches(name, WELL_KNOWN, n=1, cutoff=cutoff):
            return f" If you mean {theirs!r}, write {call_for(theirs, value, keyword_of=_keyword_of)}."
        if whole:
            return f" Did you mean {' or '.join(f'**{{{key!r}: …}}' for key in whole[:2])}?"
    return ""
