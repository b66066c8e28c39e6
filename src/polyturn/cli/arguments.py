"""`declare`, which makes a command from a function, and the arguments that several commands share.

@declare("show")
def main(folder: Path, limit: Annotated[int, typer.Option("-n", min=1, help="How many …")] = 20) -> None: …
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from polyturn.core.code_origin import passed_an_author
from polyturn.core.errors import ConfigError, PolyturnError, one_line, raised_at
from polyturn.infra.writable import check_file_writable, check_writable

EMBED_TOKEN_VARIABLE = "POLYTURN_EMBED_TOKEN"


class Command(TyperCommand):
    """A command that raises if an option is given twice."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments.

        Raises:
            ConfigError: an option with a single value is given twice, or a key is written as an option.
        """
        self._refuse_keys_as_options(args)
        args = self._with_home(args)
        _, _, rest = self.make_parser(ctx).parse_args(args=list(args))
        for option, times in Counter(each for each in rest if each.param_type_name == "option").items():
            if times > 1 and not (option.multiple or option.is_eager):  # type: ignore[attr-defined]
                raise ConfigError(f"{max(option.opts, key=len)} is given {times} times; keep one of them")
        try:
            return super().parse_args(ctx, args)
        except typer.BadParameter as problem:
            from pydantic import ValidationError

            from polyturn.infra.expected import expected

            if isinstance(problem.__cause__, ValidationError):  # raised by typer's conversion of values
                problem.message = expected(problem.__cause__.errors()[0])
            raise

    def _with_home(self, args: Sequence[str]) -> list[str]:
        """Expand the ~ of `--out=~/runs`, which a shell leaves as it is."""
        paths = tuple(f"{option}=~/" for option in self._options)
        return [arg.replace("~", os.path.expanduser("~"), 1) if arg.startswith(paths) else arg for arg in args]

    @property
    def _options(self) -> set[str]:
        return {option for param in self.params for option in (*param.opts, *param.secondary_opts)}

    def _refuse_keys_as_options(self, args: Sequence[str]) -> None:
        """Raise for `--steps 5` in a command with overrides, and suggest `train.steps=5`."""
        if not any(param.name == "overrides" and param.param_type_name == "argument" for param in self.params):
            return
        known = self._options
        for position, arg in enumerate(takewhile(lambda arg: arg != "--", args)):
            option, equals, value = arg.partition("=")
            if not option.startswith("--") or option in known:
                continue
            following = args[position + 1] if position + 1 < len(args) and not args[position + 1].startswith("-") else "…"
            if key := _key_of(option.removeprefix("--"), value if equals else following):
                raise ConfigError(f"there is no option {option}; write configuration keys without dashes: {key}")

    def invoke(self, ctx: Any) -> Any:
        """Run the command; if it is interrupted, say so, because typer would end it silently.

        Raises:
            PolyturnError: the code of a plug-in raised SystemExit.
        """
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            print("polyturn: interrupted", file=sys.stderr)
            raise
        except SystemExit as problem:
            if not passed_an_author(problem):
                raise
            raise PolyturnError(
                f"code of a plug-in raised {one_line(problem)}{raised_at(problem)}, which does not end the process"
            ) from problem


def declare(
    name: str, *, cls: type[Command] = Command, takes_unknown_options: bool = False
) -> Callable[[Callable[..., None]], TyperCommand]:
    """Return a decorator that makes a command from a function, with its parameters as arguments and its docstring as
    help."""

    def decorate(function: Callable[..., None]) -> TyperCommand:
        app = typer.Typer(add_completion=False, rich_markup_mode=None)
        app.command(name, cls=cls, context_settings={"ignore_unknown_options": takes_unknown_options})(function)
        command = typer.main.get_command(app)
        assert isinstance(command, TyperCommand)
        return command

    return decorate


def _key_of(option: str, value: str) -> str:
    """Return the override for an option's name; "" if the name is not a key."""
    from polyturn.api.keywords import path_of
    from polyturn.config.well_known import suggestion

    name = option.replace("-", "_")
    if theirs := suggestion(name, value):
        return theirs
    try:
        key = ".".join(path_of(name))
    except ConfigError:
        return ""
    return f"{key}={value}"


def new_folder(folder: Path | None) -> Path | None:
    """Return the output folder of a command, if given, after checking that it can be made and written.

    Raises:
        ConfigError: the folder cannot be made or written.
    """
    if folder is not None:
        check_writable(folder)
    return folder


def new_file(file: Path | None) -> Path | None:
    """Return the output file of a command, if given, after checking that it can be written.

    Raises:
        ConfigError: the file cannot be written.
    """
    if file is not None:
        check_file_writable(file)
    return file


def is_given(context: typer.Context, name: str) -> bool:
    """Return whether a parameter is on the command line."""
    return getattr(context.get_parameter_source(name), "name", "") == "COMMANDLINE"


def refuse_unused(context: typer.Context, used: Collection[str], *, here: str) -> None:
    """Raise for given options that have no effect in combination with others.

    Args:
        context: The command's context.
        used: Names of the parameters that have an effect.
        here: Description of the combination, for the message.

    Raises:
        ConfigError: for the first option without effect.
    """
    for parameter in context.command.params:
        name = str(parameter.name)
        if is_given(context, name) and name not in used and context.params[name]:
            written = (
                " ".join(context.params[name]) if parameter.param_type_name == "argument" else max(parameter.opts, key=len)
            )
            raise ConfigError(f"{written} has no effect {here}; remove it")


def embedder_config(embed: str | None, model: str | None) -> Any:
    """Return `--embed` and `--embed-model` as the config of an embedder; the token comes from the environment.

    Raises:
        ConfigError: there is a URL without a model, or a model without a URL.
    """
    is_url = embed is not None and embed.startswith(("http://", "https://"))
    if is_url != (model is not None):
        raise ConfigError("--embed URL and --embed-model NAME go together; --embed file.py:function needs no model")
    return {"url": embed, "model": model, "token": os.environ.get(EMBED_TOKEN_VARIABLE)} if is_url else embed


ConfigArgument = Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML file of the run.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[KEY=VALUE|FILE]...", help="Keys to override, train.steps=10, or YAML files to merge over the config."
    ),
]
JsonFlag = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of the table.")]
RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run, for instance runs/quickstart.")]
HostOption = Annotated[str, typer.Option(help="Address to listen on; access from other machines requires a token.")]
PortOption = Annotated[
    int | None,
    typer.Option(min=0, max=65535, help="Port; by default the first free port from the usual port on."),
]
PageTokenFile = Annotated[
    Path | None, typer.Option(help="File with the token; by default a token is made if one is needed.")
]
RateLimitOption = Annotated[
    str | None, typer.Option(help="Rate limit per client: 20/s, 600/min, 600/min:50 (with bursts of 50).")
]
AllowHosts = Annotated[
    list[str] | None,
    typer.Option(help="Further host name of the server, for instance of a proxy; may be repeated."),
]
EmbedOption = Annotated[
    str | None,
    typer.Option(help="Embedder of texts: the URL of an OpenAI-compatible endpoint, or file.py:function."),
]
EmbedModelOption = Annotated[str | None, typer.Option(help="With --embed URL: the name of the model.")]
CheckpointOption = Annotated[
    Path | None,
    typer.Option(
        "--checkpoint", help="Weights in place of the config's: folder of a Hugging Face model, a checkpoint or a run."
    ),
]
