"""I5: where the ids that an episode grows turn by turn differ from a full render, the check says why.

That they are equal, over many templates and hostile texts, is in `test_template_exactness.py`.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyturn.core.messages import Message, ToolCall
from polyturn.testing.tiny_models import tiny_tokenizer
from polyturn.tokens.codec import Codec, load_codec
from polyturn.tokens.delta import DeltaEncoder
from polyturn.tokens.sanity import KINDS
from support.differences import check

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"
TOOLS = [
    {"type": "function", "function": {"name": n, "description": "d", "parameters": {"type": "object", "properties": {}}}}
    for n in ("add", "look_up")
]
needs_shared = pytest.mark.skipif(not SHARED.exists(), reason="needs the tokenizers and templates in ../shared/data")


@functools.cache
def tiny() -> Codec:
    return Codec(tiny_tokenizer())


CONTROL = ["<|im_", "end|>", "tool_call>", "tool_response>", "think>"]
words = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\u0000"), min_size=0, max_size=12).filter(
    lambda text: not any(tag in text for tag in CONTROL)  # hypothesis also draws texts that stand in the code it tests
)
plain_text = st.one_of(
    st.sampled_from(["", "4", " a b\n", "\n\n", "What is 2 + 2?", "é日🙂", '{"a": "b"}', "</", "<"]), words
)
values = st.one_of(st.integers(-99, 99), st.booleans(), st.sampled_from(["x", 'quote "', "é"]))
calls = st.lists(st.tuples(st.sampled_from(["add", "look_up"]), st.dictionaries(st.sampled_from("abc"), values)), max_size=3)


@st.composite
def conversations(draw: st.DrawFn) -> list[Message]:
    """A prompt, then turns with their answers: tool results for as many calls as were made, else a user's reply."""
    messages = [Message(role="system", content="Be brief.")] if draw(st.booleans()) else []
    messages.append(Message(role="user", content="Hi, " + draw(plain_text)))
    for turn in range(draw(st.integers(1, 4))):
        made = tuple(
            ToolCall(id=f"call_{turn}_{i}", name=name, arguments=arguments)
            for i, (name, arguments) in enumerate(draw(calls))
        )
        said = "" if made and draw(st.booleans()) else "So " + draw(plain_text).strip()
        messages.append(Message(role="assistant", content=said, tool_calls=made))
        for call in made:
            messages.append(Message(role="tool", content=draw(plain_text), tool_call_id=call.id, name=call.name))
        if not made or draw(st.booleans()):
            messages.append(Message(role="user", content=draw(plain_text)))
    messages.append(Message(role="assistant", content="done"))
    return messages


def grow(codec: Codec, encoder: DeltaEncoder, messages: list[Message], say: Callable[[Message], str]) -> list[int]:
    """Return the ids of an episode that says and hears `messages`."""
    first = next(i for i, m in enumerate(messages) if m.role == "assistant")
    ids = encoder.start(messages[:first]).tolist()
    pending: list[Message] = []
    for message in messages[first:]:
        if message.role != "assistant":
            pending.append(message)
            continue
        if pending:
            ids += encoder.extend(pending, last_id=ids[-1]).tolist()
            pending = []
        ids += codec.encode(say(message)).tolist()
    return ids


def chatml(message: Message) -> str:
    """Return the text of `message` as a model trained on ChatML with hermes calls samples it."""
    blocks = [
        "<tool_call>\n" + json.dumps({"name": c.name, "arguments": dict(c.arguments)}, ensure_ascii=False) + "\n</tool_call>"
        for c in message.tool_calls
    ]
    return "\n".join([*([message.content] if message.content else []), *blocks]) + "<|im_end|>"  # type: ignore[list-item]


@given(conversations(), st.sampled_from(["\n", " ", "<think>\nhm\n</think>\n\n"]))
def test_sanity_check_explains_different_ids(messages: list[Message], before: str) -> None:
    """A model may start a turn with white space, which a full render merges, or think without the message keeping it."""
    encoder = DeltaEncoder(tiny(), tools=TOOLS)
    ids = grow(tiny(), encoder, messages, lambda m: before + chatml(m))
    found = check(ids, encoder.full(messages), tiny())
    assert found.kind in ("whitespace", "merge", "reasoning_stripped")
    assert found.kind in KINDS
    assert ids[: found.index] == encoder.full(messages)[: found.full_index].tolist()


@needs_shared
@given(messages=conversations())
def test_positional_reasoning_differs_only_in_reasoning(messages: list[Message]) -> None:
    """Qwen 3 writes an empty thought into the turns behind the last user message when it renders them as history."""
    template = str(SHARED / "chat_templates" / "qwen3.jinja")
    codec = load_codec(str(SHARED / "tokenizers" / "qwen2"), chat_template=template)
    encoder = DeltaEncoder(codec, tools=TOOLS)
    found = check(grow(codec, encoder, messages, chatml), encoder.full(messages), codec)
    assert found.kind == "reasoning_stripped"
