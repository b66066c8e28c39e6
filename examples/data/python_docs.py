"""Python's documentation strings as passages: real text that every machine has, without a download.

    python python_docs.py docs.jsonl

    textwrap.shorten\\nshorten(text, width, **kwargs): Collapse and truncate the given text to fit in the given width. …

Each documented function, class and method of some modules of the standard library gives one passage. The text comes from the
running interpreter, so another Python version has other passages. Python 3.11.7 gives 2,375, and `cloze.py` makes 2,142
questions of them.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from polyturn.retrieval.passages import Passage

MODULES = (
    "argparse", "array", "ast", "asyncio", "base64", "bisect", "builtins", "calendar", "cmath", "codecs", "collections",
    "concurrent.futures", "configparser", "contextlib", "copy", "csv", "datetime", "decimal", "difflib", "email.message",
    "email.utils", "enum", "fileinput", "fnmatch", "fractions", "functools", "gettext", "glob", "gzip", "hashlib", "heapq",
    "hmac", "html", "http.client", "http.cookies", "imaplib", "inspect", "io", "ipaddress", "itertools", "json", "locale",
    "logging", "mailbox", "math", "mimetypes", "multiprocessing", "numbers", "operator", "os", "os.path", "pathlib",
    "pickle", "pkgutil", "platform", "plistlib", "pprint", "queue", "random", "re", "reprlib", "sched", "secrets", "select",
    "selectors", "shelve", "shlex", "shutil", "signal", "smtplib", "socket", "sqlite3", "ssl", "statistics", "string",
    "struct", "subprocess", "sys", "tarfile", "tempfile", "textwrap", "threading", "time", "timeit", "tokenize", "trace",
    "traceback", "types", "typing", "unittest.mock", "urllib.parse", "urllib.request", "uuid", "warnings", "weakref",
    "xml.dom.minidom", "xml.etree.ElementTree", "zipfile", "zlib",
)  # fmt: skip
MIN_WORDS, MAX_WORDS = 8, 120


def python_documentation() -> Iterator[Passage]:
    """Yield the passages in the order of `MODULES`; a text that several names share is yielded once."""
    seen: set[str] = set()
    for name in MODULES:
        try:
            module = importlib.import_module(name)
        except ImportError:  # this Python was built without the module
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # reading a deprecated name gives a warning
            texts = [(title, inspect.getdoc(thing) or "") for title, thing in _documented(module)]
        for title, whole in texts:
            text = " ".join(whole.split()[:MAX_WORDS])
            if len(text.split()) >= MIN_WORDS and text not in seen:
                seen.add(text)
                yield Passage(id=title, contents=f"{title}\n{text}")


def _documented(module: ModuleType) -> Iterator[tuple[str, Any]]:
    """Yield the definitions of a module and of its classes, with names as a user would write them."""
    for name, thing in sorted(vars(module).items()):
        if name.startswith("_") or not (inspect.isclass(thing) or inspect.isroutine(thing)):
            continue
        if (thing.__module__ or module.__name__).lstrip("_").partition(".")[0] != module.__name__.partition(".")[0]:
            continue
        title = name if module.__name__ == "builtins" else f"{module.__name__}.{name}"
        yield title, thing
        if inspect.isclass(thing):
            yield from (
                (f"{title}.{inner}", method)
                for inner, method in sorted(vars(thing).items())
                if not inner.startswith("_") and inspect.isroutine(method) and method.__doc__
            )


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the passages and print the written path."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="the .jsonl file to write")
    out = parser.parse_args(arguments).out
    lines = [json.dumps({"id": p.id, "contents": p.contents}, ensure_ascii=False) + "\n" for p in python_documentation()]
    out.write_text("".join(lines), encoding="utf-8")
    print(f"{out}: {len(lines)} passages")


if __name__ == "__main__":
    main()
