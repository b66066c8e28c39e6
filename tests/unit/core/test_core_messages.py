"""Messages and their OpenAI form, in which files, templates and plug-ins see them."""

from __future__ import annotations

import base64
import io

import numpy as np
import pytest
from PIL import Image

from polyturn.core.errors import DataError
from polyturn.core.media import to_source
from polyturn.core.messages import Message, ToolCall, to_openai
from support.refusals import refuses


def test_messages_have_the_openai_form() -> None:
    assert Message(role="user", content="hi").to_openai() == {"role": "user", "content": "hi"}
    call = ToolCall(id="call_0", name="add", arguments={"a": 2})
    assert to_openai([Message(role="assistant", tool_calls=(call,), reasoning="hm")]) == [
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "hm",
            "tool_calls": [{"id": "call_0", "type": "function", "function": {"name": "add", "arguments": {"a": 2}}}],
        }
    ]
    message = Message(role="tool", content="4", tool_call_id="call_0", name="add")
    assert message.to_openai() == {"role": "tool", "content": "4", "tool_call_id": "call_0", "name": "add"}


def test_text_joins_text_parts_and_leaves_images_out() -> None:
    parts = ({"type": "text", "text": "a"}, {"type": "image", "image": "x.png"}, {"type": "text", "text": "b"})
    assert Message(role="user", content=parts).text == "ab"
    assert Message(role="user", content="plain").text == "plain"


def test_changing_the_dict_leaves_the_message() -> None:
    message = Message(role="user", content=({"type": "text", "text": "a"},))
    message.to_openai()["content"][0]["text"] = "b"
    assert message.text == "a"


def test_content_may_be_none_or_bare_strings() -> None:
    assert Message.from_openai({"role": "assistant", "content": None}).content == ""
    assert Message.from_openai({"role": "user", "content": ["a", {"type": "text", "text": "b"}]}).text == "ab"


@pytest.mark.parametrize(
    "call",
    [
        {"id": "tool1", "function": {"name": "search", "arguments": '{"query": "why"}'}},
        {"id": "tool1", "type": "search", "arguments": {"query": "why"}},
        {"id": "tool1", "name": "search", "arguments": '{"query": "why"}'},
        {"id": "tool1", "type": "function", "function": {"name": "search", "arguments": {"query": "why"}}},
    ],
)
def test_call_may_be_flat_and_its_arguments_json(call: dict[str, object]) -> None:
    message = Message.from_openai({"role": "assistant", "content": "", "tool_calls": [call]})
    assert message.tool_calls == (ToolCall(id="tool1", name="search", arguments={"query": "why"}),)


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning"])
def test_reasoning_is_read_under_both_names(key: str) -> None:
    assert Message.from_openai({"role": "assistant", "content": "", key: "why"}).reasoning == "why"


def test_calls_without_an_id_are_numbered() -> None:
    message = Message.from_openai({"role": "assistant", "tool_calls": [{"name": "f"}, {"name": "g", "arguments": None}]})
    assert message.tool_calls == (ToolCall(id="call_0", name="f"), ToolCall(id="call_1", name="g"))


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ('{"a": ', "position 6"),
        ("[1]", "not list"),
        ([1], "not list"),
        ("null", "not NoneType"),
    ],
)
def test_unreadable_arguments_are_kept_with_their_error(arguments: object, error: str) -> None:
    message = Message.from_openai({"role": "assistant", "tool_calls": [{"name": "f", "arguments": arguments}]})
    (call,) = message.tool_calls
    assert call.arguments == {}
    assert error in (call.error or "")
    assert call.raw == str(arguments)


def test_message_needs_a_role_and_call_a_name() -> None:
    refuses(lambda: Message.from_openai({"content": "x"}), DataError, "'role'", "'content'")
    refuses(
        lambda: Message.from_openai({"role": "assistant", "tool_calls": [{"function": {"arguments": "{}"}}]}),
        DataError,
        "name",
    )
    (call,) = Message.from_openai({"role": "assistant", "tool_calls": [{"function": {"name": ""}}]}).tool_calls
    assert call.error == "a tool call needs a name"  # a model wrote it and a scheduler repeats it


@pytest.mark.parametrize(
    ("key", "value"),
    [("content", 5), ("content", {"text": "x"}), ("content", b"x"), ("tool_calls", 5), ("tool_calls", ["f"])],
)
def test_message_with_a_field_of_a_wrong_type_is_refused(key: str, value: object) -> None:
    refuses(lambda: Message.from_openai({"role": "assistant", key: value}), DataError, key, repr(value))


@pytest.mark.parametrize("shape", [(2, 4, 3), (2, 4)])
def test_array_of_pixels_becomes_a_picture(shape: tuple[int, ...]):
    pixels = np.arange(np.prod(shape), dtype=np.uint8).reshape(shape)
    picture = Image.open(io.BytesIO(base64.b64decode(to_source("image", pixels).partition(",")[2])))
    seen = np.asarray(picture)
    assert seen.shape == (2, 4, 3)
    assert np.array_equal(seen[..., 1], pixels[..., 1] if pixels.ndim == 3 else pixels)


@pytest.mark.parametrize("values", [[0.0, 0.5], [0.0, 1.0], [-1, 255], [0, 256], [0.0, np.nan]])
def test_array_without_pixel_values_is_refused(values: list[float]):
    refuses(lambda: to_source("image", np.array([values])), DataError, "from 0 to 255", f"{values[1]:g}")


def test_array_of_another_shape_is_refused():
    refuses(lambda: to_source("image", np.zeros((2, 4, 4, 3), np.uint8)), DataError, "[2, 4, 4, 3]")
