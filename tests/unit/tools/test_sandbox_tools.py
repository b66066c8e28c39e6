"""The tools bash, read_file, write_file and edit_file over one sandbox an episode."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from polyturn.core.errors import ConfigError, ToolError, ToolUnavailableError
from polyturn.tools.base import BaseTool
from polyturn.tools.registry import initialize_tools_from_config
from support.refusals import refuses, refuses_later
from support.sandboxes import needs_bubblewrap, processes_with, stand_in

ITEM = "polyturn.tools.sandbox_tools.SandboxTools"
Call = Callable[..., Any]

pytestmark = needs_bubblewrap


def tools_of(**config: Any) -> dict[str, BaseTool]:
    return {t.name: t for t in initialize_tools_from_config([{"class_name": ITEM, "config": {"type": "native", **config}}])}


@pytest.fixture
async def call() -> AsyncIterator[Call]:
    tools = tools_of()
    for tool in tools.values():
        await tool.create("e")

    async def call(name: str, **arguments: Any) -> str:
        answer = await tools[name].execute("e", arguments)
        return answer if isinstance(answer, str) else answer[0].text

    yield call
    for tool in tools.values():
        await tool.release("e")


def test_item_is_four_tools_with_schemas():
    tools = tools_of()
    assert list(tools) == ["bash", "read_file", "write_file", "edit_file"]
    parameters = tools["bash"].schema["function"]["parameters"]
    assert parameters["required"] == ["command"] and set(parameters["properties"]) == {"command", "timeout"}


def test_item_chooses_tools():
    assert list(tools_of(tools=["bash"])) == ["bash"]


async def test_shell_keeps_folder_variables_and_functions(call: Call):
    await call("bash", command="mkdir d; cd d; x='a  b'; export y=2; f() { echo \"f $1\"; }")
    assert await call("bash", command='pwd; echo "$x"; f 1; sh -c "echo \\$y"') == "/app/d\na  b\nf 1\n2\n"


async def test_exit_keeps_the_state_too(call: Call):
    assert await call("bash", command="z=1; exit 3") == "[exit code 3]"
    assert await call("bash", command="echo $z") == "1\n"


async def test_late_command_leaves_the_shell_usable(call: Call):
    await call("bash", command="x=1")
    assert "longer than 0.5 s" in await call("bash", command="sleep 1000", timeout=0.5)
    assert await call("bash", command="echo $x") == "1\n"


async def test_output_and_errors_come_in_order(call: Call):
    assert await call("bash", command="echo a; echo b >&2; echo c") == "a\nb\nc\n"
    assert await call("bash", command="true") == "The command printed nothing."


async def test_server_in_background_stays(call: Call):
    await call("bash", command="sleep 1000 &")
    assert "sleep" in await call("bash", command="cat /proc/[0-9]*/comm")


async def test_files_are_written_read_and_edited(call: Call):
    await call("write_file", path="a/b.txt", content="one\ntwo\nthree\n")
    assert await call("read_file", path="a/b.txt", start=2, num_lines=1) == "two\n"
    assert await call("read_file", path="a/b.txt", num_lines=-1) == "[No lines; the file has 3.]"
    await call("write_file", path="separators", content="1\u2028\x0c\x852\r\n3\r4\n")
    assert await call("read_file", path="separators", start=2) == "3\r4\n"
    await call("edit_file", path="a/b.txt", old="two", new="2")
    assert await call("bash", command="cat a/b.txt") == "one\n2\nthree\n"


@pytest.mark.parametrize(
    ("name", "arguments", "word"),
    [
        ("read_file", {"path": "missing"}, "missing"),
        ("edit_file", {"path": "f", "old": "x", "new": ""}, "2 times"),
        ("edit_file", {"path": "f", "old": "zz", "new": ""}, "0 times"),
        ("write_file", {"path": "/proc/x/y", "content": ""}, "/proc/x"),
        ("bash", {"command": "x" * 200_000}, "200000"),
        ("read_file", {"path": "bytes"}, "UTF-8"),
        ("read_file", {"path": "f\0"}, "NUL"),
        ("write_file", {"path": "f\0", "content": ""}, "NUL"),
    ],
)
async def test_failure_is_reported_to_the_model(call: Call, name: str, arguments: dict[str, Any], word: str):
    await call("bash", command="echo xx > f; printf '\\xff' > bytes")
    await refuses_later(lambda: call(name, **arguments), ToolError, word)


async def test_dead_sandbox_fails_the_trajectory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    engine = stand_in(monkeypatch, tmp_path, "podman")
    sandbox = {"backend": "podman", "image": "i", "workdir": str(tmp_path / "work")}
    (tool,) = tools_of(tools=["bash"], sandbox=sandbox).values()
    await tool.create("e")
    await tool.execute("e", {"command": "true"})
    engine.set("dead")
    with pytest.raises(ToolUnavailableError):
        await tool.execute("e", {"command": "true"})
    await tool.release("e")


async def test_last_release_closes_the_sandbox():
    tools = list(tools_of(tools=["bash", "read_file"]).values())
    for tool in tools:
        await tool.create("e")
    await tools[0].execute("e", {"command": "sleep 31340 &"})
    await tools[0].release("e")
    assert processes_with("31340")
    await tools[1].release("e")
    assert not processes_with("31340")


async def test_unused_sandbox_is_never_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    engine = stand_in(monkeypatch, tmp_path, "podman")
    (tool,) = tools_of(tools=["bash"], sandbox={"backend": "podman", "image": "i", "workdir": str(tmp_path)}).values()
    await tool.create("e")
    await tool.release("e")
    assert len(engine.calls("run")) == len(engine.calls("rm")) == 1  # of the trial before the run


def test_sandbox_that_does_not_start_is_refused_before_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    stand_in(monkeypatch, tmp_path, "podman").set("no-run")
    refuses(lambda: tools_of(sandbox={"backend": "podman", "image": "i"}), ConfigError, "no such image")


@pytest.mark.parametrize(
    ("config", "word"),
    [
        ({"tiemout": 1}, "timeout"),
        ({"timeout": 0}, "timeout"),
        ({"tools": ["bsh"]}, "bash"),
        ({"tools": []}, "tools"),
        ({"sandbox": {"image": "python:3.12"}}, "python:3.12"),
        ({"sandbox": {"backend": "podmann"}}, "podman"),
    ],
)
def test_wrong_setting_is_refused_by_name(config: dict[str, Any], word: str):
    refuses(lambda: tools_of(**config), ConfigError, word)
