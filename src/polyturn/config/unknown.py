"""Find unknown keys of a configuration, with a hint for each.

    unknown_keys(RunConfig, {"train": {"step": 3}})  ->  [Unknown(path=("train", "step"), value=3, hint=" Did you …"), …]

Pydantic reports an unknown key in a union once per member and without a suggestion. This module walks the annotations to
give one sentence with the nearest key.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from difflib import get_close_matches
from typing import Any, NamedTuple

from polyturn.config.retired import successor
from polyturn.config.schema import (
    KeyPath,
    child,
    distinguishing_key,
    dotted,
    is_model,
    keys_of,
    kinds_of,
    meant,
    schema_table,
    takes_more,
    unwrap,
)
from polyturn.config.well_known import suggestion
from polyturn.core.errors import did_you_mean
from polyturn.infra.plugins import offered

NUM_LISTED = 6
"""Largest number of a section's keys in a message."""
CLOSE = 0.8
"""difflib similarity from which a key of the same section is suggested before another trainer's key or another section's."""


class Unknown(NamedTuple):
    """An unknown key."""

    path: KeyPath
    value: Any
    hint: str


def unknown_keys(model: type, values: Mapping[str, Any]) -> list[Unknown]:
    """Return the unknown keys of `values` at all levels of `model`, with the nearest known key."""
    everywhere = functools.cache(lambda: [row.key for row in schema_table(model)])
    return list(_unknown(model, values, (), everywhere))


def _unknown(annotation: Any, value: Any, path: KeyPath, everywhere: Callable[[], list[str]]) -> Iterator[Unknown]:
    """Yield the unknown keys below `path`."""
    of = meant(annotation, value)
    if isinstance(value, Mapping):
        known = keys_of(of) if is_model(of) else None
        for key, inner in value.items():
            if known is not None and key not in known:
                if retired := successor(dotted((*path, key))):
                    yield Unknown((*path, key), inner, f" It is no longer a key; {retired}.")
                elif not takes_more(of):
                    hint = _of_another_kind(annotation, of, str(key), value, path)
                    yield Unknown((*path, key), inner, hint or _nearest(str(key), inner, known, path, everywhere))
            else:
                yield from _unknown(child(of, key), inner, (*path, key), everywhere)
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            yield from _unknown(child(of, index), inner, (*path, index), everywhere)


def _of_another_kind(annotation: Any, of: Any, key: str, value: Mapping[str, Any], path: KeyPath) -> str:
    """Return a hint with the kinds of the section that have the key, " It is for engine.kind vllm, …"; "" if none has it."""
    sections = [m for m in unwrap(annotation) if is_model(m)]
    by = distinguishing_key(sections) if len(sections) > 1 else ""
    kinds = [kind for m in sections if by and key in keys_of(m) for kind in kinds_of(m).get(by, ("your own",))]
    if not kinds:
        return ""
    now, where = value.get(by, keys_of(of)[by].default), dotted((*path, by))
    if by not in value and keys_of(of)[by].is_required:
        return f" It is for {where} {' or '.join(kinds)}; set {by}, or remove {key} (null)."
    names = offered(getattr(of, "GROUP", ""))
    if names and now not in names and (near := did_you_mean(str(now), names)).startswith(" Did"):
        return f" {where}: there is no {now!r}.{near}"
    return f" It is for {where} {' or '.join(kinds)}, and {by} is {now!r}; set {by}, or remove {key} (null)."


def _nearest(key: str, value: Any, known: Mapping[str, Any], path: KeyPath, everywhere: Callable[[], list[str]]) -> str:
    """Suggest a near key, polyturn's key for another trainer's, or the same key in another section."""
    near = f"{dotted(path)}." if path else ""
    if close := get_close_matches(key, known, n=2, cutoff=CLOSE):
        return f" Did you mean {' or '.join(repr(near + name) for name in close)}?"
    is_about_training = "train.groups_per_step" in everywhere() and path[:1] != ("evaluation",)
    if is_about_training and (ours := suggestion(key, value)):
        return f" It is another trainer's name; write {ours}."
    # Next in other sections: a correctly spelt key is more likely in the wrong section than misspelt.
    elsewhere = [k for k in everywhere() if k.rpartition(".")[2] == key] or nearest_keys(key, everywhere())
    if path[:1] == ("evaluation",):  # a key of the training would change the training
        elsewhere = [k for k in elsewhere if k.startswith("evaluation.")]
    below = [k for k in elsewhere if k.startswith(near)]  # in the same section
    if path and not below and (longer := [name for name in known if name.startswith(f"{key}_")]):
        return f" Did you mean {' or '.join(repr(near + name) for name in longer[:2])}?"
    candidates = sorted(dict.fromkeys(below or elsewhere), key=lambda k: (not k.startswith("train."), "<" in k, "[" in k))
    if candidates:
        hint = f" Did you mean {' or '.join(repr(k) for k in candidates[:2])}?"
        # If several distant sections have the name, the keys of this section are as good a hint.
        if below or not path or len(elsewhere) == 1:
            return hint
        more = ", …" if len(known) > NUM_LISTED else ""
        return f"{hint} {dotted(path)} has {', '.join(map(repr, [*known][:NUM_LISTED]))}{more}."
    hint = did_you_mean(key, known)
    return re.sub(r"'([^']+)'", rf"'{near}\1'", hint) if hint.startswith(" Did") else hint


def nearest_keys(name: str, keys: Iterable[str]) -> list[str]:
    """Return the full keys whose last part is nearest to a misspelt one; empty if none is close."""
    by_name: dict[str, list[str]] = {}
    for key in keys:
        by_name.setdefault(key.rpartition(".")[2], []).append(key)
    close = get_close_matches(name, by_name, n=2, cutoff=CLOSE)
    return [key for one in close for key in by_name[one]]
