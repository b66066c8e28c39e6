"""Hermes tool calls: what is read, what is kept though broken, and that reading takes linear time."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyturn.core.errors import UnknownNameError
from polyturn.tokens.parsers import HermesParser, parsers
from support.steps import num_steps

parse = HermesParser().parse


def block(body: str) -> str:
    return f"<tool_call>\n{body}\n</tool_call>"


ADD = block('{"name": "add", "arguments": {"a": 1, "b": [2, "x"]}}')
NOW = block('{"name": "now"}')


def test_text_without_calls_and_reasoning_is_kept_exactly() -> None:
    turn = parse("  The answer is 4.\n#### 4\n")
    assert turn == ("  The answer is 4.\n#### 4\n", (), None)


def test_calls_get_ids_in_order_and_the_text_around_them_is_content() -> None:
    turn = parse(f"First this.\n{ADD}\n{NOW}\nDone.", id_prefix="call_3")
    assert turn.content == "First this.\nDone."
    assert [(c.id, c.name, dict(c.arguments), c.error) for c in turn.tool_calls] == [
        ("call_3_0", "add", {"a": 1, "b": [2, "x"]}, None),
        ("call_3_1", "now", {}, None),
    ]
    assert turn.tool_calls[0].raw == ADD


def test_arguments_may_be_a_json_string() -> None:
    (call,) = parse(block(json.dumps({"name": "add", "arguments": '{"a": 1}'}))).tool_calls
    assert call.arguments == {"a": 1}
    assert call.error is None


@pytest.mark.parametrize(
    ("body", "name", "says"),
    [
        ("{'name': 'add'}", "", "not valid JSON"),
        ("", "", "not valid JSON"),
        ('{"name": "add", "arguments": {"a": NaN}}', "", "NaN is not JSON"),
        ('{"name": "add", "arguments": {"a": ' + "9" * 5000 + "}}", "", "not valid JSON"),
        ("[" * 100_000, "", "not valid JSON"),
        ("[1]", "", "must be a JSON object, not an array"),
        ('{"arguments": {}}', "", "this call has none"),
        ('{"name": "", "arguments": {}}', "", "this call has none"),
        ('{"name": 7, "arguments": {}}', "", "not a number"),
        ('{"name": null}', "", "not null"),
        ('{"name": "add", "arguments": [1]}', "add", "must be a JSON object, not an array"),
        ('{"name": "add", "arguments": "{"}', "add", "is not valid JSON"),
        ('{"name": "add", "arguments": "true"}', "add", "not a boolean"),
    ],
)
def test_a_broken_call_is_kept_with_the_reason_and_its_text(body: str, name: str, says: str) -> None:
    turn = parse("Now: " + block(body))
    (call,) = turn.tool_calls
    assert (call.name, dict(call.arguments), call.raw) == (name, {}, block(body))
    assert call.error is not None
    assert says in call.error
    assert turn.content == "Now:"


def test_a_call_that_was_cut_is_kept_and_the_next_one_is_read() -> None:
    turn = parse('<tool_call>\n{"name": "add", "argu' + ADD)
    assert ["not closed" in (c.error or "") for c in turn.tool_calls] == [True, False]
    assert turn.tool_calls[0].raw == '<tool_call>\n{"name": "add", "argu'
    assert turn.tool_calls[1].name == "add"


def test_a_closing_tag_inside_an_argument_does_not_end_the_call() -> None:
    body = json.dumps({"name": "say", "arguments": {"text": "write </tool_call> last"}})
    turn = parse(f"a {block(body)} b")
    assert turn.tool_calls[0].arguments == {"text": "write </tool_call> last"}
    assert turn.content == "a\nb"


@pytest.mark.parametrize(
    ("text", "reasoning", "content", "names"),
    [
        (f"<think>\nI could {ADD}\n</think>\n\nNo.", f"I could {ADD}", "No.", []),
        (f"thinking {ADD}\n</think>\n\n{ADD}", f"thinking {ADD}", "", ["add"]),
        ("a <tool_call> tag would do</think>\n" + ADD, "a <tool_call> tag would do", "", ["add"]),
        (f"<think>cut {ADD}", f"cut {ADD}", "", []),
        ("<think>a</think>x<think>b</think>y", "a\nb", "xy", []),
        ("<think></think>hi", "", "hi", []),
        (block('{"name": "say", "arguments": {"t": "<think>"}}'), None, "", ["say"]),
        (block('{"name": "say", "arguments": {"t": "</think>"}}'), None, "", ["say"]),
    ],
)
def test_calls_inside_reasoning_are_thoughts(text: str, reasoning: str | None, content: str, names: list[str]) -> None:
    turn = parse(text)
    assert (turn.reasoning, turn.content, [c.name for c in turn.tool_calls]) == (reasoning, content, names)


TAGS = st.sampled_from(["<tool_call>", "</tool_call>", "<think>", "</think>", '{"name": "a"}', '"', "[", "{", "x", "\n"])


@given(st.lists(TAGS, max_size=30).map("".join))
def test_any_text_is_read_and_every_open_call_outside_reasoning_is_accounted_for(text: str) -> None:
    turn = parse(text, id_prefix="c")
    assert [c.id for c in turn.tool_calls] == [f"c_{i}" for i in range(len(turn.tool_calls))]
    assert all(c.raw.startswith("<tool_call>") for c in turn.tool_calls)
    if "think>" not in text:
        assert len(turn.tool_calls) == text.count("<tool_call>")


@pytest.mark.parametrize(
    "unit", ["<tool_call>", "<think>", "</think>", '<tool_call>["</tool_call>,', "<think>a</think>", ADD]
)
def test_ten_times_the_text_takes_ten_times_the_steps(unit: str) -> None:
    assert num_steps(lambda: parse(unit * 2_000)) <= 11 * num_steps(lambda: parse(unit * 200))


@pytest.mark.parametrize("unit", ["<tool_call>", "<think>", "</think>", "<think>a</think>"])
def test_no_tag_makes_the_parser_look_through_the_rest_of_the_text(unit: str) -> None:
    """At each of so many, that would not end in time."""
    parse(unit * 100_000)


def test_parsers_are_found_by_name() -> None:
    assert parsers.resolve("hermes") is HermesParser
    with pytest.raises(UnknownNameError, match="Did you mean 'hermes'"):
        parsers.resolve("herms")
