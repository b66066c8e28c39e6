"""`polyturn doctor`: which features are installed, and which dependencies the others need.

The command reads only package metadata, so it works with a broken installation. torch is imported in a separate process,
because a broken torch can crash the process.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Annotated, NamedTuple

import typer
from rich.table import Table

from polyturn.cli.arguments import JsonFlag, declare
from polyturn.cli.console import Output
from polyturn.infra.machine_memory import machine_memory
from polyturn.infra.plugins import NAMESPACES, offered

FEATURES = {
    "train": "training, the embedded engine",
    "lora": "LoRA adapters",
    "engines": "vLLM and SGLang servers",
    "serve": "serving rollouts and models over HTTP",
    "view": "the viewer, SQL conditions on recorded trajectories",
    "gpu": "curves of the load of GPUs",
    "ray": "a cluster with Ray",
    "megatron": "the Megatron backend: pipeline and expert parallelism",
    "mcp": "tools of MCP servers",
    "a2a": "agents that speak A2A",
    "search": "building indexes of passages",
    "environments": "environments of other packages",
    "hub": "data sets of the Hugging Face hub",
    "math": "the reward of competition mathematics",
    "vision": "images",
    "tensorboard": "curves and samples in TensorBoard",
    "wandb": "curves and samples in Weights & Biases",
    "mlflow": "curves and samples in MLflow",
    "trackio": "curves and samples in trackio",
    "otel": "spans of episodes, turns and tool calls",
}
"""Extra -> purpose; other extras are shown without a purpose."""
_DEVELOPMENT = ("dev", "browser", "docs")
PROGRAMS = {"bwrap": "the sandbox for model-written code", "nvidia-smi": "GPUs", "git": "the version in a run's records"}
SERVERS = {"vllm": "launching vLLM servers", "sglang": "launching SGLang servers"}
"""Package -> purpose. They are often in a separate environment."""
_PROBE = """
import json, torch
gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
print(json.dumps({"torch": torch.__version__, "threads": torch.get_num_threads(), "gpus": gpus, "cuda": torch.version.cuda}))
"""


class Extra(NamedTuple):
    """An extra of the package, with its installed and missing dependencies."""

    name: str
    installed: list[str]
    missing: list[str]


@declare("doctor")
def main(
    project: Annotated[
        Path | None, typer.Argument(metavar="[PROJECT]", help="A project's folder or config to check instead.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Show the environment, or a PROJECT, and what is missing in it."""
    if project is not None:
        _explain(project, as_json=as_json)
        return
    facts = environment()
    checks = list(extras())
    programs = {name: shutil.which(name) for name in PROGRAMS}
    servers = {name: _version(name) for name in SERVERS}
    if as_json:
        listed = {e.name: e._asdict() for e in checks}
        print(json.dumps({**facts, "extras": listed, "programs": programs, "servers": servers}))
        return
    out = Output()
    for name, value in facts.items():
        out.fact(name, value)
    table = Table("feature", "needs", "state", box=None, pad_edge=False)
    for extra in checks:
        state = f"missing {', '.join(extra.missing)}: pip install 'polyturn[{extra.name}]'" if extra.missing else "ready"
        needs = ", ".join([*extra.installed, *extra.missing])
        of_library = f"plug-ins written for {extra.name}" if extra.name in offered(NAMESPACES) else extra.name
        table.add_row(FEATURES.get(extra.name, of_library), needs, state)
    for name, feature in PROGRAMS.items():
        table.add_row(feature, name, programs[name] or "not found")
    for name, feature in SERVERS.items():
        elsewhere = "not in this environment: set engine.launch.python to the interpreter of another environment"
        table.add_row(feature, name, elsewhere if servers[name] == _MISSING else servers[name])
    table.add_row("evaluating models behind an endpoint", "", "ready")
    out.table(table)


def _explain(project: Path, *, as_json: bool) -> None:
    from polyturn.cli.project import explain

    checks, out = list(explain(project)), Output()
    if as_json:
        print(json.dumps({name: {"is": value, "is_right": is_right} for name, value, is_right in checks}))
    for name, value, is_right in () if as_json else checks:
        out.fact(name, value if is_right else f"PROBLEM: {value}")
    if not all(is_right for *_, is_right in checks):
        raise typer.Exit(1)


def environment() -> dict[str, str]:
    """Describe the machine, the interpreter and the basic packages."""
    usable = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count()
    facts = {
        "polyturn": _version("polyturn"),
        "python": f"{platform.python_version()} ({sys.executable})",
        "system": f"{platform.system()} {platform.release()}, {platform.machine()}",
        "processors": f"{usable} usable, {_processor()}",
        "memory": f"{machine_memory() / 2**30:.0f} GiB",
        "disk": f"{shutil.disk_usage('.').free / 2**30:.0f} GiB free here",
    }
    facts |= {name: _version(name) for name in ("transformers", "tokenizers", "pydantic", "pyarrow")}
    return facts | _torch()


def extras() -> Iterator[Extra]:
    """Yield each extra of the installed package with its installed and missing dependencies."""
    wanted: dict[str, list[str]] = {}
    for line in metadata.requires("polyturn") or []:
        requirement, _, marker = line.partition(";")
        name = re.match(r"[A-Za-z0-9._-]+", requirement.strip())
        extra = re.search(r"extra\s*==\s*['\"]([^'\"]+)['\"]", marker)
        if name is not None and extra is not None and extra[1] not in _DEVELOPMENT:
            wanted.setdefault(extra[1], []).append(name[0])
    for extra_name, packages in wanted.items():
        missing = [package for package in packages if _version(package) == _MISSING]
        yield Extra(extra_name, [f"{one} {_version(one)}" for one in packages if one not in missing], missing)


_MISSING = "not installed"


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return _MISSING


def _torch() -> dict[str, str]:
    if _version("torch") == _MISSING:
        return {"torch": "not installed: pip install 'polyturn[train]'"}
    probe = [sys.executable, "-P", "-c", _PROBE]
    try:
        done = subprocess.run(probe, capture_output=True, text=True, check=False, timeout=120)
    except subprocess.TimeoutExpired as problem:
        return {"torch": f"{_version('torch')}, which was not imported within {problem.timeout:g} s"}
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return {"torch": f"{_version('torch')}, which cannot be imported: {reason}"}
    facts = json.loads(done.stdout.splitlines()[-1])
    gpus = ", ".join(facts["gpus"]) or "none"
    return {
        "torch": f"{facts['torch']}, {facts['threads']} threads",
        "GPUs": f"{gpus} (CUDA {facts['cuda'] or 'not built in'})",
    }


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or "unknown"
