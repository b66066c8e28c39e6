"""Keys that a configuration has and no section knows, with the sentence about each.

    unknown_keys(RunConfig, {"train": {"step": 3}})  ->  [Unknown(path=("train", "step"), value=3, hint=" Did you …"), …]

Pydantic reports an unknown key inside a union once per member and without a suggestion; walking the annotations here gives
one sentence with the nearest key.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from difflib import get_close_matches
from typing import Any, NamedTuple

from polyturn.config.schema import (
    KeyPath,
    child,
    dotted,
    is_model,
    keys_of,
    kinds_of,
    meant,
    schema_table,
    takes_more,
    told_apart_by,
    unwrap,
)
from polyturn.config.well_known import suggestion
from polyturn.core.errors import did_you_mean
from polyturn.core.plugins import offered

NUM_LISTED = 6
"""Keys of a section that a message lists."""
CLOSE = 0.8
"""How near a name is (of difflib) that is rather meant than another trainer's, or one of another section."""


class Unknown(NamedTuple):
    """A key that no section knows."""

    path: KeyPath
    value: Any
    hint: str


def unknown_keys(model: type, values: Mapping[str, Any]) -> list[Unknown]:
    """Return every key of `values` that `model` or a model inside it does not know, with the nearest known key."""
    everywhere = functools.cache(lambda: [row.key for row in schema_table(model)])
    return list(_unknown(model, values, (), everywhere))


def _unknown(annotation: Any, value: Any, path: KeyPath, everywhere: Callable[[], list[str]]) -> Iterator[Unknown]:
    """Yield the unknown keys below `path`."""
    of = meant(annotation, value)
    if isinstance(value, Mapping):
        known = keys_of(of) if is_model(of) else None
        for key, inner in value.items():
            if known is not None and key not in known:
                if not takes_more(of):
                    hint = _of_another_kind(annotation, of, str(key), value, path)
                    yield Unknown((*path, key), inner, hint or _nearest(str(key), inner, known, path, everywhere))
            else:
                yield from _unknown(child(of, key), inner, (*path, key), everywhere)
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            yield from _unknown(child(of, index), inner, (*path, index), everywhere)


def _of_another_kind(annotation: Any, of: Any, key: str, value: Mapping[str, Any], path: KeyPath) -> str:
    """Say which kind of the section has a key, where another one does: " It is for engine.kind vllm or sglang, …"."""
    sections = [m for m in unwrap(annotation) if is_model(m)]
    by = told_apart_by(sections) if len(sections) > 1 else ""
    kinds = [kind for m in sections if by and key in keys_of(m) for kind in kinds_of(m).get(by, ("one of your own",))]
    if not kinds:
        return ""
    now, where = value.get(by, keys_of(of)[by].default), dotted((*path, by))
    if by not in value and keys_of(of)[by].is_required:
        return f" It is for {where} {' or '.join(kinds)}; set {by}, or leave {key} out (null)."
    names = offered(getattr(of, "GROUP", ""))
    if names and now not in names and (near := did_you_mean(str(now), names)).startswith(" Did"):
        return f" {where}: there is no {now!r}.{near}"
    return f" It is for {where} {' or '.join(kinds)}, and that is {now!r}; set {by}, or leave {key} out (null)."


def _nearest(key: str, value: Any, known: Mapping[str, Any], path: KeyPath, everywhere: Callable[[], list[str]]) -> str:
    """Suggest what stands for another trainer's key, this key of another section, or a near one."""
    near = f"{dotted(path)}." if path else ""
    if close := get_close_matches(key, known, n=2, cutoff=CLOSE):
        return f" Did you mean {' or '.join(repr(near + name) for name in close)}?"
    if (ours := suggestion(key, value)) and "train.groups_per_step" in everywhere():
        return f" It is another trainer's name; write {ours}."
    # Next elsewhere: a key that is spelt right was rather put into the wrong section than misspelt.
    elsewhere = [k for k in everywhere() if k.rpartition(".")[2] == key] or nearest_keys(key, everywhere())
    below = [k for k in elsewhere if k.startswith(near)]  # in the same section
    if path and not below and (longer := [name for name in known if name.startswith(f"{key}_")]):
        return f" Did you mean {' or '.join(repr(near + name) for name in longer[:2])}?"
    candidates = sorted(dict.fromkeys(below or elsewhere), key=lambda k: (not k.startswith("train."), "<" in k, "[" in k))
    if candidates:
        hint = f" Did you mean {' or '.join(repr(k) for k in candidates[:2])}?"
        # A name that several distant sections have says little about what was meant: the keys of this one do as well.
        if below or not path or len(elsewhere) == 1:
            return hint
        more = ", …" if len(known) > NUM_LISTED else ""
        return f"{hint} {dotted(path)} has {', '.join(map(repr, [*known][:NUM_LISTED]))}{more}."
    hint = did_you_mean(key, known)
    return re.sub(r"'([^']+)'", rf"'{near}\1'", hint) if hint.startswith(" Did") else hint


def nearest_keys(name: str, keys: Iterable[str]) -> list[str]:
    """Return the whole keys whose last names are nearest to a misspelt one; none where no name is close."""
    by_name: dict[str, list[str]] = {}
    for key in keys:
        by_name.setdefault(key.rpartition(".")[2], []).append(key)
    close = get_close_matches(name, by_name, n=2, cutoff=CLOSE)
    return [key for one in close for key in by_name[one]]


def without_other_kinds(annotation: Any, value: Any) -> Any:
    """Return `value` without the keys that are null and that only another kind of the section has.

    So an override takes a key out of a file: `engine.kind=embedded engine.launch=null`.
    """
    of = meant(annotation, value)
    if isinstance(value, list):
        return [without_other_kinds(child(of, index), inner) for index, inner in enumerate(value)]
    if not isinstance(value, Mapping):
        return value
    # Only null is taken out: any other value was meant, and it is refused with a sentence.
    others = {key for m in unwrap(annotation) if is_model(m) and is_model(of) for key in keys_of(m).keys() - keys_of(of)}
    kept = {key: inner for key, inner in value.items() if inner is not None or key not in others}
    return {key: without_other_kinds(child(of, key), inner) for key, inner in kept.items()}
