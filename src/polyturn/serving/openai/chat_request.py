"""An agent's request and its answer, independent of any API; each format translates to and from these.

    {"messages": […], "max_tokens": 64}   ->  ChatRequest   ->  [ChatResponse, …]   ->  {"choices": […]}
                                                            ->  BadRequest          ->  {"error": {…}} with a status

Messages stay dictionaries of the chat API, checked and normalised, because most of a request repeats earlier messages that
only have to be compared.
"""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from polyturn.core.arrays import Floats, Ids
from polyturn.core.errors import did_you_mean
from polyturn.core.generation import MIN_TEMPERATURE
from polyturn.core.messages import ToolCall

logger = logging.getLogger(__name__)

Finish = Literal["stop", "length", "tool_calls"]
ROLES = ("system", "developer", "user", "assistant", "tool")


class BadRequest(Exception):
    """A request that is answered with an error, which each format writes as its clients expect."""

    def __init__(self, message: str, *, status: int = 400, code: str = "invalid_request", param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.code = code
        self.param = param


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """One request."""

    messages: Sequence[Mapping[str, Any]]
    """The whole history, as `normal_messages` returns it."""
    tools: Sequence[Mapping[str, Any]] = ()
    """Schemas in OpenAI's function form."""
    n: int = 1
    may_call: bool = True
    """Whether tool calls in the completion are parsed; otherwise they stay text."""
    goes_on: bool = False
    """Whether the answer continues the last message, which is the assistant's."""
    wants_texts: bool = False
    """Whether the response has each token's text next to its logprob."""
    stops: tuple[str, ...] = ()
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChatResponse:
    """One completion, as the agent gets it."""

    content: str
    reasoning: str | None
    calls: tuple[ToolCall, ...]
    finish: Finish
    stopped_by: str | None
    """The stop string that ended the completion, if any."""
    prompt_ids: Ids
    """[P] prompt ids."""
    token_ids: Ids
    """[T] sampled ids, including the token that ends the turn."""
    logprobs: Floats | None
    texts: Sequence[str] = field(default=())
    """[T] the text of each sampled token if the request asked for logprobs, else empty."""

    @property
    def message(self) -> dict[str, Any]:
        """The completion as an assistant message of the chat API."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.calls:
            message["content"] = self.content or None
            message["tool_calls"] = [call_of(c) for c in self.calls]
        return message


def call_of(call: ToolCall) -> dict[str, Any]:
    """Return a call in the form of the chat API, with its arguments as JSON text."""
    arguments = json.dumps(dict(call.arguments), ensure_ascii=False)
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


# Messages.


def normal_messages(value: Any) -> list[dict[str, Any]]:
    """Return checked messages with roles that templates accept, text as a string and media as data URIs.

    Raises:
        BadRequest: a message does not follow the chat API, or a medium is not a data URI.
    """
    if not isinstance(value, list) or not value:
        raise BadRequest(f"messages is {_short(value)}; give a list of at least one message", param="messages")
    return [_normal_message(message, f"messages[{index}]") for index, message in enumerate(value)]


def _normal_message(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise BadRequest(f"{where} is {_short(value)}; a message must be an object with a role", param=where)
    role, content = value.get("role"), value.get("content")
    if role not in ROLES:
        raise BadRequest(f"{where}.role is {_short(role)}; use one of {', '.join(ROLES)}", param=f"{where}.role")
    message: dict[str, Any] = {"role": "system" if role == "developer" else role}
    message["content"] = normal_content(content, where=f"{where}.content")
    if role == "assistant":
        reasoning = value.get("reasoning_content") or value.get("reasoning")
        if isinstance(reasoning, str):
            message["reasoning_content"] = reasoning
        calls = value.get("tool_calls")
        if calls:
            message["tool_calls"] = [
                _normal_call(c, f"{where}.tool_calls[{i}]") for i, c in enumerate(listed(calls, f"{where}.tool_calls"))
            ]
    elif role == "tool":
        if not isinstance(value.get("tool_call_id"), str):
            raise BadRequest(f"{where} answers a tool call but has no tool_call_id", param=f"{where}.tool_call_id")
        message["tool_call_id"] = value["tool_call_id"]
    if isinstance(value.get("name"), str):
        message["name"] = value["name"]
    return message


def normal_content(value: Any, *, where: str) -> str | list[dict[str, Any]]:
    """Return a message's content: a string, or parts if it has media."""
    if isinstance(value, str):
        return value
    if value is None:
        return ""
    parts = [_normal_part(p, f"{where}[{i}]") for i, p in enumerate(listed(value, where))]
    if all(p["type"] == "text" for p in parts):
        return "\n".join(p["text"] for p in parts)
    return parts


def _normal_part(part: Any, where: str) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind in ("text", "input_text", "output_text", "refusal"):
        text = part.get("refusal" if kind == "refusal" else "text")
        if not isinstance(text, str):
            raise BadRequest(f"{where}.text is {_short(text)}; use a string", param=where)
        return {"type": "text", "text": text}
    if kind in ("image", "video", "audio"):  # a part of a stored history
        return {"type": kind, kind: _data_uri(part.get(kind), where)}
    if kind in ("image_url", "input_image", "video_url"):
        value = part.get("video_url" if kind == "video_url" else "image_url")
        url = value.get("url") if isinstance(value, dict) else value
        medium = "video" if kind == "video_url" else "image"
        return {"type": medium, medium: _data_uri(url, where)}
    if kind == "input_audio" and isinstance(part.get("input_audio"), dict):
        sound = part["input_audio"]
        return {"type": "audio", "audio": _data_uri(f"data:audio/{sound.get('format')};base64,{sound.get('data')}", where)}
    raise BadRequest(
        f"{where} is {_short(part)}; a part has the type text, image_url, video_url or input_audio", param=where
    )


def _data_uri(url: Any, where: str) -> str:
    # A path or an address would let a request read this machine's files, or make this machine send requests.
    if not isinstance(url, str) or not url.startswith("data:") or ";base64," not in url[:200]:
        raise BadRequest(
            f"{where} is {_short(url)}; give media as data URIs (data:image/png;base64,…): files and addresses are not read",
            param=where,
        )
    return url


def _normal_call(value: Any, where: str) -> dict[str, Any]:
    function = value.get("function") if isinstance(value, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
        raise BadRequest(f"{where} is {_short(value)}; a call needs a function with a name", param=where)
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments or {})
    identity = value.get("id") if isinstance(value.get("id"), str) else ""
    return {"id": identity, "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def normal_tools(value: Any) -> list[dict[str, Any]]:
    """Return tool schemas in OpenAI's function form, from that form or from the flat form of the responses API.

    Raises:
        BadRequest: a tool is not a function, or two tools have the same name.
    """
    if value is None:
        return []
    tools: list[dict[str, Any]] = []
    for index, tool in enumerate(listed(value, "tools")):
        where = f"tools[{index}]"
        kind = tool.get("type", "function") if isinstance(tool, dict) else None
        if is_server_tool(tool):
            _log_left_out(str(kind))
            continue
        if kind != "function":
            raise BadRequest(f"{where} is {_short(tool)}; only tools of the type function can be called here", param=where)
        function = tool.get("function", tool)
        if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
            raise BadRequest(f"{where} is {_short(tool)}; a function needs a name", param=where)
        schema: dict[str, Any] = {"name": function["name"]}
        if function.get("description"):
            schema["description"] = function["description"]
        schema["parameters"] = function.get("parameters") or {"type": "object", "properties": {}}
        tools.append({"type": "function", "function": schema})
    names = [str(t["function"]["name"]) for t in tools]
    if len(set(names)) < len(names):
        raise BadRequest(f"two tools have the same name: {sorted(names)}", param="tools")
    return tools


def is_server_tool(tool: Any) -> bool:
    """Return whether a vendor's server would run or group this tool; agents work without such tools."""
    kind = tool.get("type") if isinstance(tool, dict) else None
    return isinstance(kind, str) and (kind == "namespace" or kind.startswith("web_search"))


@functools.lru_cache(maxsize=16)
def _log_left_out(kind: str) -> None:
    """Log once per kind that tools are left out."""
    logger.warning("tools of the type %r are run by a vendor's server and are left out of the agents' prompts", kind)


def key_of(message: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the key that identifies a message. It excludes reasoning, because most agents send a turn back without it."""
    content, calls = message.get("content") or "", message.get("tool_calls")
    text = content if isinstance(content, str) else json.dumps(content, sort_keys=True)
    if calls:
        calls_key = tuple((c["id"], c["function"]["name"], _canonical(c["function"]["arguments"])) for c in calls)
        return (message["role"], text, calls_key)
    return (message["role"], text, message.get("tool_call_id"), message.get("name"))


@functools.lru_cache(maxsize=4096)
def _canonical(arguments: str) -> str:
    try:
        return json.dumps(json.loads(arguments), sort_keys=True)
    except (ValueError, RecursionError):
        return arguments


# Numbers.


def number(body: Mapping[str, Any], name: str, *, low: float, high: float, above: bool = False) -> float | None:
    """Return a number of a request, or None if it is missing.

    Raises:
        BadRequest: the value is not a number, or outside the range.
    """
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high or (above and value == low):
        raise BadRequest(f"{name} is {_short(value)}; use a number from {low:g} to {high:g}", param=name)
    return float(value)


def temperature(body: Mapping[str, Any]) -> float | None:
    """Return the temperature of a request, or None if it is missing.

    Raises:
        BadRequest: the value is out of range, or too close to 0 for an engine.
    """
    value = number(body, "temperature", low=0, high=100)
    if value and value < MIN_TEMPERATURE:
        raise BadRequest(f"temperature is {value}; use 0 for greedy decoding", param="temperature")
    return value


def whole(body: Mapping[str, Any], *names: str, low: int = 1, high: int = 1 << 31) -> int | None:
    """Return the first integer of a request among `names`, or None if all are missing.

    Raises:
        BadRequest: the value is not an integer, or outside the range.
    """
    for name in names:
        value = body.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise BadRequest(f"{name} is {_short(value)}; use a whole number from {low} to {high}", param=name)
        return value
    return None


def texts(body: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """Return a parameter that is one text or a list of texts.

    Raises:
        BadRequest: the value has another type, too many texts, or an empty one.
    """
    value = body.get(name)
    values = () if value is None else (value,) if isinstance(value, str) else value
    if not isinstance(values, list | tuple) or not all(isinstance(t, str) and t for t in values) or len(values) > 16:
        raise BadRequest(
            f"{name} is {_short(value)}; use a text or a list of at most 16 texts, none of them empty", param=name
        )
    return tuple(values)


def check_parameters(
    body: Mapping[str, Any], *, known: frozenset[str], neutral: Mapping[str, tuple[Any, ...]], ignored: frozenset[str]
) -> None:
    """Refuse unknown parameters, and unsupported ones unless their value has no effect.

    Args:
        body: The request.
        known: Parameters that are read, or that have no effect here.
        neutral: Unsupported parameters -> their values without effect.
        ignored: Parameters that the configuration ignores.

    Raises:
        BadRequest: names the first such parameter.
    """
    for name, value in body.items():
        if name in known or name in ignored or value is None:
            continue
        if name not in neutral:
            hint = did_you_mean(name, [*known, *neutral])
            raise BadRequest(f"there is no parameter {name!r} here.{hint}", code="unknown_parameter", param=name)
        if value not in neutral[name]:
            raise BadRequest(
                f"{name} is {_short(value)}, which is not supported here; leave it out, or ignore it (`ignore`)",
                code="unsupported_parameter",
                param=name,
            )


def listed(value: Any, where: str) -> list[Any]:
    """Return a value that must be a list.

    Raises:
        BadRequest: the value is not a list.
    """
    if not isinstance(value, list):
        raise BadRequest(f"{where} is {_short(value)}; use a list", param=where)
    return value


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:97]}…"
