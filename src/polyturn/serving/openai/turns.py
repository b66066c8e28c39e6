"""Converts an agent's messages to messages of an episode, and a turn to the response that the agent reads.

{"role": "tool", "tool_call_id": "call_0_0", …}  ->  Message(role="tool", name="add", …)
OpenTurn  ->  ChatResponse(content, calls, …), and the message that a continuing request repeats
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from polyturn.core.errors import DataError, HiddenToolsError, TemplateError, one_line
from polyturn.core.generation import FinishReason
from polyturn.core.messages import Message, Origin, count_chars
from polyturn.rollout.episode import Episode
from polyturn.rollout.limits import ContextPolicy, exceeds_context
from polyturn.rollout.open_turn import OpenTurn
from polyturn.serving.openai.chat_request import BadRequest, ChatRequest, ChatResponse
from polyturn.tokens.codec import LONG_CHARS


def typed_messages(messages: Sequence[Mapping[str, Any]], calls: Mapping[str, str] | None = None) -> tuple[Message, ...]:
    """Return messages as `Message` values; a tool's answer gets the name of its call.

    Raises:
        BadRequest: a message is invalid.
    """
    names = dict(calls or {})
    typed = []
    for message in messages:
        names.update({c["id"]: c["function"]["name"] for c in message.get("tool_calls") or ()})
        name = names.get(message.get("tool_call_id", "")) if message["role"] == "tool" else None
        try:
            fields = message if name is None else {**message, "name": name}
            typed.append(Message.from_openai(fields, origin=Origin.ENVIRONMENT))
        except DataError as problem:
            raise BadRequest(str(problem), param="messages") from problem
    return tuple(typed)


async def refuse_too_long(ask: ChatRequest, episode: Episode) -> None:
    """Refuse a request that is too long for the context before rendering it; media are measured in a thread.

    Raises:
        BadRequest: the request is too long, or a message or a medium is invalid.
    """
    shows_text = all(isinstance(message["content"], str) for message in ask.messages)
    if shows_text and len(json.dumps([ask.messages, ask.tools])) <= LONG_CHARS:
        return
    messages, limits = typed_messages(ask.messages), episode.limits
    num_chars = count_chars(messages)
    is_too_long = exceeds_context(limits, num_chars=num_chars, longest_token=episode.codec.longest_token)
    size = f"{num_chars} characters"
    try:
        if not is_too_long:
            await episode.process_media(messages)
            if shows_text and limits.max_context is not None and limits.context_policy is ContextPolicy.STOP:
                num_tokens = await asyncio.to_thread(episode.count_tokens, messages, tools=ask.tools)
                is_too_long, size = num_tokens > limits.max_context, f"{num_tokens} tokens"
    except (DataError, TemplateError) as problem:
        raise unrenderable(problem) from problem
    if is_too_long:
        raise BadRequest(
            f"the messages have {size}, and the context holds {limits.max_context} tokens",
            code="context_full",
            param="messages",
        )


def response_of(episode: Episode, turn: OpenTurn, ask: ChatRequest) -> tuple[ChatResponse, dict[str, Any]]:
    """Return a turn's response, and the message that the agent's next request repeats to continue the turn."""
    message, text = turn.message, turn.text
    if turn.stopped_by is not None:
        text = text[: text.index(turn.stopped_by)]
        message = episode.read(turn.said_before + text, turn=turn)
    may_call = ask.may_call and bool(ask.tools)
    calls = tuple(c for c in message.tool_calls if may_call and c.error is None)
    # A call that cannot be parsed stays in the text, as the model wrote it.
    unread = [c.raw for c in message.tool_calls if not may_call or c.error is not None]
    content = "\n".join([t for t in (message.text, *unread) if t]) if unread else message.text
    completion, context = turn.completion, episode.context_ids
    is_cut = turn.finish_reason is FinishReason.LENGTH
    response = ChatResponse(
        content=content,
        reasoning=message.reasoning,
        calls=calls,
        finish="length" if is_cut else "tool_calls" if calls else "stop",
        stopped_by=turn.stopped_by,
        prompt_ids=context[: len(context) - len(completion.token_ids)],
        token_ids=completion.token_ids,
        logprobs=completion.logprobs,
        texts=[episode.codec.decode([i]) for i in completion.token_ids.tolist()] if ask.wants_texts else (),
    )
    if ask.goes_on and not calls and content.startswith(turn.said_before):
        return dataclasses.replace(response, content=content[len(turn.said_before) :]), response.message
    return response, response.message


def unrenderable(problem: Exception) -> BadRequest:
    """Return the refusal of a request whose messages or tools the chat template cannot render."""
    if isinstance(problem, HiddenToolsError):
        return BadRequest(one_line(problem), param="tools")
    return BadRequest(f"the messages cannot be rendered for this model: {one_line(problem)}", param="messages")
