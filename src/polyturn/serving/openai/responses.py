"""The responses API: `/v1/responses`.

    {"instructions": "…", "input": [{"role": "user", …}, {"type": "function_call_output", …}]}
      ->  ChatRequest  ->  {"output": [{"type": "message", …}, {"type": "function_call", …}]}

Items become chat messages: the reasoning, text and call items of one turn become one assistant message.
`previous_response_id` is looked up among the episode's earlier responses.
"""

from __future__ import annotations

import time
import uuid
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import orjson

from polyturn.serving.openai.chat import may_call, pieces, token_logprobs, usage
from polyturn.serving.openai.chat_request import (
    BadRequest,
    ChatRequest,
    ChatResponse,
    call_of,
    check_parameters,
    normal_messages,
    normal_tools,
    number,
    temperature,
    whole,
)

READ = frozenset({
    "input", "instructions", "model", "tools", "tool_choice", "max_output_tokens", "temperature", "top_p", "top_logprobs",
    "stream", "previous_response_id", "include",
})  # fmt: skip
HARMLESS = frozenset({
    "user", "metadata", "store", "service_tier", "parallel_tool_calls", "prompt_cache_key", "prompt_cache_retention",
    "safety_identifier", "reasoning", "truncation", "stream_options", "max_tool_calls", "seed", "client_metadata",
})  # fmt: skip
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "text": ({"format": {"type": "text"}}, {}, {"verbosity": "medium"}),
    "background": (False,),
    "conversation": (),
    "prompt": (),
    "context_management": ([],),
}
MAX_KEPT = 256
TEXTS = "message.output_text.logprobs"
"""The entry of `include` that requests logprobs."""


class ResponseCache:
    """The latest responses of an episode, for requests that continue one by id."""

    def __init__(self) -> None:
        self._messages: OrderedDict[str, list[Mapping[str, Any]]] = OrderedDict()

    def keep(self, id: str, messages: list[Mapping[str, Any]]) -> None:
        """Store the history that ends with a response."""
        self._messages[id] = messages
        if len(self._messages) > MAX_KEPT:
            self._messages.popitem(last=False)

    def before(self, id: Any) -> list[Mapping[str, Any]]:
        """Return the history that ends with a response.

        Raises:
            BadRequest: the id is unknown, or its response is no longer stored.
        """
        if id is None:
            return []
        if id not in self._messages:
            raise BadRequest(
                f"there is no response {id!r:.80} in this episode; send the whole input instead",
                status=404,
                code="previous_response_not_found",
                param="previous_response_id",
            )
        return self._messages[id]


def parse(body: Mapping[str, Any], kept: ResponseCache, ignored: frozenset[str] = frozenset()) -> ChatRequest:
    """Parse a request.

    Raises:
        BadRequest: the request is malformed, or needs something that this endpoint does not support.
    """
    check_parameters(body, known=READ | HARMLESS, neutral=NEUTRAL, ignored=ignored)
    before = kept.before(body.get("previous_response_id"))
    value = body.get("input")
    items = [{"role": "user", "content": value}] if isinstance(value, str) else value
    if not isinstance(items, list) or not (items or before):
        raise BadRequest(f"input is {value!r:.80}; give a text or a list of items", param="input")
    messages = normal_messages([*before, *messages_of(items)])
    if body.get("instructions"):
        messages.insert(0, {"role": "system", "content": str(body["instructions"])})
    return ChatRequest(
        messages=messages,
        tools=normal_tools(body.get("tools")),
        may_call=may_call(body.get("tool_choice"), ignored),
        wants_texts=TEXTS in (body.get("include") or ()),
        max_tokens=whole(body, "max_output_tokens"),
        temperature=temperature(body),
        top_p=number(body, "top_p", low=0, high=1, above=True),
        seed=whole(body, "seed", low=-(1 << 62), high=(1 << 63) - 1),
    )


def messages_of(items: Sequence[Any]) -> list[dict[str, Any]]:
    """Return items as chat messages; the items of one turn become one message.

    Raises:
        BadRequest: an item has an unknown type.
    """
    messages: list[dict[str, Any]] = []
    turn: dict[str, Any] | None = None
    for index, item in enumerate(items):
        kind = item.get("type", "message") if isinstance(item, dict) else None
        is_turn = kind in ("reasoning", "function_call") or (kind == "message" and item.get("role") == "assistant")
        if is_turn:
            # A second text, or text after calls, begins another turn.
            is_next = kind != "function_call" and turn is not None and (turn.get("tool_calls") or turn["content"])
            if turn is None or is_next:
                turn = {"role": "assistant", "content": ""}
                messages.append(turn)
            if kind == "message":
                turn["content"] = item.get("content") or ""
            elif kind == "function_call":
                function = {"name": item.get("name"), "arguments": item.get("arguments") or "{}"}
                call = {"id": item.get("call_id") or item.get("id"), "type": "function", "function": function}
                turn.setdefault("tool_calls", []).append(call)
            else:
                content = item.get("content") or item.get("summary") or []
                turn["reasoning_content"] = "\n".join(str(p.get("text", "")) for p in content)
            continue
        turn = None
        if kind == "message":
            messages.append({"role": item.get("role"), "content": item.get("content")})
        elif kind == "function_call_output":
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": _output(item.get("output"))})
        else:
            raise BadRequest(
                f"input[{index}] has the type {kind!r}; use message, function_call, function_call_output or reasoning",
                param=f"input[{index}]",
            )
    return messages


def _output(output: Any) -> Any:
    return output if isinstance(output, str | list) else orjson.dumps(output).decode()


def reply(
    body: Mapping[str, Any], responses: Sequence[ChatResponse], *, model: str, status: str | None = None
) -> dict[str, Any]:
    one, counted = responses[0], usage(responses)
    is_cut = one.finish == "length"
    return {
        "id": f"resp_{uuid.uuid4().hex}",
        "object": "response",
        "created_at": int(time.time()),
        "status": status or ("incomplete" if is_cut else "completed"),
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "instructions": body.get("instructions"),
        "max_output_tokens": body.get("max_output_tokens"),
        "metadata": body.get("metadata") or {},
        "model": model,
        "output": _items(one, wants_logprobs=TEXTS in (body.get("include") or ())),
        "parallel_tool_calls": body.get("parallel_tool_calls", True),
        "previous_response_id": body.get("previous_response_id"),
        "temperature": body.get("temperature"),
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": body.get("tools") or [],
        "top_p": body.get("top_p"),
        "text": {"format": {"type": "text"}},
        "usage": {
            "input_tokens": counted["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": counted["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": counted["total_tokens"],
        },
    }


def _items(one: ChatResponse, *, wants_logprobs: bool) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    if one.reasoning is not None:
        parts = [{"type": "reasoning_text", "text": one.reasoning}]
        items.append({"type": "reasoning", "id": f"rs_{uuid.uuid4().hex}", "summary": [], "content": parts})
    if one.content or not one.calls:
        logprobs = token_logprobs(one) if wants_logprobs else []
        part = {"type": "output_text", "text": one.content, "annotations": [], "logprobs": logprobs}
        status = "incomplete" if one.finish == "length" else "completed"
        message = {"type": "message", "id": f"msg_{uuid.uuid4().hex}", "status": status, "role": "assistant"}
        items.append({**message, "content": [part]})
    for call in one.calls:
        function = call_of(call)["function"]
        head = {"type": "function_call", "id": f"fc_{uuid.uuid4().hex}", "call_id": call.id, "status": "completed"}
        items.append({**head, **function})
    return items


def events(answer: Mapping[str, Any]) -> Iterator[bytes]:
    """Yield a whole answer as server-sent events."""
    count = 0

    def event(kind: str, **rest: Any) -> bytes:
        nonlocal count
        data = orjson.dumps({"type": kind, "sequence_number": count, **rest})
        count += 1
        return b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n"

    started = {**answer, "status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
    yield event("response.created", response=started)
    yield event("response.in_progress", response=started)
    for index, item in enumerate(answer["output"]):
        at = {"item_id": item["id"], "output_index": index}
        emptied: dict[str, Any] = {**item}
        emptied["arguments" if item["type"] == "function_call" else "content"] = "" if "arguments" in item else []
        if "status" in item:
            emptied["status"] = "in_progress"
        yield event("response.output_item.added", output_index=index, item=emptied)
        if item["type"] == "function_call":
            for piece in pieces(item["arguments"]):
                yield event("response.function_call_arguments.delta", delta=piece, **at)
            done = {"arguments": item["arguments"], "name": item["name"]}
            yield event("response.function_call_arguments.done", **done, **at)
        for number_, part in enumerate(item.get("content") or ()):
            here = {**at, "content_index": number_}
            is_text = part["type"] == "output_text"
            name = "output_text" if is_text else "reasoning_text"
            more: dict[str, Any] = {"logprobs": []} if is_text else {}
            yield event("response.content_part.added", part={**part, "text": ""}, **here)
            for piece in pieces(part["text"]):
                yield event(f"response.{name}.delta", delta=piece, **more, **here)
            yield event(f"response.{name}.done", text=part["text"], **more, **here)
            yield event("response.content_part.done", part=part, **here)
        yield event("response.output_item.done", output_index=index, item=item)
    yield event("response.incomplete" if answer["status"] == "incomplete" else "response.completed", response=answer)
