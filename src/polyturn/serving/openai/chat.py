"""The chat completions API: `/v1/chat/completions`.

    {"messages": […], "tools": […], "n": 2}  ->  ChatRequest  ->  {"choices": [{"message": {…}, "finish_reason": "stop"}], …}

A stream sends the finished completion in pieces, so the first token does not arrive earlier. Two fields are extensions:
`return_token_ids` adds `prompt_token_ids` and each choice's `token_ids`, and `reasoning_content` has the reasoning.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import orjson

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
    texts,
    whole,
)

READ = frozenset({
    "messages", "model", "tools", "tool_choice", "n", "stop", "max_tokens", "max_completion_tokens", "temperature", "top_p",
    "top_k", "seed", "logprobs", "top_logprobs", "stream", "stream_options", "return_token_ids", "continue_final_message",
})  # fmt: skip
HARMLESS = frozenset({
    "user", "metadata", "store", "service_tier", "parallel_tool_calls", "prompt_cache_key", "prompt_cache_retention",
    "safety_identifier", "reasoning_effort", "verbosity", "add_generation_prompt",
})  # fmt: skip
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "min_p": (0,),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "functions": ([],),
    "function_call": ("auto", "none"),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
}
PIECE = 24
"""Characters in one event of a stream."""
LEAST_LOGPROB = -9999.0
"""Sent in place of a logprob of minus infinity, which JSON cannot write."""


def parse(body: Mapping[str, Any], ignored: frozenset[str] = frozenset()) -> ChatRequest:
    """Parse a request.

    Raises:
        BadRequest: the request is malformed, or needs something that this endpoint does not support.
    """
    check_parameters(body, known=READ | HARMLESS, neutral=NEUTRAL, ignored=ignored)
    messages = normal_messages(body.get("messages"))
    if (whole(body, "top_logprobs", low=0, high=20) or 0) > 0 and "top_logprobs" not in ignored:
        raise BadRequest(
            f"top_logprobs is {body['top_logprobs']}, but only the logprob of the sampled token is available; use 0",
            code="unsupported_parameter",
            param="top_logprobs",
        )
    if not isinstance(options := body.get("stream_options") or {}, Mapping):
        raise BadRequest(f"stream_options is {options!r:.80}; use an object", param="stream_options")
    goes_on = bool(body.get("continue_final_message"))
    if goes_on and (messages[-1]["role"] != "assistant" or messages[-1].get("tool_calls") or len(messages) < 2):
        raise BadRequest("continue_final_message needs an assistant message without calls at the end", param="messages")
    return ChatRequest(
        messages=messages,
        tools=normal_tools(body.get("tools")),
        n=whole(body, "n", high=128) or 1,
        may_call=may_call(body.get("tool_choice"), ignored),
        goes_on=goes_on,
        wants_texts=bool(body.get("logprobs")),
        stops=texts(body, "stop"),
        max_tokens=whole(body, "max_completion_tokens", "max_tokens"),
        temperature=temperature(body),
        top_p=number(body, "top_p", low=0, high=1, above=True),
        top_k=whole(body, "top_k", low=-1),
        seed=whole(body, "seed", low=-(1 << 62), high=(1 << 63) - 1),
    )


def may_call(choice: Any, ignored: frozenset[str]) -> bool:
    """Return whether tool calls in the completion are parsed.

    Raises:
        BadRequest: a call is required, which would need guided decoding.
    """
    if choice in (None, "auto", "none"):
        return choice != "none"
    if "tool_choice" in ignored:
        return True
    raise BadRequest(
        f"tool_choice is {choice!r:.80}, but a call cannot be forced: the tokens would not be sampled from the policy. "
        "Use auto, or ignore the parameter (`ignore: [tool_choice]`)",
        code="unsupported_parameter",
        param="tool_choice",
    )


def reply(body: Mapping[str, Any], responses: Sequence[ChatResponse], *, model: str) -> dict[str, Any]:
    answer: dict[str, Any] = {
        "id": f"chatcmpl-{uuid.uuid4().hex}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model,
        "choices": [_choice(index, one, body) for index, one in enumerate(responses)],
        "usage": usage(responses),
    }
    if body.get("return_token_ids"):
        answer["prompt_token_ids"] = responses[0].prompt_ids.tolist()
    return answer


def events(body: Mapping[str, Any], responses: Sequence[ChatResponse], *, model: str) -> Iterator[bytes]:
    """Yield the answer to a request as server-sent events."""
    head = {"id": f"chatcmpl-{uuid.uuid4().hex}", "object": "chat.completion.chunk", "created": int(time.time())}

    def event(choices: list[dict[str, Any]], **rest: Any) -> bytes:
        return b"data: " + orjson.dumps({**head, "model": model, "choices": choices, **rest}) + b"\n\n"

    for index, one in enumerate(responses):

        def chunk(delta: dict[str, Any], finish: str | None = None, index: int = index, **rest: Any) -> bytes:
            return event([{"index": index, "delta": delta, "finish_reason": finish, "logprobs": None, **rest}])

        yield chunk({"role": "assistant", "content": ""})
        for piece in pieces(one.reasoning or ""):
            yield chunk({"reasoning_content": piece})
        for piece in pieces(one.content):
            yield chunk({"content": piece})
        for number_, call in enumerate(one.calls):
            call_delta = call_of(call)
            opened = {**call_delta, "index": number_, "function": {"name": call.name, "arguments": ""}}
            yield chunk({"tool_calls": [opened]})
            for piece in pieces(call_delta["function"]["arguments"]):
                yield chunk({"tool_calls": [{"index": number_, "function": {"arguments": piece}}]})
        last = _choice(index, one, body)
        yield chunk({}, one.finish, **{k: v for k, v in last.items() if k in ("logprobs", "token_ids")})
    if (body.get("stream_options") or {}).get("include_usage"):
        yield event([], usage=usage(responses))
    yield b"data: [DONE]\n\n"


def pieces(text: str) -> Iterator[str]:
    """Yield a text in pieces of `PIECE` characters."""
    for start in range(0, len(text), PIECE):
        yield text[start : start + PIECE]


def usage(responses: Sequence[ChatResponse]) -> dict[str, Any]:
    """Return the token counts of prompt and completions; the prompt counts once."""
    prompt, written = len(responses[0].prompt_ids), sum(len(s.token_ids) for s in responses)
    return {"prompt_tokens": prompt, "completion_tokens": written, "total_tokens": prompt + written}


def token_logprobs(one: ChatResponse) -> list[dict[str, Any]]:
    """Return the sampled tokens with their logprobs, as the chat API lists them; none if the engine has no logprobs."""
    if one.logprobs is None:
        return []
    return [
        {"token": text, "logprob": max(value, LEAST_LOGPROB), "bytes": list(text.encode()), "top_logprobs": []}
        for text, value in zip(one.texts, one.logprobs.tolist(), strict=True)
    ]


def error(refused: BadRequest) -> dict[str, Any]:
    """Return an error in the form that the openai client reads."""
    codes = {"context_full": "context_length_exceeded", "unauthorized": "invalid_api_key"}
    kind = "invalid_request_error" if refused.status < 500 else "server_error"
    body = {"message": refused.message, "type": kind, "param": refused.param, "code": codes.get(refused.code, refused.code)}
    return {"error": body}


def _choice(index: int, one: ChatResponse, body: Mapping[str, Any]) -> dict[str, Any]:
    message = {**one.message, "refusal": None}
    if one.reasoning is not None:
        message["reasoning_content"] = one.reasoning
    logprobs = {"content": token_logprobs(one), "refusal": None} if body.get("logprobs") else None
    choice: dict[str, Any] = {"index": index, "message": message, "finish_reason": one.finish, "logprobs": logprobs}
    if one.stopped_by is not None:
        choice["stop_reason"] = one.stopped_by
    if body.get("return_token_ids"):
        choice["token_ids"] = one.token_ids.tolist()
    return choice
