"""Anthropic's messages API: `/v1/messages`.

    {"system": "…", "messages": [{"role": "user", "content": [{"type": "tool_result", …}]}], "max_tokens": 64}
      ->  ChatRequest  ->  {"content": [{"type": "text", …}, {"type": "tool_use", …}], "stop_reason": "tool_use"}

Blocks become chat messages: a tool result is a separate message, before the text next to it. If the last message is the
assistant's, the answer continues it, as in Anthropic's API.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import orjson

from polyturn.serving.openai.chat import may_call, pieces
from polyturn.serving.openai.chat_request import (
    BadRequest,
    ChatRequest,
    ChatResponse,
    check_parameters,
    is_server_tool,
    listed,
    normal_messages,
    normal_tools,
    number,
    temperature,
    texts,
    whole,
)

READ = frozenset({
    "messages", "model", "system", "tools", "tool_choice", "max_tokens", "stop_sequences", "temperature", "top_p", "top_k",
    "stream", "thinking",
})  # fmt: skip
HARMLESS = frozenset({"metadata", "service_tier", "cache_control", "output_config", "betas", "speed", "inference_geo"})
NEUTRAL: Mapping[str, tuple[Any, ...]] = {"container": (), "mcp_servers": ([],), "context_management": ()}
STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def parse(body: Mapping[str, Any], ignored: frozenset[str] = frozenset(), *, needs_max_tokens: bool = True) -> ChatRequest:
    """Parse a request.

    Raises:
        BadRequest: the request is malformed, or needs something that this endpoint does not support.
    """
    if _keeps_all(body.get("context_management")):
        ignored |= {"context_management"}
    check_parameters(body, known=READ | HARMLESS, neutral=NEUTRAL, ignored=ignored)
    value = body.get("messages")
    if not isinstance(value, list) or not value:
        raise BadRequest(f"messages is {value!r:.80}; give a list of at least one message", param="messages")
    messages: list[dict[str, Any]] = []
    if body.get("system"):
        system = body["system"]
        messages.append({"role": "system", "content": system if isinstance(system, str) else _blocks(system, "system")})
    for index, message in enumerate(value):
        messages += _messages_of(message, f"messages[{index}]")
    messages = normal_messages(messages)
    if needs_max_tokens and body.get("max_tokens") is None:
        raise BadRequest("max_tokens is missing; set the largest number of tokens of the answer", param="max_tokens")
    choice = body.get("tool_choice")
    kind = choice.get("type") if isinstance(choice, dict) else choice
    last = messages[-1]
    return ChatRequest(
        messages=messages,
        tools=normal_tools([_tool(t, f"tools[{i}]") for i, t in enumerate(listed(body.get("tools") or [], "tools"))]),
        may_call=may_call(kind if kind in (None, "auto", "none") else choice, ignored),
        goes_on=last["role"] == "assistant" and not last.get("tool_calls") and len(messages) > 1,
        stops=texts(body, "stop_sequences"),
        max_tokens=whole(body, "max_tokens"),
        temperature=temperature(body),
        top_p=number(body, "top_p", low=0, high=1, above=True),
        top_k=whole(body, "top_k", low=-1),
    )


def _keeps_all(value: Any) -> bool:
    """Return whether a `context_management` value has no effect: it clears only thinking, and keeps all thinking."""
    edits = value.get("edits") if isinstance(value, dict) and value.keys() <= {"edits"} else None
    return isinstance(edits, list) and all(
        isinstance(e, dict) and str(e.get("type")).startswith("clear_thinking_") and e.get("keep") == "all" for e in edits
    )


def _tool(tool: Any, where: str) -> dict[str, Any]:
    if is_server_tool(tool):
        return tool
    if not isinstance(tool, dict) or tool.get("type", "custom") != "custom":
        raise BadRequest(f"{where} is {tool!r:.80}; only tools with an input_schema can be called here", param=where)
    function = {"name": tool.get("name"), "description": tool.get("description"), "parameters": tool.get("input_schema")}
    return {"type": "function", "function": function}


def _blocks(value: Any, where: str) -> list[dict[str, Any]]:
    """Return text and image blocks as parts of the chat API."""
    if not isinstance(value, list) or not all(isinstance(b, dict) for b in value):
        raise BadRequest(f"{where} is {value!r:.80}; use a text or a list of blocks", param=where)
    return [_part(block, where) for block in value]


def _part(block: Mapping[str, Any], where: str) -> dict[str, Any]:
    if block.get("type") != "image":
        return {"type": block.get("type"), "text": block.get("text")}
    source = block.get("source")
    if not isinstance(source, dict) or source.get("type") != "base64":
        raise BadRequest(
            f"{where}: an image needs a source of the type base64; files and addresses are not read", param=where
        )
    return {"type": "image_url", "image_url": {"url": f"data:{source.get('media_type')};base64,{source.get('data')}"}}


def _messages_of(message: Any, where: str) -> list[dict[str, Any]]:
    role = message.get("role") if isinstance(message, dict) else None
    if role not in ("user", "assistant", "system"):
        raise BadRequest(f"{where}.role is {role!r}; use user, assistant or system", param=f"{where}.role")
    content = message.get("content")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list) or not all(isinstance(b, dict) for b in content):
        raise BadRequest(f"{where}.content is {content!r:.80}; use a text or a list of blocks", param=f"{where}.content")
    if role == "assistant":
        return [_turn(content, where)]
    if role == "system":
        return [{"role": role, "content": _blocks(content, where)}]
    if not content:
        raise BadRequest(f"{where}.content is empty; a message needs at least one block", param=f"{where}.content")
    messages: list[dict[str, Any]] = []
    parts = []
    for block in content:
        if block.get("type") == "tool_result":
            block_content = block.get("content") or ""
            block_content = block_content if isinstance(block_content, str) else _blocks(block_content, where)
            messages.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": block_content})
        else:
            parts.append(_part(block, where))
    if parts:
        messages.append({"role": "user", "content": parts})
    return messages


def _turn(blocks: Sequence[Mapping[str, Any]], where: str) -> dict[str, Any]:
    turn: dict[str, Any] = {"role": "assistant"}
    parts, calls = [], []
    for block in blocks:
        kind = block.get("type")
        if kind == "tool_use":
            function = {"name": block.get("name"), "arguments": json.dumps(block.get("input") or {}, ensure_ascii=False)}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind == "thinking":
            turn["reasoning_content"] = block.get("thinking")
        elif kind != "redacted_thinking":
            parts.append(_part(block, where))
    turn["content"] = parts
    if calls:
        turn["tool_calls"] = calls
    return turn


def reply(body: Mapping[str, Any], responses: Sequence[ChatResponse], *, model: str) -> dict[str, Any]:
    (one,) = responses
    content: list[dict[str, Any]] = []
    if one.reasoning is not None:
        content.append({"type": "thinking", "thinking": one.reasoning, "signature": ""})
    if one.content:
        content.append({"type": "text", "text": one.content})
    for call in one.calls:
        content.append({"type": "tool_use", "id": call.id, "name": call.name, "input": dict(call.arguments)})
    is_stopped = one.stopped_by is not None and one.finish == "stop"
    return {
        "id": f"msg_{uuid.uuid4().hex}",
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": content,
        "stop_reason": "stop_sequence" if is_stopped else STOP_REASONS[one.finish],
        "stop_sequence": one.stopped_by,
        "usage": {"input_tokens": len(one.prompt_ids), "output_tokens": len(one.token_ids)},
    }


def events(answer: Mapping[str, Any]) -> Iterator[bytes]:
    """Yield a whole answer as server-sent events."""

    def event(kind: str, **rest: Any) -> bytes:
        return b"event: " + kind.encode() + b"\ndata: " + orjson.dumps({"type": kind, **rest}) + b"\n\n"

    usage = answer["usage"]
    started = {**answer, "content": [], "stop_reason": None, "stop_sequence": None}
    yield event("message_start", message={**started, "usage": {**usage, "output_tokens": 0}})
    for index, block in enumerate(answer["content"]):
        field = {"text": "text", "thinking": "thinking", "tool_use": "input"}[block["type"]]
        whole_text = json.dumps(block["input"], ensure_ascii=False) if field == "input" else block[field]
        yield event("content_block_start", index=index, content_block={**block, field: {} if field == "input" else ""})
        for piece in pieces(whole_text):
            delta = {"type": "input_json_delta", "partial_json": piece} if field == "input" else None
            yield event("content_block_delta", index=index, delta=delta or {"type": f"{field}_delta", field: piece})
        yield event("content_block_stop", index=index)
    delta = {"stop_reason": answer["stop_reason"], "stop_sequence": answer["stop_sequence"]}
    yield event("message_delta", delta=delta, usage={"output_tokens": usage["output_tokens"]})
    yield event("message_stop")


def error(refused: BadRequest) -> dict[str, Any]:
    """Return an error in the form that the anthropic client reads."""
    kinds = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large", 503: "overloaded_error"}
    kind = kinds.get(refused.status, "invalid_request_error" if refused.status < 500 else "api_error")
    message = refused.message
    if refused.code == "context_full":
        message = f"prompt is too long: {message}"  # agents of this API recognise these words and shorten the history
    return {"type": "error", "error": {"type": kind, "message": message}}
