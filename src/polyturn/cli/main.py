"""`polyturn`: the list of commands, and the process around them. What a command takes is declared in `commands/`.

    main(["train", "config.yaml"])  ->  commands/learning.py: train  ->  cli/train.py: run, imported only now

An error of the library, a full disk or a closed output is one sentence on stderr and exit code 2; anything else is a bug
and shows its traceback.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, NoReturn

import typer

import polyturn
from polyturn.cli.arguments import Command
from polyturn.cli.commands import around, config, data, learning, recorded, serving
from polyturn.cli.end_process import end_process
from polyturn.cli.retired import RETIRED, retired
from polyturn.core.errors import PolyturnError
from polyturn.core.printable import printable
from polyturn.core.secrets import hide, secret_variables

_ANY_ARGUMENTS = {"ignore_unknown_options": True, "allow_extra_args": True}
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)

app = typer.Typer(
    name="polyturn",
    help="Multi-turn reinforcement learning for language-model agents.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
command = partial(app.command, cls=Command)
app.add_typer(data.data_app, name="data")
app.add_typer(config.config_app, name="config")
command(cls=learning.TrainCommand)(learning.train)
command()(learning.plan)
command()(learning.sft)
command("eval")(learning.evaluate)
command()(recorded.compare)
command()(learning.rollout)
command()(serving.serve)
command()(recorded.show)
command()(recorded.rescore)
command()(recorded.view)
command()(recorded.report)
command()(around.check)
command()(around.init)
command()(around.doctor)
command()(around.model)
command()(around.export)
command("run-as", context_settings={"ignore_unknown_options": True})(around.run_as)
for _name in RETIRED:
    command(_name, hidden=True, add_help_option=False, context_settings=_ANY_ARGUMENTS)(retired(_name))


def _version(is_asked: bool) -> None:
    if is_asked:
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
    """Run the command line, and end the process; with `arguments` of its own it is called from one that goes on."""
    if arguments is None:
        end_process(_run)
    _run(arguments)


def _run(arguments: Sequence[str] | None = None) -> None:
    prepare_process()
    guarded(lambda: app(args=None if arguments is None else list(arguments)))


def prepare_process() -> None:
    """Set what a process of the command line needs before anything heavy is imported."""
    from polyturn.api.console import log_to_console
    from polyturn.cli.log_level import log_level

    # How long an idle thread of the math library spins before it sleeps; read when torch is loaded. The default is so long
    # that two runs on one machine bring each other to a halt (benchmarks/README.md, "Two threads").
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    log_to_console(log_level(os.environ))


def guarded(run: Callable[[], object]) -> None:
    """Call `run`; an error of the library, a full disk or a closed output becomes one sentence on stderr and exit code 2."""
    try:
        run()
    except PolyturnError as problem:
        _refuse(str(problem))
    except OSError as problem:
        if problem.errno not in _FULL:
            raise
        _refuse(f"the disk takes no more ({problem}); make room there")
    except ValueError:
        if not sys.stdout.closed:
            raise
        _refuse("code that the command called closed the standard output, so that nothing more can be printed there")
    except KeyboardInterrupt:
        print("polyturn: interrupted", file=sys.stderr)
        sys.exit(130)


def _refuse(message: str) -> NoReturn:
    print(f"polyturn: {printable(hide(message, *secret_variables(os.environ)))}", file=sys.stderr)
    sys.exit(2)
