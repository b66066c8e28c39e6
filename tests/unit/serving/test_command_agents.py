"""Command-line agents: how they are started, where they are looked for, and how they end an episode."""

from __future__ import annotations

import dataclasses
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from polyturn.core.errors import ConfigError, DataError, UnknownNameError
from polyturn.core.lifecycle import StopReason
from polyturn.core.trajectory import Trajectory
from polyturn.rollout.limits import Limits
from polyturn.rollout.run_episode import run_episode
from polyturn.sandbox import BaseSandbox, open_sandbox
from polyturn.serving.openai.agents import AGENTS, CommandLineAgent
from polyturn.serving.openai.endpoint import Address
from polyturn.serving.openai.scheduler import BlackBox
from polyturn.testing.episodes import scripted_context, task
from support.refusals import refuses, refuses_later
from support.sandboxes import needs_bubblewrap

SCRIPT = """
import json, os, sys, urllib.request
home, instruction = sys.argv[1:]
assert sys.stdin.read() == "" and os.listdir(".") == [] and os.listdir(home)
def ask(text):
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": text}]}).encode()
    head = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    return json.load(urllib.request.urlopen(urllib.request.Request(url, body, head)))
print("x" * 3_000_000)
ask(instruction)
if os.environ.get("MODE") == "fail":
    sys.exit("the disk is full")
if os.environ.get("MODE") == "hang":
    import time
    time.sleep(1000)
open("answer", "w").close()
"""
AGENT = CommandLineAgent(
    command=("python3", "{home}/agent.py", "{home}", "{instruction}"), install="pip install it", files={"agent.py": SCRIPT}
)
ADDRESS = Address(base_url="http://h/v1", anthropic_base_url="http://h", api_key="k")
WHERE = [None, pytest.param({"memory_mb": 512}, marks=needs_bubblewrap)]


async def play(agent: CommandLineAgent = AGENT, *, says: Any = ("four",), mode: str = "", **options: Any) -> Trajectory:
    made = BlackBox(agent=agent, kwargs={"MODE": mode}, **options)
    context = scripted_context(
        says, scheduler=made, rewards={"quiz": lambda trajectory: 0.5}, limits=Limits(timeout_s=120.0)
    )
    asked = task("Say {model} or {home}.", data_source="quiz")
    made.check_task(asked)
    return await run_episode(context, asked, id="e")


@pytest.mark.parametrize("sandbox", WHERE)
async def test_agent_is_told_the_task_and_its_model(sandbox: Any):
    t = await play(sandbox=sandbox)
    assert t.error is None and t.reward is not None and t.reward.total == 0.5
    assert [turn.message.text for turn in t.turns] == ["four"]
    assert "Say {model} or {home}." in scripted_context([]).codec.decode(t.segments[0].token_ids.tolist())


@pytest.mark.parametrize("sandbox", WHERE)
async def test_agent_that_fails_is_an_error_with_its_last_words(sandbox: Any):
    t = await play(mode="fail", sandbox=sandbox)
    assert t.stop_reason is StopReason.ERROR
    assert "'python3'" in str(t.error) and "exit code 1" in str(t.error) and "the disk is full" in str(t.error)


@pytest.mark.clock
@pytest.mark.parametrize("sandbox", WHERE)
async def test_late_agent_ends_the_episode_with_its_score(sandbox: Any):
    t = await play(dataclasses.replace(AGENT, timeout_s=6.0), mode="hang", sandbox=sandbox)
    assert t.stop_reason is StopReason.TIMEOUT and t.reward is not None and t.reward.total == 0.5


@needs_bubblewrap
async def test_sandbox_that_dies_in_the_middle_fails_the_episode(monkeypatch: pytest.MonkeyPatch):
    opened: list[BaseSandbox] = []

    async def remembered(spec: Any) -> BaseSandbox:
        opened.append(await open_sandbox(spec))
        return opened[-1]

    monkeypatch.setattr("polyturn.serving.openai.scheduler.open_sandbox", remembered)

    def says(request: Any) -> str:
        os.kill(opened[0]._pid, signal.SIGKILL)  # type: ignore[attr-defined]
        return "four"

    t = await play(says=says, sandbox={})
    assert t.stop_reason is StopReason.ERROR and "bubblewrap sandbox is gone" in str(t.error)


@pytest.mark.parametrize("sandbox", WHERE)
async def test_missing_agent_is_refused_before_the_run(sandbox: Any):
    with pytest.raises(ConfigError, match=r"no-such-agent.*pip install it"):
        await play(dataclasses.replace(AGENT, command=("no-such-agent",)), sandbox=sandbox)


async def test_missing_container_program_is_refused_before_the_run(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", "/nowhere")
    await refuses_later(lambda: play(sandbox={"backend": "podman", "image": "x"}), ConfigError, "podman")


def test_unknown_agent_is_named_with_the_closest():
    refuses(lambda: BlackBox(agent="claud_code"), UnknownNameError, "Did you mean 'claude_code'")


def test_task_without_text_is_refused():
    refuses(lambda: BlackBox(agent="codex").check_task(task("")), DataError, "'t0'")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"agent": lambda base_url: 1.0, "sandbox": {}}, "is a function"),
        ({"agent": "codex", "reward": "posted"}, "reward is 'posted'"),
        ({"command": ["x"], "sandbox": {}, "reward": "posted"}, "reward is 'posted'"),
        ({"agent": "codex", "sandbox": {"bakend": "podman"}}, "sandbox has the unknown key 'bakend'"),
    ],
)
def test_setting_that_cannot_work_is_refused(options: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        BlackBox(**options)


@needs_bubblewrap
async def test_command_in_a_sandbox_reads_its_task():
    script = SCRIPT.replace("home, instruction = sys.argv[1:]", 'instruction = json.load(sys.stdin)["ground_truth"]')
    script = script.replace('assert sys.stdin.read() == "" and os.listdir(".") == [] and os.listdir(home)', "")
    made = BlackBox(command=["python3", "-c", script], sandbox={})
    t = await run_episode(
        scripted_context(["x"], scheduler=made, rewards={"q": lambda t: 1.0}), task(data_source="q"), id="e"
    )
    assert t.error is None, t.error


async def test_agent_of_a_file_is_found(tmp_path: Path):
    (tmp_path / "agents.py").write_text(
        "from polyturn.serving.openai.agents import CommandLineAgent\n"
        "mine = CommandLineAgent(command=('no-such-agent', '{instruction}'))\n"
    )
    refuses(lambda: BlackBox(agent="agents.py:mine", base=tmp_path).check_task(task()), ConfigError, "agents.py:mine")


@pytest.mark.parametrize("name", AGENTS)
def test_agent_of_the_table_is_told_its_instruction_and_model(name: str):
    own = AGENTS[name].filled(address=ADDRESS, model="m1", instruction="do {home}", home="/h")
    assert "do {home}" in own.command[-1] or "--task=do {home}" in own.command
    everything = [*own.command, *own.variables.values(), *own.files.values()]
    assert any("m1" in text for text in everything)
    assert not any(field in text for text in everything for field in ("{model}", "{base_url}", "{api_key}"))


def test_double_braces_and_other_text_in_braces_stay():
    agent = CommandLineAgent(command=("x", '${{HOME}} {} {1} {"a": {}}', "{home}/{{home}}"), files={"f": "{ model }"})
    own = agent.filled(address=ADDRESS, model="m", instruction="", home="/h")
    assert own.command[1:] == ('${HOME} {} {1} {"a": {}}', "/h/{home}") and own.files["f"] == "{ model }"


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"command": ()}, "command"),
        ({"command": "sh -c true"}, "command"),
        ({"timeout_s": "10"}, "timeout_s"),
        ({"timeout_s": -1}, "timeout_s"),
        ({"variables": {"A": 5}}, "variables"),
        ({"files": {"../evil": "x"}}, "../evil"),
        ({"files": {"/evil": "x"}}, "/evil"),
        ({"command": ("true", "{instructions}")}, "Did you mean 'instruction'"),
        ({"variables": {"A": "{base_urll}"}}, "Did you mean 'base_url'"),
        ({"files": {"a": "${HOME}"}}, "{{HOME}}"),
    ],
)
def test_field_of_an_agent_that_cannot_work_is_refused(options: dict[str, Any], key: str):
    refuses(lambda: CommandLineAgent(**{"command": ("true",), **options}), ConfigError, key)


@pytest.mark.parametrize("sandbox", WHERE)
async def test_files_of_an_agent_may_lie_in_folders(sandbox: Any):
    program = SCRIPT.replace("os.listdir(home)", 'open(home + "/a/b.txt").read() == "c"')
    t = await play(dataclasses.replace(AGENT, files={"agent.py": program, "a/b.txt": "c"}), sandbox=sandbox)
    assert t.error is None


@pytest.mark.parametrize("sandbox", WHERE)
def test_missing_program_of_a_command_is_refused_before_the_run(sandbox: Any):
    scheduler = BlackBox(command=["no-such-program"], sandbox=sandbox)
    refuses(lambda: scheduler.check_task(task("Say four.")), ConfigError, "no-such-program")
