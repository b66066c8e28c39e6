"""`polyturn data harbor`: what each Harbor task of a folder needs, and why a run could not do it."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from rich.table import Table

from polyturn.cli.console import Output
from polyturn.core.errors import DataError
from polyturn.environments.harbor_task import HarborTask, read_task, task_folders
from polyturn.sandbox import SandboxSpec


def run(folder: Path, *, backend: Literal["podman", "docker", "bubblewrap"], network: bool, host_programs: bool) -> bool:
    """Print a row for each task, then the reasons against them; return whether there are none.

    Raises:
        DataError: the folder holds no task.
    """
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
    return not reasons


def _needs(task: HarborTask) -> list[str]:
    """The needs of a task: its steps, image, limits and deadlines in seconds."""
    wanted, has_dockerfile = task.file.environment, (task.folder / "environment/Dockerfile").exists()
    memory = f"{wanted.memory_mb} MB" if wanted.memory_mb else wanted.memory or "-"
    agents, verifiers = [step.agent.timeout_sec for step in task.steps], [step.verifier.timeout_sec for step in task.steps]
    agent = "no limit" if None in agents else f"{sum(filter(None, agents)):g} s"
    image = wanted.docker_image or ("Dockerfile" if has_dockerfile else "-")
    cpus = "-" if wanted.cpus is None else f"{wanted.cpus:g}"
    return [str(len(task.steps)), image, cpus, memory, agent, f"{sum(verifiers):g} s"]
