"""Requests as command-line agents send them: fields that cannot matter are ignored, others are refused by name."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from polyturn.serving.openai import chat, messages, responses
from polyturn.serving.openai.chat_request import BadRequest
from polyturn.serving.openai.responses import ResponseCache

BASH = {"name": "Bash", "description": "Run it.", "input_schema": {"type": "object", "properties": {}}}
CLAUDE: dict[str, Any] = {
    "model": "m",
    "max_tokens": 64,
    "stream": True,
    "system": [{"type": "text", "text": "billing"}, {"type": "text", "text": "Be brief.", "cache_control": {"type": "x"}}],
    "thinking": {"type": "adaptive"},
    "output_config": {"effort": "high"},
    "metadata": {"user_id": "u"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "tools": [BASH],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "Fix it."}]},
        {"role": "system", "content": [{"type": "text", "text": "Agent types: none."}]},
        {"role": "user", "content": "Go."},
    ],
}
SHELL = {"type": "function", "name": "exec_command", "parameters": {"type": "object", "properties": {}}, "strict": False}
CODEX: dict[str, Any] = {
    "model": "m",
    "stream": True,
    "store": False,
    "instructions": "You are an agent.",
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "k",
    "client_metadata": {"session_id": "s"},
    "reasoning": {"summary": "auto"},
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "tools": [SHELL, {"type": "namespace", "name": "multi_agent_v1", "tools": [SHELL]}, {"type": "web_search"}],
    "input": [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Sandbox: none."}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Fix it."}]},
    ],
}


def names(request: Any) -> list[str]:
    return [tool["function"]["name"] for tool in request.tools]


def test_picture_of_an_earlier_response_is_kept():
    kept, uri = ResponseCache(), "data:image/png;base64,AAAA"
    picture = {"role": "user", "content": [{"type": "input_image", "image_url": uri}, {"type": "input_text", "text": "?"}]}
    first = responses.parse({"model": "m", "input": [picture]}, kept)
    kept.keep("resp_1", [*first.messages, {"role": "assistant", "content": "Red."}])
    second = responses.parse({"model": "m", "input": "Sure?", "previous_response_id": "resp_1"}, kept)
    assert second.messages[0] == first.messages[0] and second.messages[0]["content"][0] == {"type": "image", "image": uri}


def test_stream_options_in_another_form_are_refused_before_sampling():
    with pytest.raises(BadRequest, match="stream_options"):
        chat.parse({"model": "m", "messages": [{"role": "user", "content": "a"}], "stream": True, "stream_options": [1]})


def test_claude_code_is_served():
    request = messages.parse(CLAUDE)
    assert [(m["role"], m["content"]) for m in request.messages] == [
        ("system", "billing\nBe brief."),
        ("user", "Fix it."),
        ("system", "Agent types: none."),
        ("user", "Go."),
    ]
    assert names(request) == ["Bash"]


def test_user_message_without_blocks_is_refused():
    with pytest.raises(BadRequest) as refused:
        messages.parse({**CLAUDE, "messages": [{"role": "user", "content": []}, *CLAUDE["messages"]]})
    assert refused.value.param == "messages[0].content"


def test_codex_is_served_without_the_tools_of_a_server(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING):
        request = responses.parse(CODEX, ResponseCache())
    assert names(request) == ["exec_command"]
    assert [m["role"] for m in request.messages] == ["system", "system", "user"]


def test_web_search_of_the_messages_api_is_left_out():
    tools = [BASH, {"type": "web_search_20250305", "name": "web_search"}]
    assert names(messages.parse({**CLAUDE, "tools": tools})) == ["Bash"]


@pytest.mark.parametrize(
    "value",
    [
        {"edits": [{"type": "clear_thinking_20251015", "keep": {"type": "thinking_turns", "value": 1}}]},
        {"edits": [{"type": "clear_tool_uses_20250919"}]},
        {"edits": [], "more": 1},
        "all",
    ],
)
def test_edits_that_change_the_context_are_refused(value: Any):
    with pytest.raises(BadRequest) as refused:
        messages.parse({**CLAUDE, "context_management": value})
    assert refused.value.param == "context_management"


@pytest.mark.parametrize("kind", ["custom", "file_search", "code_interpreter", "mcp"])
def test_tool_that_an_agent_relies_on_is_refused(kind: str):
    with pytest.raises(BadRequest) as refused:
        responses.parse({**CODEX, "tools": [{"type": kind, "name": "x"}]}, ResponseCache())
    assert refused.value.param == "tools[0]"
