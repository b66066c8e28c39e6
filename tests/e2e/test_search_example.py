"""The search example from an empty folder: its commands work, and its tasks are as documented.

benchmarks/example_learns.py shows that the model learns.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from polyturn.infra.plugins import import_attr
from polyturn.rewards import search_r1
from polyturn.tools.registry import initialize_tools_from_config
from support.forked import run_forked

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy the example and make its index, by the commands that it names."""
    base = tmp_path_factory.mktemp("examples")
    for name in ("search", "quickstart"):
        shutil.copytree(EXAMPLES / name, base / name, ignore=shutil.ignore_patterns("runs", "*.index", "people.jsonl"))
    named = next(line for line in (base / "search" / "people.py").read_text().splitlines() if line.startswith("    python "))
    make, index, _ = (command.split() for command in named.split("&&"))
    made = subprocess.run([sys.executable, *make[1:]], cwd=base / "search", check=False, capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    assert run(*index[1:], folder=base / "search") == "people.index: 1600 passages\n"
    return base / "search"


def run(*arguments: str, folder: Path) -> str:
    """Run a command of polyturn in a folder, and return its output."""
    done = run_forked(*arguments, cwd=folder)
    assert done.returncode == 0, done.err[-3000:]
    return done.out


def named(folder: Path, name: str) -> Any:
    return import_attr(f"people.py:{name}", base=folder)


async def searched(tool: Any, query: str) -> str:
    instance_id, _ = await tool.create()
    try:
        return str((await tool.execute(instance_id, {"query_list": [query]}))[0].text)
    finally:
        await tool.release(instance_id)


async def test_demonstrations_and_tasks_fit_the_tool(folder: Path):
    listed = yaml.safe_load((folder / "config.yaml").read_text())["rollout"]["tools"]["file"]
    (tool,) = initialize_tools_from_config(listed, base=folder)
    for conversation in named(folder, "demonstrations")(0, 200):
        told = [m for m in conversation.messages if m.role == "tool"]
        asked = [m for m in conversation.messages if m.tool_calls]
        for call, reply in zip(asked, told, strict=True):
            assert await searched(tool, call.tool_calls[0].arguments["query_list"][0]) == reply.text
    for task in named(folder, "tasks")(7, 200, is_held_out=True):
        (target,) = task.ground_truth["target"]
        assert f"{target}" in json.loads(await searched(tool, task.extra["name"]))["result"]
        assert search_r1.compute_score(f"<answer> {target} </answer>", task.ground_truth) == 1.0
        surname = await searched(tool, task.extra["name"].split()[1])
        assert surname != await searched(tool, "zebra")


def test_training_and_evaluation_have_different_tasks(folder: Path):
    train = {task.extra["name"] for task in named(folder, "tasks")(0, 3000)}
    held_out = {task.extra["name"] for task in named(folder, "tasks")(7, 512, is_held_out=True)}
    assert len(train) > 1000 and len(held_out) > 250 and not train & held_out


def test_short_run_goes_through_the_index(folder: Path):
    few = [
        "warm_start.kwargs.num_conversations=64", "warm_start.steps=3", "train.steps=1", "train.groups_per_step=2",
        "train.group_size=2", "train.minibatches=1", "evaluation.data.kwargs.num_tasks=4", "out=short", "num_threads=1",
    ]  # fmt: skip
    assert "before and after" in run("train", "config.yaml", *few, folder=folder)
    assert (folder / "short" / "search" / "metrics.jsonl").is_file()
