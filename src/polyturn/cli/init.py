"""`polyturn init`: create a project with tasks, a plug-in, a config and passing tests.

The files are in `templates/`: `common` for every project, and a folder per kind. By default nothing is downloaded: the model
is a small version of a published one, with random weights.
"""

from __future__ import annotations

import importlib.resources
import importlib.util
import json
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import jinja2
import typer
import yaml

from polyturn.cli.arguments import declare
from polyturn.cli.console import Output, program
from polyturn.core.errors import ConfigError, did_you_mean
from polyturn.infra.writable import check_writable

KINDS = {
    "tool": "a tool that the model calls",
    "interaction": "an interaction that answers the model",
    "env": "an environment that the model acts on",
    "agent": "an agent with its own loop, which calls the model through OpenAI's API",
}
"""Kind of project -> the plug-in that the user writes."""
TINY = "tiny"
SMALL_VERSION_OF = "Qwen/Qwen3-0.6B"


@declare("init")
def main(
    folder: Annotated[Path, typer.Argument(metavar="NAME", help="The new folder.")],
    kind: Annotated[str, typer.Option(help="Kind of plug-in: tool, interaction, env or agent.")] = "tool",
    model: Annotated[
        str,
        typer.Option(help="tiny (random weights), smollm2 (trained; learns on a laptop), or a model's folder or name."),
    ] = TINY,
) -> None:
    """Write a project that trains: task, plug-in, config, tests."""
    if kind not in KINDS:
        raise ConfigError(f"there is no kind of project {kind!r}.{did_you_mean(kind, KINDS)}")
    check_writable(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{str(folder)!r} already exists; choose a new folder, so that no file is overwritten")
    if model == TINY:
        from polyturn.testing import tiny

        tiny(SMALL_VERSION_OF, folder / "model")
    else:
        folder.mkdir(parents=True, exist_ok=True)
        if Path(model).is_dir():  # the config is in another folder
            model = str(Path(model).resolve())
    for name, text in files(folder.resolve().name, kind=kind, model=model):
        (folder / name).write_text(text, encoding="utf-8")
    out = Output()
    out.text(f"{folder}: {KINDS[kind]}\n")
    for path in sorted(folder.iterdir()):
        out.text(f"  {path.name}{'/' if path.is_dir() else ''}")
    python = [] if program() == ["polyturn"] else [sys.executable, "-m"]
    installing = [] if importlib.util.find_spec("pytest") else [[sys.executable, "-m", "pip", "install", "pytest"]]
    commands = (["cd", str(folder)], *installing, [*python, "pytest"], [*python, "polyturn", "train", "config.yaml"])
    out.text(f"\nNow: {' && '.join(map(shlex.join, commands))}")


def files(name: str, *, kind: str, model: str = TINY) -> Iterator[tuple[str, str]]:
    """Yield each file of a project with its text; a file without text does not apply to the model."""
    templates = importlib.resources.files("polyturn.cli") / "templates"
    loader = jinja2.FunctionLoader(lambda path: (templates / path).read_text(encoding="utf-8"))
    environment = jinja2.Environment(loader=loader, keep_trailing_newline=True, undefined=jinja2.StrictUndefined)
    values = {"name": name, "model": model, "is_tiny": model == TINY}
    environment.filters |= {"yaml": _as_yaml, "shell": shlex.quote}
    written: set[str] = set()
    for part in (kind, "common"):
        for template in sorted((templates / part).iterdir(), key=lambda entry: entry.name):
            file = template.name.removesuffix(".jinja").replace("gitignore", ".gitignore")
            if file not in written:
                written.add(file)
                text = environment.get_template(f"{part}/{template.name}").render(**values)
                if file != "README.md":  # a block that does not apply leaves a blank line
                    text = "".join(line for line in text.splitlines(keepends=True) if line.strip() or file.endswith(".py"))
                if text:
                    yield file, text


def _as_yaml(text: str) -> str:
    """Return a text as YAML, in quotes if YAML reads the text itself as something else, such as the number 2024."""
    try:
        is_itself = text[:1].isalpha() and yaml.safe_load(f"[{text}]") == [text]
    except yaml.YAMLError:
        is_itself = False
    return text if is_itself else json.dumps(text, ensure_ascii=False)
