"""`polyturn data`: prepare datasets as tasks and the index of search tasks, and check Harbor tasks.

    polyturn data gsm8k | geo3k | search | index | harbor

Each but `harbor` writes files and prints where they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Literal

import typer

from polyturn.cli.arguments import Command, EmbedModelOption, EmbedOption, new_folder
from polyturn.core.errors import ConfigError

data_app = typer.Typer(help="Prepare datasets and indexes.", no_args_is_help=True)


@contextmanager
def _all_or_nothing(out: Path) -> Iterator[None]:
    """Remove what a command that fails has made: files in `out` that were not there, and folders that it made for them."""
    before = set(out.rglob("*")) if out.is_dir() else set()
    missing = [folder for folder in (out, *out.parents) if not folder.exists()]
    try:
        yield
    except BaseException:
        new_files = sorted(set(out.rglob("*")) - before if out.is_dir() else (), reverse=True)  # what is inside comes first
        for path in [*new_files, *missing]:
            with suppress(OSError):  # a folder that something else was put into stays
                path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)
        raise


def _print(paths: Iterable[Path]) -> None:
    for path in paths:
        print(path)


@data_app.command(cls=Command)
def gsm8k(
    out: Annotated[
        Path, typer.Option("-o", "--out", callback=new_folder, help="Folder for train.parquet and test.parquet.")
    ],
    source: Annotated[
        Path | None,
        typer.Option("--from", help="Folder with train.jsonl and test.jsonl; without it, the hub's openai/gsm8k."),
    ] = None,
    variant: Annotated[
        Literal["tool", "interaction"], typer.Option(help="Which columns and system prompt.")
    ] = "interaction",
    system: Annotated[str | None, typer.Option(help="The system prompt, in place of the variant's.")] = None,
    instruction: Annotated[
        str | None, typer.Option(help="What is asked behind every question, in place of the built-in sentence.")
    ] = None,
) -> None:
    """Write GSM8K as multi-turn tasks."""
    from polyturn.api.console import quiet_transformers
    from polyturn.data.prepare import prepare_gsm8k

    quiet_transformers()
    with _all_or_nothing(out):
        written = prepare_gsm8k(source, variant=variant, out=out, system=system, instruction=instruction)
    _print(written)


@data_app.command(cls=Command)
def geo3k(
    out: Annotated[
        Path, typer.Option("-o", "--out", callback=new_folder, help="Folder for train.parquet and test.parquet.")
    ],
    source: Annotated[
        Path | None,
        typer.Option("--from", help="Folder with the dataset's parquet files; without it, the hub's hiyouga/geometry3k."),
    ] = None,
) -> None:
    """Write Geometry3K as tasks with figures to zoom into."""
    from polyturn.data.prepare import prepare_geo3k

    with _all_or_nothing(out):
        written = prepare_geo3k(source, out=out)
    _print(written)


@data_app.command(cls=Command)
def search(
    out: Annotated[
        Path, typer.Option("-o", "--out", callback=new_folder, help="Folder for train.parquet and test.parquet.")
    ],
    source: Annotated[
        Path | None,
        typer.Option(
            "--from", help="Folder with train*.parquet and test*.parquet; without it, the hub's nq_hotpotqa_train."
        ),
    ] = None,
    texts: Annotated[list[Path] | None, typer.Option(hidden=True)] = None,
    python_docs: Annotated[bool, typer.Option("--python-docs", hidden=True)] = False,
    questions: Annotated[int | None, typer.Option(hidden=True)] = None,
) -> None:
    """Write questions as tasks that are answered by searching."""
    from polyturn.data.prepare import prepare_search

    if texts or python_docs or questions is not None:
        raise ConfigError(
            "--texts, --python-docs and --questions are no longer options of `data search`: examples/data/cloze.py in the "
            "repository makes questions over texts, and python_docs.py beside it writes Python's documentation as texts"
        )
    with _all_or_nothing(out):
        written = prepare_search(source, out=out)
    _print(written)


@data_app.command(cls=Command)
def index(
    passages: Annotated[
        list[Path],
        typer.Argument(metavar="PASSAGES...", help=".jsonl files with id and contents, text files, folders of texts."),
    ],
    out: Annotated[Path, typer.Option("-o", "--out", callback=new_folder, help="The new folder of the index.")],
    vectors: Annotated[
        Path | None, typer.Option(help="A .npy matrix with a row for each passage, in order; else --embed makes them.")
    ] = None,
    embed: EmbedOption = None,
    embed_model: EmbedModelOption = None,
) -> None:
    """Index passages for search: the tool, or `serve --search`."""
    from polyturn.cli import index as command

    with _all_or_nothing(out):
        count = command.run(passages, out=out, vectors=vectors, embed=embed, model=embed_model)
    print(f"{out}: {count} passages")


@data_app.command(cls=Command)
def harbor(
    folder: Annotated[Path, typer.Argument(help="A Harbor task, or a folder of them.")],
    backend: Annotated[
        Literal["podman", "docker", "bubblewrap"], typer.Option(help="The sandboxes that a run would use.")
    ] = "podman",
    network: Annotated[bool, typer.Option("--network", help="Let the sandboxes reach the network.")] = False,
    host_programs: Annotated[
        bool, typer.Option("--host-programs", help="With bubblewrap: this machine's programs in place of images.")
    ] = False,
) -> None:
    """Check Harbor's task folders: what each needs, and why a run could not do it. Nothing is started."""
    from polyturn.cli import harbor as command

    if not command.run(folder, backend=backend, network=network, host_programs=host_programs):
        raise typer.Exit(1)
