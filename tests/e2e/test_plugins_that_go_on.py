"""Plug-ins that ignore their end: every command ends all the same, with its summary or its error, and says what it left.

Each runs in a process of its own, because what is tested is that the process ends; without a limit, none of them does.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from polyturn.cli.main import main
from support.runs import call_command, write_tiny_run

ENDS_WITHIN_S = 280
"""Generous, for a busy machine."""

STUBBORN = """
import asyncio
from polyturn.tools.base import BaseTool

async def ignore_cancellation():
    while True:
        try:
            await asyncio.sleep(3600)
        except BaseException:
            pass
"""

PLUGINS = {
    "tool": """
        class Stubborn(BaseTool):
            async def create(self, instance_id=None, **kwargs):
                await ignore_cancellation()

            async def execute(self, instance_id, parameters, **kwargs):
                return "never"
    """,
    "interaction": """
        class Coach(BaseInteraction):
            async def start_interaction(self, instance_id=None, **kwargs):
                await ignore_cancellation()

            async def generate_response(self, instance_id, messages, **kwargs):
                return True, "", 0.0, {}
    """,
    "interaction that stays": """
        class Coach(BaseInteraction):
            async def start_interaction(self, instance_id=None, **kwargs):
                self.left = asyncio.get_running_loop().create_task(ignore_cancellation())
                return instance_id

            async def generate_response(self, instance_id, messages, **kwargs):
                return True, "", 0.0, {}
    """,
    "reward": """
        LEFT = []

        async def scored(trajectory):
            LEFT.append(asyncio.get_running_loop().create_task(ignore_cancellation()))
            return 1.0
    """,
    "scheduler": """
        class GoesOn(MultiTurnScheduler):
            async def step(self, episode, turn):
                await ignore_cancellation()

            def check_finished(self, episode, turn):
                return None
    """,
}
SETTINGS = {
    "tool": ("rollout.tools={file: tools.yaml, timeout_s: 0.1}",),
    "interaction": ("rollout.interaction_timeout_s=0.1",),
    "interaction that stays": (),
    "scheduler": ("rollout.scheduler=plugins.py:GoesOn", "rollout.scheduler_timeout_s=0.1"),
}
TOOLS = {"tools": [{"class_name": "plugins.Stubborn", "config": {}, "tool_schema": {"type": "function", "function": {
    "name": "stubborn", "description": "Goes on.", "parameters": {"type": "object", "properties": {}}}}}]}  # fmt: skip


def stubborn_run(folder: Path, kind: str) -> Path:
    """Write the tiny run with a plug-in that ignores its end."""
    config = write_tiny_run(folder)
    plugins = folder / "plugins.py"
    plugins.write_text(plugins.read_text() + STUBBORN + textwrap.dedent(PLUGINS[kind]))
    (folder / "tools.yaml").write_text(yaml.safe_dump(TOOLS))
    return config


def command(*arguments: object) -> dict[str, Any]:
    """Return how a command of polyturn is started."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": ""}
    return {"args": [sys.executable, "-m", "polyturn", *map(str, arguments)], "text": True, "env": env}


def heeds_ctrl_c() -> None:
    """Take the signal of Ctrl-C as a terminal's process does; one that a shell starts in the background ignores it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def ended(*arguments: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Return what a command left, whose process has to end by itself."""
    return subprocess.run(**command(*arguments), capture_output=True, timeout=ENDS_WITHIN_S, cwd=cwd)


def check_named(said: str) -> None:
    """Check that what was left is named, with its file and lines."""
    assert re.search(r"abandoned at the end of the run, .*\(\S+plugins\.py:\d+, now at \S+plugins\.py:\d+\)", said), said
    assert "Traceback" not in said and "Task was destroyed" not in said, said


@pytest.mark.parametrize(
    ("command", "kind", "code", "words"),
    [
        (("train", "train.groups_per_step=6"), "tool", 2, "trajectories failed"),
        (("train", "train.steps=1"), "interaction that stays", 0, "before and after"),
        (("rollout",), "interaction", 2, "trajectories failed"),
        (("eval",), "scheduler", 2, "all 2 trajectories failed"),
    ],
)
def test_a_command_ends_with_its_summary_or_its_error(
    tmp_path: Path, command: tuple[str, ...], kind: str, code: int, words: str
):
    config = stubborn_run(tmp_path, kind)
    name, *settings = command
    done = ended(name, config, *SETTINGS[kind], *settings, cwd=tmp_path)
    assert done.returncode == code, done.stderr
    assert words in done.stdout + done.stderr
    check_named(done.stderr)


def test_a_reward_that_leaves_tasks_behind_does_not_keep_rescore(tmp_path: Path):
    config = write_tiny_run(tmp_path)
    assert call_command(main, "rollout", config, "-n", 1).code == 0
    stubborn_run(tmp_path, "reward")
    done = ended(
        "rescore", tmp_path / "runs" / "tiny-rollout", "--reward", f"{tmp_path / 'plugins.py'}:scored", cwd=tmp_path
    )
    assert done.returncode == 0 and "written" in done.stdout, done.stderr
    check_named(done.stderr)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], str, list[str]]]:
    """Return a server of episodes whose scheduler never answers, its address, and what it says."""
    config = stubborn_run(tmp_path, "scheduler")
    started = command("serve", "--config", config, *SETTINGS["scheduler"], "--port", 0, "--grace", 1)
    process = subprocess.Popen(**started, stderr=subprocess.PIPE, cwd=tmp_path)
    said: list[str] = []
    assert process.stderr is not None
    for line in process.stderr:
        said.append(line)
        if (found := re.search(r"listening on (http://\S+)", line)) is not None:
            break
    reader = threading.Thread(target=lambda: said.extend(process.stderr or ()), daemon=True)
    reader.start()
    assert found is not None, said
    yield process, found[1], said
    process.kill()
    process.wait()


def test_a_server_ends_after_a_signal(served: tuple[subprocess.Popen[str], str, list[str]]):
    process, url, said = served
    message = {"role": "user", "content": "How loud?"}
    reply = httpx.post(f"{url}/infer/", json={"infer_requests": [{"messages": [message]}]}, timeout=60).json()
    assert "the scheduler's step took longer" in str(reply), reply
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=ENDS_WITHIN_S) == 0, said


@pytest.mark.parametrize("name", ["train", "rollout"])
def test_ctrl_c_in_the_middle_of_what_ignores_it(tmp_path: Path, name: str):
    config = stubborn_run(tmp_path, "interaction")
    plugins = tmp_path / "plugins.py"
    plugins.write_text(plugins.read_text().replace("    while True:", '    print("begun", flush=True)\n    while True:'))
    process = subprocess.Popen(
        **command(name, config), stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=tmp_path, preexec_fn=heeds_ctrl_c
    )
    assert process.stdout is not None
    assert any(line.startswith("begun") for line in process.stdout)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=ENDS_WITHIN_S)
    assert process.returncode == 130, said
    check_named(said)
