"""`polyturn data`: prepare datasets as tasks and the index of search tasks, and check Harbor tasks.

    polyturn data gsm8k | geo3k | search | index | harbor

All except `harbor` write files and print their paths.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from polyturn.cli.arguments import Command, EmbedModelOption, EmbedOption, embedder_config, new_folder
from polyturn.core.errors import ConfigError

if TYPE_CHECKING:
    from polyturn.environments.harbor_task import HarborTask

TasksFolder = Annotated[
    Path, typer.Option("-o", "--out", callback=new_folder, help="Folder for train.parquet and test.parquet.")
]
app = typer.Typer(name="data", no_args_is_help=True, rich_markup_mode=None, add_completion=False)


@app.callback()
def data() -> None:
    """Prepare datasets and indexes."""


@contextmanager
def _all_or_nothing(out: Path) -> Iterator[None]:
    """If the command fails, remove the new files in `out` and the folders made for them."""
    before = set(out.rglob("*")) if out.is_dir() else set()
    missing = [folder for folder in (out, *out.parents) if not folder.exists()]
    try:
        yield
    except BaseException:
        new_files = sorted(set(out.rglob("*")) - before if out.is_dir() else (), reverse=True)  # contents before folders
        for path in [*new_files, *missing]:
            with suppress(OSError):  # a folder with other contents stays
                path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)
        raise


def _print(paths: Iterable[Path]) -> None:
    for path in paths:
        print(path)


@app.command(cls=Command)
def gsm8k(
    out: TasksFolder,
    source: Annotated[
        Path | None,
        typer.Option("--from", help="Folder with train.jsonl and test.jsonl; without it, the hub's openai/gsm8k."),
    ] = None,
    variant: Annotated[
        Literal["tool", "interaction"], typer.Option(help="Columns and system prompt: for a tool or an interaction.")
    ] = "interaction",
    system: Annotated[str | None, typer.Option(help="System prompt in place of the variant's.")] = None,
    instruction: Annotated[
        str | None, typer.Option(help="Instruction after every question, in place of the built-in sentence.")
    ] = None,
) -> None:
    """Write GSM8K as multi-turn tasks."""
    from polyturn.api.console import quiet_transformers
    from polyturn.data.prepare import prepare_gsm8k

    quiet_transformers()
    with _all_or_nothing(out):
        written = prepare_gsm8k(source, variant=variant, out=out, system=system, instruction=instruction)
    _print(written)


@app.command(cls=Command)
def geo3k(
    out: TasksFolder,
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


@app.command(cls=Command)
def search(
    out: TasksFolder,
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


@app.command(cls=Command)
def index(
    passages: Annotated[
        list[Path],
        typer.Argument(metavar="PASSAGES...", help=".jsonl files with id and contents, text files, folders of texts."),
    ],
    out: Annotated[Path, typer.Option("-o", "--out", callback=new_folder, help="The new folder of the index.")],
    vectors: Annotated[
        Path | None,
        typer.Option(help="A .npy matrix with a row per passage, in order; otherwise --embed computes the vectors."),
    ] = None,
    embed: EmbedOption = None,
    embed_model: EmbedModelOption = None,
) -> None:
    """Index passages for search: the tool, or `serve --search`."""
    from polyturn.retrieval.dense import read_matrix
    from polyturn.retrieval.embedders import embed_all, read_embedder
    from polyturn.retrieval.index import build_index
    from polyturn.retrieval.passages import read_passages

    with _all_or_nothing(out):
        texts = (passage for source in passages for passage in read_passages(source))
        embedder = read_embedder(embedder_config(embed, embed_model))
        name = None if embedder is None else embedder.name
        if vectors is not None:
            count = build_index(texts, out, vectors=read_matrix(vectors), embedder=name)
        elif embedder is None or not (listed := list(texts)):
            count = build_index(texts, out)
        else:
            matrix = embed_all([passage.contents for passage in listed], embedder)
            count = build_index(listed, out, vectors=matrix, embedder=name)
    print(f"{out}: {count} passages")


@app.command(cls=Command)
def harbor(
    folder: Annotated[Path, typer.Argument(help="A Harbor task, or a folder of them.")],
    backend: Annotated[
        Literal["podman", "docker", "bubblewrap", "apptainer", "e2b"], typer.Option(help="Kind of the run's sandboxes.")
    ] = "podman",
    network: Annotated[bool, typer.Option("--network", help="Let the sandboxes reach the network.")] = False,
    host_programs: Annotated[
        bool, typer.Option("--host-programs", help="With bubblewrap: this machine's programs in place of images.")
    ] = False,
) -> None:
    """Check Harbor's task folders: what each task needs, and why a run could not use it. Nothing is started."""
    from rich.table import Table

    from polyturn.cli.console import Output
    from polyturn.core.errors import DataError
    from polyturn.environments.harbor_task import read_task, task_folders
    from polyturn.sandbox import SandboxSpec

    if host_programs and backend != "bubblewrap":
        raise ConfigError(f"--host-programs has no effect with --backend {backend}; remove it, or use --backend bubblewrap")
    spec = SandboxSpec(backend=backend, network=network)
    table = Table("task", "steps", "image", "cpus", "memory", "agent", "verifier", "", box=None, pad_edge=False)
    reasons: list[str] = []
    notes: list[str] = []
    for one in task_folders(folder):
        try:
            task = read_task(one)
        except DataError as problem:
            table.add_row(one.name, *["-"] * 6, "unreadable")
            reasons.append(str(problem))
            continue
        refused = list(task.refusals(spec, host_programs=host_programs))
        reasons += [f"{task.name}: {reason}" for reason in refused]
        notes += [f"{task.name}: {note}" for note in task.notes(spec)]
        table.add_row(task.name, *_needs(task), "refused" if refused else "ok")
    output = Output()
    output.table(table)
    for line in [*reasons, *notes]:
        output.text(line)
    if reasons:
        raise typer.Exit(1)


def _needs(task: HarborTask) -> list[str]:
    """Describe the needs of a task: steps, image, limits, and deadlines in seconds."""
    wanted, has_dockerfile = task.file.environment, (task.folder / "environment/Dockerfile").exists()
    memory = f"{wanted.memory_mb} MB" if wanted.memory_mb else wanted.memory or "-"
    agents, verifiers = [step.agent.timeout_sec for step in task.steps], [step.verifier.timeout_sec for step in task.steps]
    agent = "no limit" if None in agents else f"{sum(filter(None, agents)):g} s"
    image = wanted.docker_image or ("Dockerfile" if has_dockerfile else "-")
    cpus = "-" if wanted.cpus is None else f"{wanted.cpus:g}"
    return [str(len(task.steps)), image, cpus, memory, agent, f"{sum(verifiers):g} s"]


main = typer.main.get_command(app)
