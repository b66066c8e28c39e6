"""Generates pages of the documentation as Markdown: configuration, Python API, metrics, errors.

    pages()  ->  {"reference/config.md": "# Configuration\n…", "reference/api.md": …}
    python scripts/docs/reference.py      writes the pages of docs/reference

The content comes from the library: pydantic fields, docstrings, the table of metrics. The Python API is not written to
docs/reference, because it repeats the docstrings of the source; hooks.py passes it to mkdocs, and a test reads all pages.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polyturn
import polyturn.testing
from polyturn.api import front
from polyturn.config.models import RunConfig
from polyturn.config.schema import schema_table
from polyturn.core import errors
from polyturn.core.arrays import Record
from polyturn.tools.failures import ToolFailure
from polyturn.tracking.metric_docs import MEANINGS

TOOL_ERRORS = {
    ToolFailure.UNKNOWN_TOOL: "The model called a tool that the task does not have.",
    ToolFailure.BAD_JSON: "The model's call cannot be parsed.",
    ToolFailure.SCHEMA: "The arguments do not fit the tool's schema.",
    ToolFailure.SKIPPED: "The turn had more calls than `rollout.tools.max_parallel_calls`.",
    ToolFailure.TOOL_ERROR: "The tool raised `polyturn.ToolError`; the model reads its message.",
    ToolFailure.EXCEPTION: "The tool raised another exception, or returned a value of the wrong type.",
    ToolFailure.TOO_LARGE: "The answer is too large: data over 8 MiB, or an image or video over 64 MiB.",
    ToolFailure.TIMEOUT: "The deadline passed, or the tool raised `ToolTimeoutError` or `TimeoutError`.",
    ToolFailure.CONNECTION: "The tool's service is gone: it raised `ToolConnectionError`, `ConnectionError` or `EOFError`.",
    ToolFailure.CIRCUIT_OPEN: "The tool failed so often in a row that it was not called.",
}

DOCS = Path(__file__).parents[2] / "docs"
API = "reference/api.md"


def pages() -> dict[str, str]:
    """Return path in docs/ -> text, for every generated page."""
    return {
        "reference/config.md": config_page(),
        API: api_page(),
        "reference/metrics.md": metrics_page(),
        "reference/errors.md": errors_page(),
    }


def config_page() -> str:
    """Return every key of a configuration with its type, default and meaning, a table for each section."""
    tables: dict[str, list[str]] = {}
    intro: dict[str, str] = {}
    for row in schema_table(RunConfig):
        key, kind, default, doc, of, _ = row
        if kind == "section":
            intro[key] = doc
            continue
        section = key.rpartition(".")[0]
        cells = (f"`{key}`", _code(kind), _code(default), f"*{of}:* {doc}" if of else doc)
        tables.setdefault(section, []).append("| " + " | ".join(_cell(c) for c in cells) + " |")
    lines = [
        "# Configuration",
        "",
        "Every key of a run's YAML file, generated from the models that read it. `polyturn config` prints the same in a "
        "terminal; an unknown key is an error that names the nearest known one. Any key can be overridden on the command "
        "line: `polyturn train config.yaml train.steps=200`.",
    ]
    for section, rows in tables.items():
        lines += ["", f"## `{section}`" if section else "## The run", ""]
        lines += [intro[section], ""] if intro.get(section) else []
        lines += ["| key | type | default | meaning |", "|---|---|---|---|", *rows]
    return "\n".join(lines) + "\n"


def metrics_page() -> str:
    """Return every metric with its meaning, with a table for each first part of the names."""
    lines = [
        "# Metrics",
        "",
        "A run writes these metrics to `metrics.jsonl` at every step, and sends them to the trackers. It fills in the parts "
        "in angle brackets. Means over trajectories, tokens or calls are over the whole step.",
    ]
    section = ""
    for name, text in MEANINGS.items():
        if name.partition("/")[0] != section:
            section = name.partition("/")[0]
            lines += ["", f"## {section}", "", "| metric | meaning |", "|---|---|"]
        lines.append(f"| `{name}` | {_cell(text)} |")
    return "\n".join(lines) + "\n"


def errors_page() -> str:
    """Return the tree of error classes, and the kinds of errors of tools."""
    lines = [
        "# Errors",
        "",
        "Every error that the library raises on purpose is a `PolyturnError`, and also the standard error that it refines. "
        "Its message says what is wrong, shows the value, and says what to do.",
        "",
        "| class | is also | meaning |",
        "|---|---|---|",
    ]
    for name, cls in vars(errors).items():
        if inspect.isclass(cls) and issubclass(cls, Exception) and cls.__module__ == errors.__name__:
            above = ", ".join(f"`{b.__name__}`" for b in cls.__bases__)
            lines.append(f"| `{name}` | {above} | {_cell(inspect.getdoc(cls) or '')} |")
    lines += [
        "",
        "## Errors of tools",
        "",
        "The model reads a failed call as `Error (kind): reason`, and `ToolResult.error` records the kind.",
        "",
        "| kind | when |",
        "|---|---|",
        *(f"| `{kind}` | {_cell(text)} |" for kind, text in TOOL_ERRORS.items()),
    ]
    return "\n".join(lines) + "\n"


def api_page() -> str:
    """Return the exports of `polyturn` and `polyturn.testing`, with signatures, fields and docstrings."""
    lines = ["# Python API", "", "The names of `import polyturn`. Everything else may change between versions."]
    for task, names in polyturn.BY_TASK.items():
        lines += ["", f"# {task}"]
        for name in names:
            lines += _described(name, front.rollout if name == "rollout" else getattr(polyturn, name), "polyturn")
    lines += ["", "# Testing", "", "The names of `polyturn.testing`, for tests of plug-ins."]
    for name in sorted(polyturn.testing.__all__):
        lines += _described(name, getattr(polyturn.testing, name), "polyturn.testing")
    return "\n".join(lines) + "\n"


def _described(name: str, what: Any, module: str) -> Iterator[str]:
    yield from ("", f"## {module}.{name}", "")
    if not (inspect.isclass(what) or inspect.isfunction(what)):
        return
    yield from ("```text", f"{name}{_signature(what)}", "```", "", *_prose(inspect.getdoc(what) or ""))
    if not inspect.isclass(what):
        return
    fields = dict(_fields(what))
    if fields:
        yield from ("", "| field | meaning |", "|---|---|")
        for field, (kind, text) in fields.items():
            yield f"| `{field}: {kind}` | {_cell(text)} |"
    for method, function in _own_and_private(what).items():
        if method.startswith("_") or not (inspect.isfunction(function) or isinstance(function, property | classmethod)):
            continue
        target = function.fget if isinstance(function, property) else inspect.unwrap(getattr(what, method))
        signature = "" if isinstance(function, property) else _signature(target)
        yield from (
            "",
            f"**{method}**`{signature}`" if signature else f"**{method}**",
            "",
            *_prose(inspect.getdoc(target) or ""),
        )


def _own_and_private(cls: type) -> dict[str, Any]:
    """Return the attributes of a class, and those of polyturn bases without an entry in the page."""
    ours = [c for c in cls.__mro__ if c.__module__.startswith("polyturn.") and c is not Record]
    defining = [c for c in ours if c is cls or c.__name__ not in dir(polyturn)]
    return {name: inspect.getattr_static(cls, name) for c in defining for name in vars(c)}


def _signature(what: Any) -> str:
    try:
        return re.sub(r"(: |-> )'([^']*)'", r"\1\2", str(inspect.signature(what)))
    except (TypeError, ValueError):
        return ""


def _fields(cls: type) -> Iterator[tuple[str, tuple[str, str]]]:
    """Yield the annotated names of a class body with the string beneath each."""
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    assert isinstance(body, ast.ClassDef)
    for node, below in zip(body.body, [*body.body[1:], None], strict=True):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and not node.target.id.startswith("_"):
            has_text = isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
            text = inspect.cleandoc(str(below.value.value)) if has_text else ""  # type: ignore[union-attr]
            yield node.target.id, (ast.unparse(node.annotation), text)


def _prose(doc: str) -> Iterator[str]:
    """Yield a docstring as Markdown; indented parts are kept as code."""
    for part in doc.split("\n\n"):
        if any(line.startswith(" ") for line in part.splitlines()):
            yield from ("```text", part, "```", "")
        else:
            yield from (part.replace("<", "&lt;"), "")


def _code(text: str) -> str:
    return f"`{text}`" if text else ""


def _cell(text: str) -> str:
    """Return `text` for a table, with bars outside backticks and tags escaped."""
    parts = " ".join(text.split()).split("`")
    return "`".join(part if i % 2 else part.replace("|", "\\|").replace("<", "&lt;") for i, part in enumerate(parts))


if __name__ == "__main__":
    for page, text in pages().items():
        if page != API:
            (DOCS / page).parent.mkdir(exist_ok=True)
            (DOCS / page).write_text(text.rstrip() + "\n", encoding="utf-8")
