"""Claude Code, Codex, mini-swe-agent and OpenHands themselves, against a scripted model that tells each to run a command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from polyturn.core.generation import GenerateRequest
from polyturn.rollout.limits import Limits
from polyturn.rollout.run_episode import run_episode
from polyturn.serving.openai.scheduler import BlackBox
from polyturn.testing.episodes import scripted_context, task
from support.sandboxes import needs_bubblewrap

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ROOT = Path(__file__).resolve().parents[3]
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
TOOLS = {
    "claude_code": ("Bash", "command"),
    "codex": ("exec_command", "cmd"),
    "mini_swe_agent": ("bash", "command"),
    "openhands": ("terminal", "command"),
}
"""Of each agent, the tool that runs a command, and the argument that holds it."""


def programs(agent: str) -> Path:
    """Return the folder of an agent's programs."""
    name = "openhands" if agent == "openhands" else "agents"
    command = [sys.executable, str(ROOT / "scripts/environments/build.py"), name, "--where"]
    python = Path(subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip())
    if not (python.parents[1] / ".complete").exists():
        pytest.skip(f"{agent} is not installed: python scripts/environments/build.py {name}")
    return python.parent


def interpreter_of(folder: Path) -> Path:
    """Return the folder of the Python that a virtual environment was made with."""
    return Path(os.path.realpath(folder / "python3")).parents[1]


def call(agent: str, command: str) -> str:
    name, argument = TOOLS[agent]
    return "<tool_call>\n" + json.dumps({"name": name, "arguments": {argument: command}}) + "\n</tool_call>"


@pytest.mark.parametrize("is_inside", [False, pytest.param(True, marks=needs_bubblewrap)], ids=["here", "sandbox"])
@pytest.mark.parametrize("agent", TOOLS)
async def test_agent_runs_the_command_of_its_model(agent: str, is_inside: bool):
    seen: list[str] = []
    context: Any = None

    def says(request: GenerateRequest) -> str:
        seen.append(context.codec.decode(request.prompt_ids.tolist()))
        if len(seen) == 1:
            return call(agent, "echo $((40 + 2))-said > out; cat out")
        return call(agent, SUBMIT) if agent == "mini_swe_agent" else "Done."

    folder = programs(agent)
    options: dict[str, Any] = {"kwargs": {"PATH": f"{folder}:{os.environ['PATH']}"}}
    if is_inside:
        binds = [
            argument for path in (folder.parent, interpreter_of(folder)) for argument in ("--ro-bind", str(path), str(path))
        ]
        options["sandbox"] = {"run_args": binds, "memory_mb": 4096}
    made = BlackBox(agent=agent, **options)
    context = scripted_context(
        says, scheduler=made, rewards={"quiz": lambda t: 1.0}, limits=Limits(timeout_s=300.0, max_context=1 << 20)
    )
    asked = task("Say the answer.", data_source="quiz")
    made.check_task(asked)
    t = await run_episode(context, asked, id="e")
    assert t.error is None, t.error
    assert "Say the answer." in seen[0] and "42-said" not in seen[0]
    assert "42-said" in seen[1], seen[1][-2000:]
    assert len(t.turns) == 2 and t.num_sampled_tokens
