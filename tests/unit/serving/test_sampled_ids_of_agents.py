"""Whatever API an agent speaks, the ids that the model sampled are trained: once, unchanged, as one segment.

The model thinks, talks and makes two calls at once, in ids that no tokenizer would choose for its text. The agent reads the
answer whole or streamed, and repeats it in the API's own form in its next request.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple

import anthropic
import numpy as np
import openai
import pytest

from polyturn.core.arrays import Ids
from polyturn.engines.scripted import ScriptedEngine
from polyturn.rollout.limits import Limits
from polyturn.rollout.run_episode import run_episode
from polyturn.serving.openai.scheduler import BlackBox
from polyturn.testing.episodes import scripted_context, task, tiny_codec

PARAMETERS: dict[str, Any] = {"type": "object", "properties": {"key": {"type": "string"}, "n": {"type": "integer"}}}
ARGUMENTS: list[dict[str, Any]] = [{"key": "ä pples", "n": 1}, {"key": "pears", "n": 2}]


class Spoken(NamedTuple):
    """One answer of the model, as its text and as an agent reads it."""

    text: str
    thought: str
    words: str
    arguments: Sequence[dict[str, Any]] = ()


SPOKEN = [
    Spoken(
        # The spaces and the order of the keys are none that a JSON writer would choose.
        "<think>\nHm:  é?\n</think>\n\nLet me  look.\n"
        '<tool_call>\n{"arguments": {"n" : 1,"key":  "ä pples"}, "name":"lookup"}\n</tool_call>\n'
        '<tool_call>\n{"name": "lookup",  "arguments": {"key":"pears", "n":2}}\n</tool_call>',
        "Hm:  é?",
        "Let me  look.",
        ARGUMENTS,
    ),
    Spoken("<think>\n1 + 2\n</think>\n\nThree  in all.", "1 + 2", "Three  in all."),
    Spoken("<think>\nStill 3\n</think>\n\nYes.", "Still 3", "Yes."),
]


def ids_of(text: str) -> Ids:
    """Return the ids of `text` written one character at a time, with the token that ends a turn."""
    codec = tiny_codec()
    return np.array([*(i for letter in text for i in codec.encode(letter)), codec.stop_token_ids[0]], np.int32)


class Answer(NamedTuple):
    """An answer as an agent reads it."""

    thought: str
    words: str
    calls: list[tuple[str, Any]]
    """Call id and arguments."""
    repeated: list[Any]
    """The answer in the form in which the next request repeats it."""


async def converse(
    ask: Callable[[list[Any]], Awaitable[Answer]], results: Callable[[list[tuple[str, str]]], list[Any]]
) -> None:
    """Speak as an agent: send the results of two calls, then another question, with the whole history each time."""
    history: list[Any] = [{"role": "user", "content": "How many?"}]
    for number, spoken in enumerate(SPOKEN):
        answer = await ask(history)
        assert (answer.thought, answer.words) == (spoken.thought, spoken.words)
        assert [arguments for _, arguments in answer.calls] == list(spoken.arguments)
        follow = results([(id, str(n)) for n, (id, _) in enumerate(answer.calls)])
        history += [*answer.repeated, *(follow or [{"role": "user", "content": f"Sure? {number}"}])]


async def play(agent: Callable[[Any, Any], Awaitable[None]]) -> None:
    """Run an episode with `agent`, and check the trained tokens."""
    sampled = [ids_of(spoken.text) for spoken in SPOKEN]
    codec, num_asked = tiny_codec(), 0
    for ids, spoken in zip(sampled, SPOKEN, strict=True):
        assert codec.decode(ids[:-1]) == spoken.text and len(ids) > len(codec.encode(spoken.text)) + 1

    def answer(_: Any) -> Ids:
        nonlocal num_asked
        num_asked += 1
        return sampled[num_asked - 1]

    async def call(base_url: str, anthropic_base_url: str, api_key: str) -> float:
        async with (
            openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as ours,
            anthropic.AsyncAnthropic(base_url=anthropic_base_url, api_key=api_key) as theirs,
        ):
            await agent(ours, theirs)
        return 1.0

    context = scripted_context([], scheduler=BlackBox(agent=call), limits=Limits(max_context=8000), sanity_every=0)
    context.engine = ScriptedEngine(answer)
    t = await run_episode(context, task(data_source=None), id="e")
    assert t.error is None, t.error
    (segment,) = t.segments
    assert segment.token_ids[segment.loss_weights > 0].tolist() == np.concatenate(sampled).tolist()
    windows = [np.lib.stride_tricks.sliding_window_view(segment.token_ids, len(ids)) for ids in sampled]
    assert [int((w == ids).all(1).sum()) for w, ids in zip(windows, sampled, strict=True)] == [1, 1, 1], "each once"


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_chat_requests_train_the_sampled_ids(is_streamed: bool) -> None:
    async def agent(client: Any, _: Any) -> None:
        tools: Any = [{"type": "function", "function": {"name": "lookup", "parameters": PARAMETERS}}]

        async def ask(history: list[Any]) -> Answer:
            common: dict[str, Any] = {"model": "m", "messages": history, "tools": tools}
            if not is_streamed:
                message = (await client.chat.completions.create(**common)).choices[0].message.model_dump(exclude_none=True)
            else:
                message = {"role": "assistant", "content": "", "reasoning_content": ""}
                async for chunk in await client.chat.completions.create(**common, stream=True):
                    delta = chunk.choices[0].delta
                    for name in ("content", "reasoning_content"):
                        message[name] += getattr(delta, name, None) or ""
                    for part in delta.tool_calls or ():
                        if part.id:
                            function = {"name": part.function.name, "arguments": ""}
                            message.setdefault("tool_calls", []).append(
                                {"id": part.id, "type": "function", "function": function}
                            )
                        message["tool_calls"][part.index]["function"]["arguments"] += part.function.arguments or ""
            calls = [(c["id"], json.loads(c["function"]["arguments"])) for c in message.get("tool_calls", ())]
            return Answer(message["reasoning_content"], message["content"], calls, [message])

        await converse(ask, lambda results: [{"role": "tool", "tool_call_id": id, "content": c} for id, c in results])

    await play(agent)


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_responses_requests_train_the_sampled_ids(is_streamed: bool) -> None:
    async def agent(client: Any, _: Any) -> None:
        tools: Any = [{"type": "function", "name": "lookup", "parameters": PARAMETERS}]

        async def ask(history: list[Any]) -> Answer:
            common: dict[str, Any] = {"model": "m", "input": history, "tools": tools}
            if not is_streamed:
                output = (await client.responses.create(**common)).output
                thought = "".join(part.text for item in output if item.type == "reasoning" for part in item.content)
                words = "".join(part.text for item in output if item.type == "message" for part in item.content)
                arguments = [item.arguments for item in output if item.type == "function_call"]
            else:
                deltas: dict[tuple[str, int], str] = {}
                async with client.responses.stream(**common) as stream:
                    async for event in stream:
                        if event.type.endswith(".delta"):
                            key = (event.type.split(".")[1], event.output_index)
                            deltas[key] = deltas.get(key, "") + event.delta
                    output = (await stream.get_final_response()).output
                thought = "".join(text for (kind, _), text in deltas.items() if kind == "reasoning_text")
                words = "".join(text for (kind, _), text in deltas.items() if kind == "output_text")
                arguments = [text for (kind, _), text in deltas.items() if kind == "function_call_arguments"]
            ids = [item.call_id for item in output if item.type == "function_call"]
            return Answer(thought, words, list(zip(ids, map(json.loads, arguments), strict=True)), list(output))

        def results(calls: list[tuple[str, str]]) -> list[Any]:
            return [{"type": "function_call_output", "call_id": id, "output": content} for id, content in calls]

        await converse(ask, results)

    await play(agent)


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_messages_requests_train_the_sampled_ids(is_streamed: bool) -> None:
    async def agent(_: Any, client: Any) -> None:
        tools: Any = [{"name": "lookup", "input_schema": PARAMETERS}]

        async def ask(history: list[Any]) -> Answer:
            common: dict[str, Any] = {"model": "m", "max_tokens": 1000, "messages": history, "tools": tools}
            if not is_streamed:
                content = (await client.messages.create(**common)).content
                thought = "".join(block.thinking for block in content if block.type == "thinking")
                words = "".join(block.text for block in content if block.type == "text")
                inputs = [block.input for block in content if block.type == "tool_use"]
            else:
                thought, words, written = "", "", dict[int, str]()
                async with client.messages.stream(**common) as stream:
                    async for event in stream:
                        if event.type == "content_block_delta":
                            thought += getattr(event.delta, "thinking", "")
                            words += getattr(event.delta, "text", "")
                            if event.delta.type == "input_json_delta":
                                written[event.index] = written.get(event.index, "") + event.delta.partial_json
                    content = (await stream.get_final_message()).content
                inputs = [json.loads(text) for text in written.values()]
            ids = [block.id for block in content if block.type == "tool_use"]
            repeated = {"role": "assistant", "content": content}
            return Answer(thought, words, list(zip(ids, inputs, strict=True)), [repeated])

        def results(calls: list[tuple[str, str]]) -> list[Any]:
            blocks = [{"type": "tool_result", "tool_use_id": id, "content": content} for id, content in calls]
            return [{"role": "user", "content": blocks}] if blocks else []

        await converse(ask, results)

    await play(agent)
