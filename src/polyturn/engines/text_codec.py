"""A codec for models behind text-only APIs: every byte is an id, and two control ids enclose every turn.

A model behind a chat API exposes neither its tokenizer nor its tokens, but the loop works on ids. So this codec encodes text
as ids from which the conversation can be read back exactly, whatever the text contains:

    <|im_start|> tools\\n{"type": "function", …} <|im_end|>    <|im_start|> user\\nHi <|im_end|>    <|im_start|> assistant\\n

These ids are not the model's, so they cannot be trained on. The engine of `chat_completions.py` returns them, and its
episodes use this codec.
"""

from __future__ import annotations

import functools
import json
import re
from typing import Any

import numpy as np

from polyturn.core.arrays import Ids
from polyturn.core.errors import EngineError
from polyturn.tokens.codec import Codec
from polyturn.tokens.train import TAG_TOKENS, TURN_TOKENS, train_tokenizer

TEMPLATE = """\
{%- if tools -%}
    {{- '<|im_start|>tools\\n' -}}{%- for tool in tools -%}{{- tool | tojson + '\\n' -}}{%- endfor -%}{{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
    {{- '<|im_start|>' + message.role + '\\n' -}}
    {%- if message.reasoning_content -%}
        {{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' -}}
    {%- endif -%}
    {{- message.content -}}
    {%- for call in message.tool_calls or [] -%}
        {%- if message.content or not loop.first -%}{{- '\\n' -}}{%- endif -%}
        {{- '<tool_call>\\n' + {'name': call.function.name, 'arguments': call.function.arguments} | tojson -}}
        {{- '\\n</tool_call>' -}}
    {%- endfor -%}
    {{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""
_OPEN, _CLOSE = "<tool_call>\n", "\n</tool_call>"
_THOUGHT = re.compile(r"\A<think>.*?</think>\s*", re.DOTALL)


@functools.cache
def text_codec() -> Codec:
    """Return the codec, made once per process."""
    size = 256 + len(TURN_TOKENS) + len(TAG_TOKENS)
    return Codec(train_tokenizer([], vocab_size=size, chat_template=TEMPLATE))


def read_chat(ids: Ids) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the messages and tools of a prompt of `text_codec`, in the format of the chat API.

    Calls get new ids, which the following tool messages use in order. A call without an answer, or with arguments that are
    not JSON, becomes text. Reasoning is left out.

    Raises:
        EngineError: the prompt continues an assistant's message, which a chat API does not support.
    """
    codec = text_codec()
    start, end = (int(codec.encode(text)[0]) for text in ("<|im_start|>", "<|im_end|>"))
    turns: list[tuple[str, str]] = []
    is_open = False
    for at in np.flatnonzero(ids == start):
        ends = np.flatnonzero(ids[at:] == end)
        body = ids[at + 1 : at + ends[0]] if len(ends) else ids[at + 1 :]
        is_open = not len(ends)
        role, _, text = codec.decode(body).partition("\n")
        turns.append((role, text))
    if is_open:
        if turns[-1][1]:
            raise EngineError(
                "the scheduler continues an unfinished message of the model, which a chat endpoint does not support; "
                "evaluate a checkpoint, or a server that accepts tokens (engine.kind: vllm or sglang)"
            )
        turns.pop()
    tools: list[dict[str, Any]] = []
    messages: list[dict[str, Any]] = []
    open_calls: list[str] = []
    for number, (role, text) in enumerate(turns):
        if role == "tools":
            tools = [json.loads(line) for line in text.split("\n") if line]
        elif role == "assistant":
            answered = 0
            while number + 1 + answered < len(turns) and turns[number + 1 + answered][0] == "tool":
                answered += 1
            message = _assistant(text, answered=answered, number=sum(m["role"] == "assistant" for m in messages))
            open_calls = [call["id"] for call in message.get("tool_calls", ())]
            messages.append(message)
        elif role == "tool" and open_calls:
            messages.append({"role": "tool", "tool_call_id": open_calls.pop(0), "content": text})
        else:
            messages.append({"role": "user" if role == "tool" else role, "content": text})
    return messages, tools


def write_turn(message: dict[str, Any], *, is_complete: bool) -> Ids:
    """Return the ids of an assistant's message in the format of the chat API: reasoning, text, calls."""
    codec = text_codec()
    reasoning = message.get("reasoning_content") or message.get("reasoning") or ""
    text = message.get("content") or ""
    if isinstance(text, list):
        text = "".join(part.get("text", "") for part in text)
    parts: list[Ids] = []
    if isinstance(reasoning, str) and reasoning:
        parts += [codec.encode("<think>\n"), codec.encode_plain(reasoning), codec.encode("\n</think>\n\n")]
    parts.append(codec.encode_plain(text))
    for number, call in enumerate(message.get("tool_calls") or ()):
        function = call.get("function") or {}
        arguments = function.get("arguments") or "{}"
        arguments = arguments if isinstance(arguments, str) else json.dumps(arguments)
        before = "\n" if text or number else ""
        parts += [
            codec.encode(f"{before}<tool_call>\n"),
            codec.encode_plain(f'{{"name": {json.dumps(function.get("name", ""))}, "arguments": {arguments}}}'),
            codec.encode("\n</tool_call>"),
        ]
    if is_complete:
        parts.append(codec.encode("<|im_end|>"))
    return np.concatenate(parts).astype(np.int32)


def _assistant(text: str, *, answered: int, number: int) -> dict[str, Any]:
    text = _THOUGHT.sub("", text)
    calls: list[dict[str, Any]] = []
    without_calls, bodies = _without_calls(text)
    for body in bodies:
        try:
            call = json.loads(body)
            function = {"name": call["name"], "arguments": json.dumps(call["arguments"])}
        except (ValueError, KeyError, TypeError, RecursionError):
            break
        calls.append({"id": f"call_{number}_{len(calls)}", "type": "function", "function": function})
    if not calls or len(calls) != len(bodies) or len(calls) != answered:
        return {"role": "assistant", "content": text}
    return {"role": "assistant", "content": without_calls or None, "tool_calls": calls}


def _without_calls(text: str) -> tuple[str, list[str]]:
    """Return a text without its calls, and the calls; an unclosed call is text."""
    pieces, bodies, at = [], [], 0
    while (begin := text.find(_OPEN, at)) >= 0 and (end := text.find(_CLOSE, begin + len(_OPEN))) >= 0:
        pieces.append(text[at:begin].removesuffix("\n"))
        bodies.append(text[begin + len(_OPEN) : end])
        at = end + len(_CLOSE)
    return "".join(pieces) + text[at:], bodies
