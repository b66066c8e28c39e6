"""`polyturn run-as NAME -- COMMAND…`: run a command for another library, with polyturn in place of that library.

A folder with a package of that name is put at the front of PYTHONPATH, for the command and all processes that it starts. Its
`sitecustomize` provides the name even in a checkout of that library, which `python -m` would put first.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

from polyturn.cli.arguments import declare, refuse_unused
from polyturn.core.errors import ConfigError, did_you_mean, one_line
from polyturn.infra.plugins import install_namespace
from polyturn.infra.stand_in import StandIn, stand_ins

STANDS_IN = "POLYTURN_RUN_AS"
"""Comma-separated names of the replaced libraries, for their shims."""
DRY_RUN = "POLYTURN_DRY_RUN"
"""Set if the command's training programs must only check and report."""
OVERRIDES = "POLYTURN_OVERRIDES"
"""Further overrides for the command's training programs, as a JSON list."""

_PROGRAM = """#!/bin/sh
shims={shims}
case ":$PYTHONPATH:" in
*":$shims:"*) ;;
*) export PYTHONPATH="$shims${{PYTHONPATH:+:$PYTHONPATH}}" ;;
esac
exec {command} "$@"
"""


@declare("run-as", takes_unknown_options=True)
def main(
    context: typer.Context,
    name: Annotated[str, typer.Argument(metavar="NAME", help="The library that polyturn stands in for.")],
    words: Annotated[
        list[str] | None, typer.Argument(metavar="-- COMMAND...", help="The command, as for that library.")
    ] = None,
    with_runtime_env: Annotated[
        bool, typer.Option("--runtime-env", help="Only print the environment as a runtime environment of Ray.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Make the library's training programs only check and report.")
    ] = False,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Further override for the library's training programs."),
    ] = None,
) -> None:
    """Run another library's command with polyturn in its place."""
    if with_runtime_env:
        refuse_unused(context, {"name", "with_runtime_env"}, here="with --runtime-env")
        print(json.dumps(runtime_env(name, os.environ)))
    else:
        run(name, words or [], dry_run=dry_run, overrides=overrides or [])


def run(name: str, command: Sequence[str], *, dry_run: bool = False, overrides: Sequence[str] = ()) -> None:
    """Replace this process by `command`.

    Args:
        name: The library.
        command: The command.
        dry_run: Make its training programs only check and report.
        overrides: Further overrides for its training programs.

    Raises:
        ConfigError: there is no stand-in for `name`, or no such command.
    """
    environment = {**os.environ, **variables(name, os.environ)}
    if dry_run or overrides:
        if not find_stand_in(name).takes_overrides:
            readers = " or ".join(one.name for one in stand_ins() if one.takes_overrides)
            raise ConfigError(
                f"--dry-run and --set work with programs of {readers}, not of {name}; remove them, or run "
                f"`polyturn train --{name} FILE --dry-run` on a file of its arguments"
            )
        environment |= {OVERRIDES: json.dumps(list(overrides)), **({DRY_RUN: "1"} if dry_run else {})}
    # `python` is the interpreter of polyturn, even if its virtual environment is not activated
    folders = [_programs(name), str(Path(sys.executable).parent), environment.get("PATH", os.defpath)]
    environment["PATH"] = os.pathsep.join(folders)
    if not command:
        raise ConfigError(f"there is no command; write polyturn run-as {name} -- python -m …")
    program = shutil.which(command[0], path=environment["PATH"])
    if program is None:
        raise ConfigError(f"the command {command[0]!r} is not found; write polyturn run-as {name} -- python -m …")
    try:
        os.execve(program, [command[0], *command[1:]], environment)
    except OSError as problem:  # such as a script without a first line that names its program
        raise ConfigError(
            f"the command {command[0]!r} cannot be started ({one_line(problem)}); a script needs its program before it: "
            f"polyturn run-as {name} -- {shlex.join(['bash', *command])}"
        ) from problem


def variables(name: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that replace `name` by polyturn.

    Raises:
        ConfigError: there is no stand-in for `name`.
    """
    shims = find_stand_in(name).shims
    former = environment.get("PYTHONPATH")
    names = dict.fromkeys([name, *filter(None, environment.get(STANDS_IN, "").split(","))])
    return {"PYTHONPATH": os.pathsep.join([str(shims), *([former] if former else [])]), STANDS_IN: ",".join(names)}


def find_stand_in(name: str) -> StandIn:
    """Return the stand-in for a library and its programs.

    Raises:
        ConfigError: there is no stand-in.
    """
    known = {one.name: one for one in stand_ins() if one.shims is not None}
    if name not in known:
        raise ConfigError(f"there is no stand-in for {name!r}.{did_you_mean(name, known)}")
    return known[name]


def _programs(name: str) -> str:
    """Return a folder with the library's programs, if any, and a `python` that restores the stand-in after a script has
    overwritten PYTHONPATH.

    The folder stays, because the command replaces this process; so it is one for all commands, in the user's cache.
    """
    stand_in, python = find_stand_in(name), shlex.quote(sys.executable)
    own = {called: f"{python} -m {module}" for called, module in stand_in.programs.items()}
    commands, shims = {"python": python, "python3": python, **own}, shlex.quote(str(stand_in.shims))
    texts = {called: _PROGRAM.format(shims=shims, command=command) for called, command in commands.items()}
    digest = hashlib.sha256(json.dumps(texts).encode()).hexdigest()[:16]
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    try:
        return _written(Path(cache) / "polyturn" / "run-as" / f"{name}-{digest}", texts)
    except OSError:  # there is no home that can be written
        return _written(Path(tempfile.mkdtemp(prefix="polyturn-")), texts)


def _written(folder: Path, texts: Mapping[str, str]) -> str:
    """Write programs into a folder, unless they are there; return the folder."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for called, text in texts.items():
        program = folder / called
        if program.is_file() and program.read_text(encoding="utf-8") == text:
            continue
        draft = folder / f".{called}-{os.getpid()}"
        draft.write_text(text, encoding="utf-8")
        draft.chmod(0o700)
        draft.replace(program)  # at once, because another command may find it meanwhile
    return str(folder)


def find_like(name: str) -> None:
    """Set up imports as in a process started by `run`: the stand-in for `name` first, the working directory last."""
    install_namespace(name)
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.append(here)


def runtime_env(name: str, environment: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """Return the environment as a runtime environment of Ray: `ray.init(runtime_env=…)`, `ray job submit
    --runtime-env-json`."""
    return {"env_vars": variables(name, environment)}
