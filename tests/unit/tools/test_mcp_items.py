"""What a tool file may say about MCP servers, what is refused, and what their content blocks become."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
from mcp import types

from polyturn.core.errors import ConfigError
from polyturn.core.messages import ToolCall
from polyturn.core.task import Task
from polyturn.tools.executor import ToolBox
from polyturn.tools.mcp_client import list_tools, read_servers, transport_of
from polyturn.tools.mcp_content import blocks_of, images_of, text_of
from polyturn.tools.registry import initialize_tools_from_config
from polyturn.tools.schema import OpenAIFunctionToolSchema

RAW = {"command": sys.executable, "args": ["-S", str(Path(__file__).with_name("mcp_raw_server.py"))]}


def tools_of(servers: Any, config: Any = None, **mcp: Any) -> Any:
    item = {
        "class_name": "polyturn.tools.mcp.MCPBaseTool",
        "config": {"type": "mcp", **(config or {})},
        "mcp": {"servers": servers, **mcp},
    }
    return initialize_tools_from_config({"tools": [item]})


def test_servers_may_stand_in_the_tool_file_and_two_tools_of_one_name_are_refused_unless_prefixed() -> None:
    two = {"left": RAW, "right": RAW}
    with pytest.raises(ConfigError, match=r"'left' and 'right' both have a tool 'pid'.*'left_pid' and 'right_pid'"):
        tools_of(two, tool_selected_list=["pid"])
    tools = tools_of(two, {"session": "episode"}, tool_selected_list=["pid"], prefix=True)
    assert [t.name for t in tools] == ["left_pid", "right_pid"]
    with pytest.raises(ConfigError, match=r"no server has the tool 'pif' of mcp.tool_selected_list. Did you mean 'pid'"):
        tools_of({"left": RAW}, tool_selected_list=["pif"])


async def test_prefixed_tools_call_the_server_by_its_own_names() -> None:
    tools = tools_of({"left": RAW, "right": RAW}, {"session": "episode"}, tool_selected_list=["count"], prefix=True)
    async with ToolBox(tools).session("e") as session:
        await session.start(Task(id="t", prompt=()))
        calls = [
            ToolCall(id=str(i), name=n, arguments={}) for i, n in enumerate(["left_count", "right_count", "left_count"])
        ]
        said = [r.content for r in await session.call(calls)]
        assert sorted(map(str, said)) == ["1", "1", "2"]


@pytest.mark.parametrize(
    ("servers", "said"),
    [
        ({}, "there is no server"),
        ({"s": "python server.py"}, "the server 's' must be a mapping with a command or a url, not a str"),
        ({"s": {}}, "needs either a command or a url; it has neither"),
        ({"s": {"command": "x", "url": "http://y"}}, "it has both"),
        ({"s": {"command": ""}}, "its command must be a text that is not empty"),
        ({"s": {"command": "x", "arg": []}}, "has the unknown key 'arg'. Did you mean 'args'"),
        ({"s": {"command": "x", "args": "a b"}}, "args must be a list, not a str"),
        ({"s": {"url": "localhost:8000"}}, "must begin with http:// or https://"),
        ({"s": {"url": "http://y", "transport": "websocket"}}, "the transport is 'websocket'"),
        ({"s": {"url": "http://y", "transport": "stdio"}}, "which does not go with a url"),
        ({"s": {"command": "x", "type": "sse"}}, "which does not go with a command"),
    ],
)
def test_a_server_that_cannot_work_is_refused_with_a_sentence(servers: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said.replace(".", r"\.")):
        read_servers(servers)


def test_settings_that_cannot_work_are_refused_and_no_secret_is_shown(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="session is 'turn'; use 'run'"):
        tools_of({"s": RAW}, {"session": "turn"})
    with pytest.raises(ConfigError, match="timeout is -1; it must be a positive number"):
        tools_of({"s": RAW}, {"timeout": -1})
    with pytest.raises(ConfigError, match="connect_timeout is 0"):
        tools_of({"s": RAW}, {"connect_timeout": 0})
    with pytest.raises(ConfigError, match="mcp has the unknown key 'selected'"):
        tools_of({"s": RAW}, selected=["pid"])
    with pytest.raises(ConfigError, match="needs either a command or a url") as refused:
        read_servers({"s": {"auth_token": "hunter2"}})
    assert "hunter2" not in str(refused.value)


def test_a_token_may_come_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "servers.json"
    path.write_text('{"mcpServers": {"web": {"url": "https://x/mcp", "auth_token": "${oc.env:THE_TOKEN}"}}}')
    monkeypatch.setenv("THE_TOKEN", "hunter2")
    assert read_servers(path)["web"]["auth_token"] == "hunter2"
    monkeypatch.delenv("THE_TOKEN")
    with pytest.raises(ConfigError, match=r"a reference cannot be resolved: .*THE_TOKEN"):
        read_servers(path)


def test_what_a_server_knows_is_not_shown_when_it_fails() -> None:
    program = "import os, sys; sys.exit('bad key ' + os.environ['VENDOR_API_KEY'])"
    chatty = {"command": sys.executable, "args": ["-S", "-c", program], "env": {"VENDOR_API_KEY": "hunter2hunter2"}}
    with pytest.raises(ConfigError, match=r"its standard error ends: bad key \*\*\*"):
        list_tools("chatty", chatty)
    with pytest.raises(ConfigError, match="the server 'web': the MCP server names the variable 'NO_SUCH_TOKEN'"):
        read_servers({"web": {"url": "https://x/mcp", "token_env": "NO_SUCH_TOKEN"}})


def test_the_transport_is_read_off_the_settings() -> None:
    assert transport_of({"command": "x"}) == "stdio"
    assert transport_of({"url": "http://x/mcp"}) == "streamable_http"
    assert transport_of({"url": "http://x/mcp", "auth_token": "t"}) == "streamable_http"
    assert transport_of({"url": "http://x/sse"}) == "sse"
    assert transport_of({"url": "http://x/mcp", "type": "sse"}) == "sse"
    assert transport_of({"url": "http://x/sse", "transport": "http"}) == "streamable_http"


def test_content_blocks_become_text_and_images_and_what_cannot_be_shown_is_named() -> None:
    blocks = [
        types.TextContent(type="text", text="Two files:"),
        types.ImageContent(type="image", data="aGk=", mime_type="image/png"),
        types.AudioContent(type="audio", data="A" * 4000, mime_type="audio/wav"),
        types.EmbeddedResource(
            type="resource", resource=types.TextResourceContents(uri="file:///a.txt", text="hello", mime_type="text/plain")
        ),
        types.EmbeddedResource(
            type="resource", resource=types.BlobResourceContents(uri="file:///b.png", blob="aG8=", mime_type="image/png")
        ),
        types.EmbeddedResource(
            type="resource", resource=types.BlobResourceContents(uri="file:///c.bin", blob="AAAA", mime_type=None)
        ),
        types.ResourceLink(type="resource_link", uri="file:///d.md", name="d.md", description="the rest"),
    ]
    assert text_of(blocks).splitlines() == [
        "Two files:",
        "(audio/wav of 3 kB, which cannot be shown)",
        "file:///a.txt:",
        "hello",
        "(file:///c.bin: a file of 3 bytes, which cannot be shown)",
        "d.md: file:///d.md (the rest)",
    ]
    assert images_of(blocks) == ["data:image/png;base64,aGk=", "data:image/png;base64,aG8="]
    assert text_of([], {"rows": [1]}) == '{"rows": [1]}' and text_of(blocks[:1], {"rows": [1]}) == "Two files:"
    text, image = "It is", "data:image/png;base64,aGk="
    there = blocks_of(text, [image])
    assert (text_of(there), images_of(there)) == (text, [image])


def test_a_schema_goes_to_mcp_and_back_whole() -> None:
    parameters = {
        "type": "object",
        "$defs": {"P": {"type": "object", "properties": {"x": {"type": "number"}}}},
        "properties": {
            "p": {"$ref": "#/$defs/P"},
            "any": True,
            "n": {"anyOf": [{"type": "integer"}, {"type": "null"}], "default": None},
            "k": {"type": "string", "enum": ["a", "b"], "default": "a"},
        },
        "required": ["p"],
        "additionalProperties": False,
    }
    tool = types.Tool(name="f", description="Do.", input_schema=parameters)
    schema = OpenAIFunctionToolSchema.from_mcp(tool)
    assert schema.to_dict()["function"] == {"name": "f", "description": "Do.", "parameters": parameters}
    back = schema.to_mcp()
    assert (back.name, back.description, back.input_schema) == ("f", "Do.", parameters)


@pytest.mark.skipif(importlib.util.find_spec("mcp_server_time") is None, reason="pip install mcp-server-time")
async def test_the_time_server_of_the_package_index_tells_the_time() -> None:
    servers = {"time": {"command": sys.executable, "args": ["-m", "mcp_server_time", "--local-timezone=Europe/Rome"]}}
    tools = tools_of(servers, {"timeout": 20})
    assert sorted(t.name for t in tools) == ["convert_time", "get_current_time"]
    async with ToolBox(tools).session("e") as session:
        await session.start(Task(id="t", prompt=()))
        given = {"source_timezone": "Asia/Tokyo", "time": "16:30", "target_timezone": "Asia/Kolkata"}
        asked = [
            ToolCall(id="a", name="convert_time", arguments=given),
            ToolCall(id="b", name="convert_time", arguments={**given, "source_timezone": "Nowhere"}),
            ToolCall(id="c", name="convert_time", arguments={"time": "16:30"}),
        ]
        good, bad, short = await session.call(asked)
    assert '"time_difference": "-3.5h"' in str(good.content) and good.error is None
    assert bad.error == "tool_error" and "Nowhere" in str(bad.content)
    assert short.error == "schema" and "is missing" in str(short.content)
