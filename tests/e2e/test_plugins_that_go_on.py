"""Plug-ins that ignore their end: every command still ends, with its summary or its error, and names what it left.

Each command runs in a separate process, whose end is tested; without a limit, none of them would end.
"""

from __future__ import annotations

import re
import signal
import textwrap
from pathlib import Path

import httpx
import pytest
import yaml

from polyturn.cli.main import main
from support.cases import each
from support.forked import Forked, run_forked, served
from support.runs import call_command, write_tiny_run

pytestmark = [pytest.mark.kill, pytest.mark.timeout(900)]

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


def check_named(said: str) -> None:
    """Check that the leftovers are named, with their file and lines."""
    assert re.search(r"is abandoned: .*\(\S+plugins\.py:\d+, now at \S+plugins\.py:\d+\)", said), said
    assert "Traceback" not in said and "Task was destroyed" not in said, said


ENGINE = """
import asyncio, time
import numpy as np
from plugins import ignore_cancellation
from polyturn.core.generation import Completion, FinishReason
from polyturn.core.protocols import EngineCapabilities
from polyturn.engines.base import BaseEngine


class Hangs(BaseEngine):
    def __init__(self, setup, *, where):
        super().__init__()
        self.where, self.num, self.version = where, 0, 0

    @property
    def capabilities(self):
        return EngineCapabilities(logprobs=True, shares_weights=True)

    async def hang(self, where):
        if where == self.where:
            await ignore_cancellation()
        if f"{where} in a thread" == self.where:
            await asyncio.to_thread(time.sleep, 3600)

    async def generate(self, request):
        self.num += 1
        if self.num > 4:
            await self.hang("generate")
        ids = np.arange(4, dtype=np.int32) + 10 + self.num % 7
        versions = ((0, self.version),)
        return Completion(
            token_ids=ids, logprobs=np.full(4, -5.0), finish_reason=FinishReason.LENGTH, policy_versions=versions
        )

    async def abort(self, request_id):
        pass

    async def end_session(self, session_id):
        await self.hang("end_session")

    async def update_weights(self, version, *, weights=None):
        await self.hang("update_weights")
        self.version = version

    async def close(self):
        await self.hang("close")
"""


@pytest.mark.parametrize(
    ("where", "code", "words"),
    [
        ("generate", 2, "the engine Hangs: generate: it took longer than 1 s; raise engine.timeout_s"),
        pytest.param("update_weights in a thread", 2, "the engine Hangs: update_weights: it", marks=pytest.mark.slow),
        pytest.param("end_session", 0, "before and after", marks=pytest.mark.slow),
    ],
)
def test_run_ends_when_its_engine_hangs(tmp_path: Path, where: str, code: int, words: str):
    config = write_tiny_run(tmp_path)
    config.write_text("".join(line for line in config.read_text().splitlines(True) if not line.startswith("engine:")))
    plugins = tmp_path / "plugins.py"
    plugins.write_text(plugins.read_text() + STUBBORN)
    (tmp_path / "hangs.py").write_text(ENGINE)
    engine = f"engine={{kind: 'hangs.py:Hangs', timeout_s: 1.0, kwargs: {{where: {where}}}}}"
    done = run_forked("train", config, engine, "warm_start.conversations=null", "train.steps=2", cwd=tmp_path)
    assert done.returncode == code and re.search(words, done.out + done.err), done.err
    assert "Traceback" not in done.err and "Task was destroyed" not in done.err, done.err


@pytest.mark.parametrize(
    ("command", "kind", "code", "words"),
    each(
        4,
        [
            (("train", "train.groups_per_step=6"), "tool", 2, "trajectories failed"),
            (("train", "train.steps=1"), "interaction that stays", 0, "before and after"),
            (("rollout",), "interaction", 2, "trajectories failed"),
            (("eval",), "scheduler", 2, "all 2 trajectories failed"),
        ],
    ),
)
def test_command_ends_despite_a_stubborn_plugin(tmp_path: Path, command: tuple[str, ...], kind: str, code: int, words: str):
    config = stubborn_run(tmp_path, kind)
    name, *settings = command
    done = run_forked(name, config, *SETTINGS[kind], *settings, cwd=tmp_path)
    assert done.returncode == code, done.err
    assert words in done.out + done.err
    check_named(done.err)


def test_rescore_ends_despite_leftover_tasks(tmp_path: Path):
    config = write_tiny_run(tmp_path)
    assert call_command(main, "rollout", config, "-n", 1).code == 0
    stubborn_run(tmp_path, "reward")
    reward = f"{tmp_path / 'plugins.py'}:scored"
    done = run_forked("rescore", tmp_path / "runs" / "tiny-rollout", "--reward", reward, cwd=tmp_path)
    assert done.returncode == 0 and "written" in done.out, done.err
    check_named(done.err)


def test_server_ends_after_a_signal(tmp_path: Path):
    """Its episodes' scheduler never answers."""
    config = stubborn_run(tmp_path, "scheduler")
    command = ("serve", "--config", config, *SETTINGS["scheduler"], "--port", 0, "--grace", 1)
    with served(*command, cwd=tmp_path) as (_, url):
        message = {"role": "user", "content": "How loud?"}
        reply = httpx.post(f"{url}/infer/", json={"infer_requests": [{"messages": [message]}]}, timeout=60).json()
        assert "the scheduler's step took longer" in str(reply), reply


def test_ctrl_c_ends_a_stubborn_plugin(tmp_path: Path):
    config = stubborn_run(tmp_path, "interaction")
    plugins = tmp_path / "plugins.py"
    plugins.write_text(plugins.read_text().replace("    while True:", '    print("begun", flush=True)\n    while True:'))
    process = Forked("train", config, cwd=tmp_path)
    process.wait_until(lambda: "begun" in process.out)
    process.send_signal(signal.SIGINT)
    assert process.wait(ENDS_WITHIN_S) == 130, process.err
    check_named(process.err)


HOLDS = """
import time
from polyturn.infra import loop

loop.HELD_S = 1.0


async def scored(trajectory):
    if any(Path(__file__).parent.glob("runs/tiny/checkpoints/step-*")):
        time.sleep(3600)
    return score(trajectory)
"""


def test_run_whose_loop_is_blocked_ends_and_resumes(tmp_path: Path):
    """No deadline passes while the event loop is blocked."""
    config = write_tiny_run(tmp_path)
    plugins = tmp_path / "plugins.py"
    plugins.write_text("from pathlib import Path\n" + plugins.read_text() + HOLDS)
    parts = ("rollout.tools.", "rollout.interaction_", "rollout.scheduler_", "reward.")
    deadlines = [f"{part}timeout_s=5" for part in parts]
    settings = [*deadlines, "reward.routes={tiny: plugins.py:scored}", "train.checkpoint_every=1", "train.steps=40"]
    done = run_forked("train", config, *settings, cwd=tmp_path)
    assert done.returncode == 2, done.err
    assert "a plug-in has held" in done.err and "plugins.py:" in done.err and "--resume" in done.err, done.err
    plugins.write_text(plugins.read_text().replace("time.sleep(3600)", "pass"))
    resumed = run_forked("train", config, *settings, "train.steps=2", "--resume", cwd=tmp_path)
    assert resumed.returncode == 0 and "resumed in" in resumed.err, resumed.err
