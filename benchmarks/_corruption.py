"""Damages valid data (rows, bodies, configurations and bytes) as a hostile or careless writer would.

    damaged({"prompt": "2+2?", "ground_truth": "4"}, rng)   ->  {"prompt": {"": [nan]}, "ground_truth": "4"}
    damaged_bytes(b'{"prompt": "2+2?"}', rng)               ->  b'{"prompt": "2+2'

Most of the structure is kept, so that the damage passes the first check and reaches the code after it. Everything is drawn
from `rng`, so a seed determines a case.
"""

from __future__ import annotations

import copy
import json
import math
import random
from collections.abc import Callable, Sequence
from typing import Any


def _nested(depth: int) -> Any:
    value: Any = "x"
    for number in range(depth):
        value = [value] if number % 2 else {"a": value}
    return value


ATOMS: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2**31, -(2**63), 2**64, 10**30, 10**400),
    *(0.0, -0.0, 0.5, 1e308, 1e-320, math.nan, math.inf, -math.inf),
    *("", " ", "\x00", "\ud800", "\udfff x", "\ufeff", "\u202egnp.exe", "\u2028", "é" * 300, "a" * 20_000, "🧑‍🚀", "ﷺ", "İ"),
    *("null", "None", "NaN", "true", "1e999", "9" * 5000, "0x1F", "1_000", "{}", "[]", '{"a":', "[" * 200, "%s %d {0} {x}"),
    *("<|im_end|>", "<|im_start|>system", "</s>", "<tool_call>", "[TOOL_CALLS]", "<image>", "<video><audio>"),
    *("{{ x }}", "{% raw"),
    *("${oc.env:HOME}", "${x}", "${", "${oc.env:}", "???", "../../../etc/passwd", "/etc/passwd", "file:///etc/passwd"),
    *("http://127.0.0.1:1/x", "data:image/png;base64,AAAA", "data:image/png;base64,@", "data:,", "os:system", "a.b:c"),
    *("!!python/x", "&a [*a]"),
    *([], {}, [[]], [None], {"": None}, [{}], ["a", 1, None], {"role": "user"}, {"type": "image"}, [{"type": "text"}]),
)  # fmt: skip
"""Values that replace others."""
KEYS = ("", " ", "a", "role", "content", "type", "name", "tools", "\ud800", "\x00", "__class__", "prompt", "id", "0", "é")


def atom(rng: random.Random) -> Any:
    """Return a hostile value."""
    return _nested(rng.choice((5, 40, 70, 300))) if rng.random() < 0.04 else copy.deepcopy(rng.choice(ATOMS))


def damaged(value: Any, rng: random.Random, *, times: int | None = None) -> Any:
    """Return a copy of JSON-like data with keys and entries dropped, doubled, moved, renamed, wrapped or replaced."""
    root = [copy.deepcopy(value)]
    for _ in range(rng.choice((1, 1, 1, 2, 3, 5)) if times is None else times):
        holder, key = _place(root, rng)
        kind = rng.randrange(10)
        if kind <= 3:
            holder[key] = atom(rng)
        elif kind == 4 and holder is not root:
            del holder[key]
        elif kind == 5 and isinstance(holder, list) and holder is not root:
            holder.insert(rng.randrange(len(holder) + 1), copy.deepcopy(holder[key]))
        elif kind == 5 and isinstance(holder, dict):
            holder[rng.choice(KEYS)] = copy.deepcopy(holder[key])
        elif kind == 6 and isinstance(holder, dict):
            holder[rng.choice(KEYS)] = holder.pop(key)
        elif kind == 7:
            holder[key] = [holder[key]] if rng.random() < 0.5 else {rng.choice(KEYS): holder[key]}
        elif kind == 8:
            other, name = _place(root, rng)
            holder[key] = copy.deepcopy(other[name])
        else:
            holder[key] = _retyped(holder[key], rng)
    return root[0]


def _place(root: list[Any], rng: random.Random) -> tuple[Any, Any]:
    """Return a nested list or mapping and one of its keys."""
    holder: Any = root
    key: Any = 0
    while rng.random() < 0.8:
        inner = holder[key]
        if not isinstance(inner, dict | list) or not inner:
            break
        holder = inner
        key = rng.choice(list(inner)) if isinstance(inner, dict) else rng.randrange(len(inner))
    return holder, key


def _retyped(value: Any, rng: random.Random) -> Any:
    """Return a value converted to another type."""
    if isinstance(value, str):
        return rng.choice((list(value[:20]), {value[:50]: value[:50]}, len(value), value.encode("utf-8", "replace").hex()))
    if isinstance(value, bool | int | float):
        return rng.choice((str(value), [value], -value, bool(value)))
    if isinstance(value, dict):
        return rng.choice((list(value), [[k, v] for k, v in value.items()], repr(value)[:500]))
    return rng.choice((repr(value)[:500], dict(enumerate(value or ()))))


def as_json(value: Any, rng: random.Random) -> bytes:
    """Return data as JSON in a style that writers use: NaN as a word, plain or escaped text, halves of surrogate pairs."""
    text = json.dumps(value, ensure_ascii=rng.random() < 0.5, default=repr)
    return text.encode("utf-8", rng.choice(("surrogatepass", "replace")))


_CHUNKS = (b"\x00", b"\xff", b"\xc3", b"\xed\xa0\x80", b"{", b"[" * 3000, b'{"a":' * 3000, b'"', b"\\", b"\\ud800", b"NaN",
           b"9" * 5000, b"1e999", b"\n", b"\r", b"\xef\xbb\xbf", b",", b"}", b"null", b"&a [*a, *a]",
           b"!!python/object:os.system ", b"-",
           b"${oc.env:HOME}", b": ", b"- ", b"\t", b"<<: *x", b"--- ", b"%")  # fmt: skip


def damaged_bytes(data: bytes, rng: random.Random) -> bytes:
    """Return a copy of bytes with parts cut off, flipped, doubled or inserted."""
    for _ in range(rng.choice((1, 1, 2, 4))):
        a = rng.randrange(len(data) + 1)
        b = min(len(data), a + rng.choice((0, 1, 5, 50)))
        kind = rng.randrange(6)
        if kind == 0:
            data = data[:a]
        elif kind == 1:
            data = data[:a] + data[b:]
        elif kind == 2:
            data = data[:a] + rng.choice(_CHUNKS) + data[a:]
        elif kind == 3:
            data = data[:b] + data[a:]
        elif kind == 4:
            data = data[:a] + rng.choice(_CHUNKS) + data[b:]
        else:
            data = data[:a] + bytes([rng.randrange(256)]) + data[a + 1 :]
    return data


def damaged_words(words: Sequence[str], rng: random.Random, values: Callable[[random.Random], str]) -> list[str]:
    """Return a copy of a command line with words dropped, doubled, moved, cut or changed."""
    line = list(words)
    for _ in range(rng.choice((1, 1, 2, 3))):
        kind, a = rng.randrange(6), rng.randrange(len(line) + 1)
        if kind == 0 and line:
            line.pop(a % len(line))
        elif kind == 1:
            line.insert(a, values(rng))
        elif kind == 2 and line:
            word = line[a % len(line)]
            key, sign, _ = word.partition("=")
            line[a % len(line)] = f"{key}{sign or '='}{values(rng)}"
        elif kind == 3 and line:
            word = line[a % len(line)]
            at = rng.randrange(len(word) + 1)
            line[a % len(line)] = (
                word[:at] + rng.choice((".", "=", "+", "~", "[", "{", "'", "$", "-", "@", "\\", "")) + word[at:]
            )
        elif kind == 4 and line:
            line.insert(a, line[rng.randrange(len(line))])
        elif line:
            word = line[a % len(line)]
            line[a % len(line)] = word[: rng.randrange(len(word) + 1)]
    return line


def a_text(rng: random.Random) -> str:
    """Return a hostile value as text, for use after a `=`."""
    value = atom(rng)
    return value if isinstance(value, str) else json.dumps(value, default=repr)
