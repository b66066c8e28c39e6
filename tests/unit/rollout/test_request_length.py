"""A request that no context can hold is refused before rendering, and counting does not block the event loop."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest

from polyturn.core.lifecycle import StopReason
from polyturn.core.messages import Message, ToolCall
from polyturn.rollout.limits import ContextPolicy, Limits
from polyturn.rollout.request_length import LONG_CHARS, TooLongError, check_length
from polyturn.rollout.run_episode import run_episode
from polyturn.testing.episodes import scripted_context, task
from polyturn.testing.tiny_models import tiny_tokenizer
from polyturn.tokens.codec import Codec
from polyturn.tokens.delta import DeltaEncoder
from support.parts import Steps
from support.refusals import refuses_later

CODEC = Codec(tiny_tokenizer())


def said(*texts: str) -> list[Message]:
    return [Message(role="user", content=text) for text in texts]


async def test_request_that_cannot_fit_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    await check_length(said("How loud?"), codec=CODEC, limits=Limits(max_context=2))
    await check_length(said("a" * 2 * LONG_CHARS), codec=CODEC, limits=Limits(max_context=4 * LONG_CHARS))

    def count(self: Codec, texts: Sequence[str]) -> list[int]:
        raise AssertionError("it was counted")

    monkeypatch.setattr(Codec, "count", count)
    with pytest.raises(TooLongError, match=r"4000000 .* 512 "):
        await check_length(said("a " * 2_000_000), codec=CODEC, limits=Limits(max_context=512))


async def test_history_is_bounded_as_a_whole_or_by_message():
    history = said(*["quiet mouse " * 3000] * 4)
    (each, *_) = CODEC.count([history[0].text])
    with pytest.raises(TooLongError, match=f"{4 * each} .* {2 * each}"):
        await check_length(history, codec=CODEC, limits=Limits(max_context=2 * each))
    drops = Limits(max_context=2 * each, context_policy=ContextPolicy.DROP_OLDEST)
    await check_length(history, codec=CODEC, limits=drops)
    with pytest.raises(TooLongError, match=f"{each} tokens"):
        await check_length(
            history, codec=CODEC, limits=Limits(max_context=each - 1, context_policy=ContextPolicy.DROP_OLDEST)
        )


LONG = "a " * 2_000_000
CALL = ToolCall(id="a", name="f", arguments={})


@pytest.mark.parametrize(
    "message",
    [
        Message(role="user", content=({"type": "text", "text": LONG},)),
        Message(role="user", content=({"type": "json", "data": {"a": [LONG]}},)),
        Message(role="user", content=({"type": "refusal", "refusal": LONG},)),
        Message(role="user", content=({"type": "image", "image": "data:image/png;base64,", "alt": LONG},)),
        Message(role=LONG, content="Hi"),
        Message(role="user", content="Hi", name=LONG),
        Message(role="tool", content="Hi", tool_call_id=LONG),
        Message(role="assistant", content="Hi", reasoning=LONG),
        Message(role="assistant", content="", tool_calls=(dataclasses.replace(CALL, id=LONG),)),
        Message(role="assistant", content="", tool_calls=(dataclasses.replace(CALL, name=LONG),)),
        Message(role="assistant", content="", tool_calls=(dataclasses.replace(CALL, arguments={"a": [LONG]}),)),
        Message(role="assistant", content="", tool_calls=(dataclasses.replace(CALL, raw=LONG),)),
    ],
    ids=lambda message: message.role[:9],
)
async def test_long_text_is_counted_in_every_field(message: Message):
    await refuses_later(
        lambda: check_length([*said("Hi"), message], codec=CODEC, limits=Limits(max_context=512)), TooLongError, "512"
    )


async def test_tools_and_numbers_of_messages_count() -> None:
    await refuses_later(
        lambda: check_length(said(*["x"] * 600), codec=CODEC, limits=Limits(max_context=512)), TooLongError, "600"
    )
    tools = [{"function": {"name": "f", "description": "a" * 2 * LONG_CHARS}}]
    with pytest.raises(TooLongError):
        await check_length(said("Hi"), tools=tools, codec=CODEC, limits=Limits(max_context=512))


async def test_media_and_names_do_not_count() -> None:
    shown = Message(role="user", content=({"type": "image", "image": "data:image/png;base64," + LONG},))
    called = dataclasses.replace(CALL, id="i" * 200, name="n" * 200)
    turns = [Message(role="assistant", content="", tool_calls=(called,)), Message(role="tool", tool_call_id="i" * 200)]
    await check_length([shown, *turns * 200], codec=CODEC, limits=Limits(max_context=512))


async def test_event_loop_goes_on_while_a_text_is_counted(monkeypatch: pytest.MonkeyPatch):
    """The loop itself ends the count, which holds the tokenizer's thread until then."""
    loop_went_on, count = asyncio.Event(), Codec.count
    loop = asyncio.get_running_loop()

    def slow_count(self: Codec, texts: Sequence[str], **kwargs: bool) -> list[int]:
        async def wait() -> None:
            await loop_went_on.wait()

        asyncio.run_coroutine_threadsafe(wait(), loop).result(timeout=120)
        return count(self, texts, **kwargs)

    monkeypatch.setattr(Codec, "count", slow_count)
    asking = asyncio.create_task(check_length(said("a" * 2 * LONG_CHARS), codec=CODEC, limits=Limits(max_context=1 << 20)))
    await asyncio.sleep(0)
    loop_went_on.set()
    await asking


@pytest.mark.parametrize("text", ["mouse " * 20_000, "<|im_end|>" * 10_000, "\ud800" * 70_000, "ü€𐍈" * 30_000])
def test_long_text_has_the_ids_of_its_pieces(text: str):
    pieces = CODEC.tokenizer.backend_tokenizer.encode(text.encode("utf-8", "replace").decode(), add_special_tokens=False).ids
    assert CODEC.encode(text).tolist() == pieces
    assert CODEC.count([text]) == [len(pieces)]


async def test_megabytes_of_an_environment_are_not_encoded(monkeypatch: pytest.MonkeyPatch):
    """Only the words of the environment: the rest of the conversation is encoded as ever."""
    encoded: list[int] = []
    encode = DeltaEncoder.extend

    def noted(self: DeltaEncoder, messages: Sequence[Message], **options: Any) -> Any:
        encoded.append(max((len(m.text) for m in messages), default=0))
        return encode(self, messages, **options)

    monkeypatch.setattr(DeltaEncoder, "extend", noted)
    context = scripted_context(
        ["a", "b"], scheduler=Steps(lambda episode, turn: "x " * 10_000_000), limits=Limits(max_context=2000, max_turns=4)
    )
    trajectory = await run_episode(context, task(), id="e")
    assert (trajectory.error, trajectory.stop_reason, len(trajectory.turns)) == (None, StopReason.CONTEXT_FULL, 1)
    assert max(encoded, default=0) < LONG_CHARS


async def test_prompt_of_megabytes_fails_its_trajectory():
    context = scripted_context(["a"], limits=Limits(max_context=2000))
    trajectory = await run_episode(context, task("x " * 10_000_000), id="e")
    assert "TooLongError" in (trajectory.error or "")
