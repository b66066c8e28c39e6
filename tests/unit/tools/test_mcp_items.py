"""MCP servers in a tool file: refused settings, the schemas that the model sees, and the text of content blocks."""

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
from polyturn.tools.episode_tools import EpisodeTools
from polyturn.tools.mcp_client import list_tools, read_servers, transport_of
from polyturn.tools.mcp_content import blocks_of, images_of, text_of
from polyturn.tools.registry import initialize_tools_from_config
from polyturn.tools.schema import OpenAIFunctionToolSchema
from polyturn.tools.toolbox import Toolbox
from support.refusals import refuses

pytestmark = pytest.mark.timeout(300)  # processes start, and a busy machine takes long to import what they need

HERE = Path(__file__).parent
RAW = {"command": sys.executable, "args": ["-S", str(HERE / "mcp_raw_server.py")]}


def tools_of(servers: Any, config: Any = None, **mcp: Any) -> Any:
    item = {
        "class_name": "polyturn.tools.mcp.MCPBaseTool",
        "config": {"type": "mcp", **(config or {})},
        "mcp": {"servers": servers, **mcp},
    }
    return initialize_tools_from_config({"tools": [item]})


async def test_prefix_tells_tools_of_one_name_apart() -> None:
    two = {"left": RAW, "right": RAW}
    refuses(lambda: tools_of(two, tool_selected_list=["count"]), ConfigError, "'left_count'", "'right_count'")
    tools = tools_of(two, {"session": "episode"}, tool_selected_list=["count"], prefix=True)
    assert [t.name for t in tools] == ["left_count", "right_count"]
    async with EpisodeTools(Toolbox(tools), "e") as session:
        await session.start(Task(id="t", prompt=()))
        names = ["left_count", "right_count", "left_count"]
        found = await session.call([ToolCall(id=str(i), name=n, arguments={}) for i, n in enumerate(names)])
        assert sorted(str(r.content) for r in found) == ["1", "1", "2"]


@pytest.mark.parametrize(
    ("servers", "message"),
    [
        ({}, "there is no server"),
        ({"s": "python server.py"}, "'s'.* not a str"),
        ({"s": {"auth_token": "hunter2"}}, "neither a command nor a url"),
        ({"s": {"command": "x", "url": "http://y"}}, "both a command and a url"),
        ({"s": {"command": ""}}, "command: give a text"),
        ({"s": {"command": "x", "arg": []}}, "'arg'. Did you mean 'args'"),
        ({"s": {"command": "x", "args": "a b"}}, "args: it must be a list"),
        ({"s": {"url": "localhost:8000"}}, "http:// or https://"),
        ({"s": {"url": "http://y", "transport": "websocket"}}, "transport is 'websocket'"),
        ({"s": {"url": "http://y", "transport": "stdio"}}, "'stdio'.* url"),
        ({"s": {"command": "x", "type": "sse"}}, "'sse'.* command"),
        ({"s": {"url": "http://y", "token_env": "NO_SUCH_TOKEN"}}, "'NO_SUCH_TOKEN'"),
    ],
)
def test_server_that_cannot_work_is_a_config_error(servers: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        read_servers(servers)
    assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mcp": {"servers": {"lost": {"command": "no-such-command-anywhere"}}}}, "server 'lost'"),
        ({"mcp": {"servers": {"left": RAW}, "tool_selected_list": ["pif"]}}, "'pif'.* Did you mean 'pid'"),
        ({"mcp": {"mcp_servers_config_path": "nowhere.json"}}, "there is no file"),
        ({"mcp": None}, "mcp_servers_config_path"),
        ({"mcp": {"servers": {"left": RAW}, "mcp_servers_config_path": "servers.json"}}, "has both"),
        ({"mcp": {"servers": {"left": RAW}, "prefx": True}}, "'prefix'"),
        ({"mcp": {"servers": {"left": RAW}}, "config": {"type": "mcp", "sesion": "run"}}, "'session'"),
        ({"mcp": {"servers": {"left": RAW}}, "config": {"type": "mcp", "keep": -1}}, "keep is -1"),
        ({"mcp": {"servers": {"left": RAW}}, "class_name": "polyturn.tools.gsm8k.Gsm8kTool"}, "must inherit"),
    ],
)
def test_item_that_cannot_work_is_a_config_error(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    item = {"class_name": "polyturn.tools.mcp.MCPBaseTool", "config": {"type": "mcp"}, **changes}
    with pytest.raises(ConfigError, match=message):
        initialize_tools_from_config({"tools": [item]}, base=tmp_path)


def test_token_may_come_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "servers.json"
    path.write_text('{"mcpServers": {"web": {"url": "https://x/mcp", "auth_token": "${oc.env:THE_TOKEN}"}}}')
    monkeypatch.setenv("THE_TOKEN", "hunter2")
    assert read_servers(path)["web"]["auth_token"] == "hunter2"
    monkeypatch.delenv("THE_TOKEN")
    refuses(lambda: read_servers(path), ConfigError, "THE_TOKEN")


def test_secrets_of_a_failing_server_are_hidden() -> None:
    program = "import os, sys; sys.exit('bad key ' + os.environ['VENDOR_API_KEY'])"
    chatty = {"command": sys.executable, "args": ["-S", "-c", program], "env": {"VENDOR_API_KEY": "hunter2hunter2"}}
    refuses(lambda: list_tools("chatty", chatty), ConfigError, "bad key ***")


@pytest.mark.parametrize(
    ("settings", "transport"),
    [
        ({"command": "x"}, "stdio"),
        ({"url": "http://x/mcp"}, "streamable_http"),
        ({"url": "http://x/mcp", "auth_token": "t"}, "streamable_http"),
        ({"url": "http://x/sse"}, "sse"),
        ({"url": "http://x/mcp", "type": "sse"}, "sse"),
        ({"url": "http://x/sse", "transport": "http"}, "streamable_http"),
    ],
)
def test_transport_follows_from_the_settings(settings: dict[str, Any], transport: str) -> None:
    assert transport_of(settings) == transport


def test_content_blocks_become_text_and_images() -> None:
    def resource(**fields: Any) -> types.EmbeddedResource:
        kind = types.TextResourceContents if "text" in fields else types.BlobResourceContents
        return types.EmbeddedResource(type="resource", resource=kind(**fields))

    blocks = [
        types.TextContent(type="text", text="Two files:"),
        types.ImageContent(type="image", data="aGk=", mime_type="image/png"),
        types.AudioContent(type="audio", data="A" * 4000, mime_type="audio/wav"),
        resource(uri="file:///a.txt", text="hello", mime_type="text/plain"),
        resource(uri="file:///b.png", blob="aG8=", mime_type="image/png"),
        resource(uri="file:///c.bin", blob="AAAA", mime_type=None),
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
    assert text_of([], {"rows": [1]}) == '{"rows": [1]}'
    assert text_of(blocks[:1], {"rows": [1]}) == "Two files:"
    back = blocks_of("It is", ["data:image/png;base64,aGk="])
    assert (text_of(back), images_of(back)) == ("It is", ["data:image/png;base64,aGk="])


def test_schema_of_a_server_is_shown_as_declared() -> None:
    shown = {s["function"]["name"]: s["function"]["parameters"] for s in list_tools("s", {**RAW, "args": SDK_SERVER})}
    draw = shown["draw"]
    assert draw["$defs"]["Point"]["properties"]["next"]["anyOf"][0] == {"$ref": "#/$defs/Point"}
    assert draw["$defs"]["Unit"]["enum"] == ["m", "ft"]
    assert draw["properties"]["width"]["maximum"] == 9
    assert draw["properties"]["style"]["default"] == "solid"
    assert draw["required"] == ["points"]
    tool = types.Tool(name="f", description="Do.", input_schema={**draw, "additionalProperties": False})
    schema = OpenAIFunctionToolSchema.from_mcp(tool)
    assert schema.to_dict()["function"] == {"name": "f", "description": "Do.", "parameters": tool.input_schema}
    back = schema.to_mcp()
    assert (back.name, back.description, back.input_schema) == ("f", "Do.", tool.input_schema)


SDK_SERVER = [str(HERE / "mcp_sdk_server.py")]


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("mcp_server_time") is None, reason="pip install mcp-server-time")
async def test_published_time_server_tells_the_time() -> None:
    servers = {"time": {"command": sys.executable, "args": ["-m", "mcp_server_time", "--local-timezone=Europe/Rome"]}}
    tools = tools_of(servers, {"timeout": 50})
    assert sorted(t.name for t in tools) == ["convert_time", "get_current_time"]
    async with EpisodeTools(Toolbox(tools), "e") as session:
        await session.start(Task(id="t", prompt=()))
        given = {"source_timezone": "Asia/Tokyo", "time": "16:30", "target_timezone": "Asia/Kolkata"}
        asked = [
            ToolCall(id="a", name="convert_time", arguments=given),
            ToolCall(id="b", name="convert_time", arguments={**given, "source_timezone": "Nowhere"}),
            ToolCall(id="c", name="convert_time", arguments={"time": "16:30"}),
        ]
        good, bad, short = await session.call(asked)
    assert [good.error, bad.error, short.error] == [None, "tool_error", "schema"]
    assert '"time_difference": "-3.5h"' in str(good.content)
