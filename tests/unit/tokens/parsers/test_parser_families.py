"""Every family of parsers: one turn in its own writing, broken and cut calls, types of arguments, ids, damaged turns."""

import json
import random
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyturn.core.errors import UnknownNameError
from polyturn.core.messages import ToolCall
from polyturn.tokens.parsers import HermesParser, ParsedTurn, PlainParser, TurnParser, parsers, reasoning_formats
from support.parser_samples import CALLS, CONTENT, PIECES, REASONING, TOOLS, VARIANTS, WRITINGS, mutate
from support.refusals import refuses
from support.steps import num_steps

ADD = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
FAMILIES = sorted({parsers.resolve(n): n for n in reversed(list(parsers))}.values())
CALLING = [n for n in WRITINGS if n != "none"]


def make(name: str, **options: Any) -> TurnParser:
    family = parsers.resolve(name)
    assert issubclass(family, TurnParser)
    return family(**options)


def read(name: str, text: str, **options: Any) -> ParsedTurn:
    return make(name, **options).parse(text, tools=TOOLS)


def said(calls: tuple[ToolCall, ...]) -> tuple[tuple[str, dict[str, Any]], ...]:
    assert [c.error for c in calls] == [None] * len(calls)
    return tuple((c.name, dict(c.arguments)) for c in calls)


def only(turn: ParsedTurn) -> ToolCall:
    (call,) = turn.tool_calls
    return call


@pytest.mark.parametrize("name", CALLING)
def test_family_reads_its_own_writing(name: str) -> None:
    turn = read(name, WRITINGS[name])
    assert (turn.content, turn.reasoning, said(turn.tool_calls)) == (CONTENT, REASONING, CALLS)
    assert all(c.raw and c.raw in WRITINGS[name] for c in turn.tool_calls)


@pytest.mark.parametrize(("name", "text"), VARIANTS)
def test_family_reads_its_other_writings(name: str, text: str) -> None:
    turn = read(name, text)
    assert (turn.content, turn.reasoning, said(turn.tool_calls)) == ("", None, CALLS)


@pytest.mark.parametrize("name", FAMILIES)
def test_text_without_calls_is_kept_exactly(name: str) -> None:
    for text in ("", "  The answer is 4.\n#### 4\n", "a < b, [1, 2] and {x}", "🙂 日本\n\n"):
        assert read(name, text) == (text, (), None)


def test_parser_none_reads_no_calls_and_no_reasoning() -> None:
    assert parsers.resolve("none") is PlainParser
    assert read("none", WRITINGS["hermes"]) == (WRITINGS["hermes"], (), None)


def test_aliases_are_the_same_parser() -> None:
    of = {"hermes": "qwen qwen25", "glm45": "glm glm4 glm47", "pythonic": "lfm2", "qwen3_coder": "step3p5 nanbeige"}
    for name, aliases in of.items():
        assert {parsers.resolve(alias) for alias in aliases.split()} == {parsers.resolve(name)}


@pytest.mark.parametrize(
    ("name", "text", "called", "reason"),
    [
        ("hermes", '<tool_call>{"name": "find", "argum', "", "not closed"),
        ("hermes", "<tool_call>{'name': 'add'}</tool_call>", "", "not valid JSON"),
        ("hermes", "<tool_call>\n\n</tool_call>", "", "not valid JSON"),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>', "", "NaN"),
        ("hermes", '<tool_call>{"name": "add", "arguments": ' + "9" * 5000 + "}</tool_call>", "", "not valid JSON"),
        ("hermes", "<tool_call>" + "[" * 100_000 + "</tool_call>", "", "not valid JSON"),
        ("hermes", "<tool_call>[1]</tool_call>", "", "not an array"),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>', "", "has none"),
        ("hermes", '<tool_call>{"name": ""}</tool_call>', "", "has none"),
        ("hermes", '<tool_call>{"name": null}</tool_call>', "", "not null"),
        ("hermes", '<tool_call>{"name": "add", "arguments": [1]}</tool_call>', "add", "not an array"),
        ("hermes", '<tool_call>{"name": "add", "arguments": "{"}</tool_call>', "add", "not valid JSON"),
        ("hermes", '<tool_call>{"name": "add", "arguments": "true"}</tool_call>', "add", "not a boolean"),
        ("qwen3_coder", "<tool_call>\n<function=find>\n<parameter=query>Kö", "", "not closed"),
        ("qwen3_coder", "<tool_call>\nfind\n</tool_call>", "", "no function"),
        ("qwen3_coder", "<tool_call><function=>\n</function></tool_call>", "", "needs a name"),
        ("qwen3_coder", "<tool_call><function=find>x=1</function></tool_call>", "find", "expected <parameter=NAME>"),
        ("qwen3_coder", "\n<function=find><parameter=limit>1</function>", "find", "is not closed"),
        ("glm45", '<tool_call>{"name": "find"}</tool_call>', "", "needs a name"),
        ("glm45", "<tool_call>find\n<arg_key>limit</arg_key>3</tool_call>", "find", "expected <arg_key>"),
        ("glm45", "<tool_call>find\n<arg_key>limit</arg_key>\n<arg_value>3", "", "not closed"),
        ("minimax-m2", "<minimax:tool_call>\n</minimax:tool_call>", "", "calls nothing"),
        ("minimax-m2", '<minimax:tool_call><invoke name="find"><parameter name="limit">3', "", "not closed"),
        ("minimax-m2", '<minimax:tool_call><invoke name="">x</invoke></minimax:tool_call>', "", "needs a name"),
        ("llama3", '{"name": "find", "parameters": {"limit"', "", "not closed"),
        ("llama3", '{"name": 7, "parameters": {}}', "", "not a number"),
        ("llama3", "<|python_tag|>print(1)", "print", "expected KEY=VALUE"),
        ("llama3", "<|python_tag|>!", "", "must be followed by"),
        ("pythonic", '[find(query="Kö', "find", "cut"),
        ("pythonic", "<|python_start|>[find(7)]<|python_end|>", "find", "expected KEY=VALUE"),
        ("pythonic", "[find(limit=__import__('os'))]", "find", "expected a literal"),
        ("pythonic", "[find(limit=" + "[" * 100 + ")]", "find", "nested too deeply"),
        ("mistral", '[TOOL_CALLS][{"name": "find", "argum', "", "not closed"),
        ("mistral", "[TOOL_CALLS][]", "", "empty"),
        ("mistral", "[TOOL_CALLS]find", "", "must be followed by"),
        ("mistral", '[TOOL_CALLS]find[ARGS]{"limit": 3', "find", "not closed"),
        ("deepseekv3", "<｜tool▁calls▁begin｜>", "", "calls nothing"),
        ("deepseekv3", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>find\n{}<｜tool▁call▁end｜>", "find", "```json"),
        ("deepseekv3", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>find\n```json\n{", "", "not closed"),
        ("deepseekv31", "<｜tool▁call▁begin｜>find<｜tool▁call▁end｜>", "", "needs a name"),
        ("deepseekv31", "<｜tool▁call▁begin｜>find<｜tool▁sep｜>{'a': 1}<｜tool▁call▁end｜>", "find", "not valid JSON"),
        ("kimi_k2", "<|tool_call_begin|>find me<|tool_call_argument_begin|>{}<|tool_call_end|>", "", "functions.NAME"),
        (
            "kimi_k2",
            "<|tool_call_begin|>functions.find:0<|tool_call_argument_begin|>[]<|tool_call_end|>",
            "find",
            "an array",
        ),
        ("gpt-oss", "<|channel|>commentary to=functions.find", "find", "ends before its arguments"),
        ("gpt-oss", '<|channel|>commentary to=functions.find<|message|>{"limit": ', "find", "not valid JSON"),
    ],
)
def test_broken_call_is_kept_with_its_reason_and_text(name: str, text: str, called: str, reason: str) -> None:
    is_anywhere = name not in ("llama3", "pythonic", "gpt-oss")
    call = only(read(name, f"Now: {text}" if is_anywhere else text))
    assert (call.name, dict(call.arguments)) == (called, {})
    assert call.error is not None
    assert reason in call.error
    assert call.raw


@pytest.mark.parametrize("name", CALLING)
def test_calls_before_a_cut_are_kept(name: str) -> None:
    text = WRITINGS[name]
    cut = text[: text.rindex("now") + 3]
    calls = read(name, cut).tool_calls
    assert said(calls[:1]) == CALLS[:1]
    assert all(c.error for c in calls[1:])


def test_cut_pythonic_list_keeps_its_calls() -> None:
    assert said(read("pythonic", "[now()").tool_calls) == CALLS[1:]
    calls = read("pythonic", "[now(),").tool_calls
    assert [(c.name, c.raw, c.error is None) for c in calls] == [("now", "now()", True), ("", "[now(),", False)]


@pytest.mark.parametrize("name", [n for n in CALLING if n != "gpt-oss"])
def test_calls_inside_reasoning_are_thoughts_unless_asked_for(name: str) -> None:
    tags = reasoning_formats.resolve(make(name).reasoning_name)
    calls = WRITINGS[name].rpartition(CONTENT)[2]
    text = f"{tags.opens}{calls}{tags.closes}Done."
    turn = read(name, text)
    assert (turn.content, turn.tool_calls) == ("Done.", ())
    turn = read(name, text, calls_in_reasoning=True)
    assert (turn.content, said(turn.tool_calls)) == ("Done.", CALLS)


def test_cut_reasoning_that_the_prompt_opened_is_all_reasoning() -> None:
    text = 'so I call <tool_call>{"name": "now"}</tool_call> and'
    assert read("hermes", text, reasoning_is_open=True) == ("", (), text)
    assert read("hermes", "so</think>4", reasoning_is_open=True) == ("4", (), "so")
    assert read("hermes", "<think>so</think>4", reasoning_is_open=True) == ("4", (), "so")


@pytest.mark.parametrize("name", sorted(reasoning_formats))
def test_any_reasoning_format_goes_with_any_tool_format(name: str) -> None:
    tags = reasoning_formats.resolve(name)
    text = f'{tags.opens}so{tags.closes}4<tool_call>{{"name": "now"}}</tool_call>'
    turn = read("hermes", text, reasoning=name)
    assert (turn.reasoning, len(turn.tool_calls)) == (("so", 1) if name != "none" else (None, 1))
    assert read("none", "<think>so</think>4", reasoning="qwen3") == ("4", (), "so")


def test_unknown_names_come_with_the_nearest() -> None:
    refuses(lambda: parsers.resolve("kimi-k2"), UnknownNameError, "'kimi_k2'")
    refuses(lambda: HermesParser(reasoning="deepseek_r1"), UnknownNameError, "'deepseek-r1'")


@pytest.mark.parametrize(
    ("text", "reasoning", "content", "names"),
    [
        (f"<think>\nI could {ADD}\n</think>\n\nNo.", f"I could {ADD}", "No.", []),
        (f"thinking {ADD}\n</think>\n\n{ADD}", f"thinking {ADD}", "", ["add"]),
        ("a <tool_call> tag would do</think>\n" + ADD, "a <tool_call> tag would do", "", ["add"]),
        (f"<think>cut {ADD}", f"cut {ADD}", "", []),
        ("<think>a</think>x<think>b</think>y", "a\nb", "xy", []),
        ("<think></think>hi", "", "hi", []),
        (ADD.replace("1", '"<think>"'), None, "", ["add"]),
        (ADD.replace("1", '"</think>"'), None, "", ["add"]),
    ],
)
def test_hermes_calls_inside_reasoning_are_thoughts(
    text: str, reasoning: str | None, content: str, names: list[str]
) -> None:
    turn = read("hermes", text)
    assert (turn.reasoning, turn.content, [c.name for c in turn.tool_calls]) == (reasoning, content, names)


TAGS = st.sampled_from(["<tool_call>", "</tool_call>", "<think>", "</think>", '{"name": "a"}', '"', "[", "{", "x", "\n"])


@given(st.lists(TAGS, max_size=30).map("".join))
def test_every_open_hermes_call_is_accounted_for(text: str) -> None:
    turn = make("hermes").parse(text, id_prefix="c")
    assert [c.id for c in turn.tool_calls] == [f"c_{i}" for i in range(len(turn.tool_calls))]
    assert all(c.raw.startswith("<tool_call>") for c in turn.tool_calls)
    if "think>" not in text:
        assert len(turn.tool_calls) == text.count("<tool_call>")


def test_hermes_arguments_may_be_json_text() -> None:
    turn = read("hermes", 'First this.\n<tool_call>{"name": "now", "arguments": "{\\"a\\": 1}"}</tool_call>\nDone.')
    assert (turn.content, only(turn).arguments) == ("First this.\nDone.", {"a": 1})


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "5", "5"),
        ({"type": "string"}, " 5\n", " 5\n"),
        ({"type": "integer"}, "5", 5),
        ({"type": "integer"}, " -5 ", -5),
        ({"type": "integer"}, "5.0", 5),
        ({"type": "integer"}, "5.5", "5.5"),
        ({"type": "integer"}, "true", "true"),
        ({"type": "number"}, "2.5", 2.5),
        ({"type": "number"}, "1e999", "1e999"),
        ({"type": "boolean"}, "True", True),
        ({"type": "boolean"}, "1", "1"),
        ({"type": "array"}, "[1, 2,]", [1, 2]),
        ({"type": "array"}, "{}", "{}"),
        ({"type": "object"}, '{"a": {"b": null}}', {"a": {"b": None}}),
        ({"type": ["integer", "null"]}, "null", None),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "None", None),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({}, "5", 5),
        ({}, "five", "five"),
        ({"type": 7}, "[1]", [1]),
        (None, "[1]", [1]),
    ],
)
@pytest.mark.parametrize("name", ["glm45", "minimax-m2", "qwen3_coder"])
def test_arguments_written_as_text_take_the_type_of_their_schema(name: str, schema: Any, text: str, value: Any) -> None:
    writing = {
        "glm45": f"<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>{text}</arg_value>\n</tool_call>",
        "minimax-m2": '<minimax:tool_call><invoke name="f">'
        f'<parameter name="x">{text}</parameter></invoke></minimax:tool_call>',
        "qwen3_coder": f"<tool_call><function=f><parameter=x>\n{text}\n</parameter></function></tool_call>",
    }[name]
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"x": schema}}}}
    (call,) = make(name).parse(writing, tools=[tool]).tool_calls
    assert call.error is None
    assert (call.arguments["x"], type(call.arguments["x"])) == (value, type(value))


@pytest.mark.parametrize("name", ["glm45", "minimax-m2", "qwen3_coder"])
def test_closing_tag_inside_a_value_does_not_end_it(name: str) -> None:
    closing = {"glm45": "</arg_value>", "minimax-m2": "</parameter>", "qwen3_coder": "</parameter>"}[name]
    query = f"write {closing} here"
    text = WRITINGS[name].replace('Köln "am" Rhein\nnow', query)
    assert read(name, text).tool_calls[0].arguments["query"] == query


def test_trailing_commas_and_line_breaks_in_strings_are_accepted() -> None:
    call = only(read("hermes", '<tool_call>{"name": "f", "arguments": {"a": [1, 2,], "b": "x,]\n",},}</tool_call>'))
    assert (call.arguments, call.error) == ({"a": [1, 2], "b": "x,]\n"}, None)


def test_nesting_is_bounded() -> None:
    def text(depth: int) -> str:
        return '<tool_call>{"name": "f", "arguments": {"a": ' + "[" * depth + "]" * depth + "}}</tool_call>"

    assert only(read("hermes", text(60))).error is None
    assert "nested too deeply" in (only(read("hermes", text(100))).error or "")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (r"'a\nb'", "a\nb"),
        (r'"\u00e9\x41\t\q\'"', "éA\t\\q'"),
        (r"r'\n'", "\\n"),
        ("'''a'b'''", "a'b"),
        ("'a' 'b'", "ab"),
        ("'a\nb'", "a\nb"),
        ("''", ""),
        ("-3", -3),
        ("1_000", 1000),
        ("2.5e3", 2500.0),
        ("None", None),
        ("false", False),
        ("(1, 'a')", [1, "a"]),
        ("(1)", 1),
        ("[]", []),
        ("{'a': {'b': [1, None]},}", {"a": {"b": [1, None]}}),
    ],
)
def test_pythonic_literals(text: str, value: Any) -> None:
    call = only(read("pythonic", f"[f(a={text})]"))
    assert (call.error, call.arguments) == (None, {"a": value})


@pytest.mark.parametrize("text", ["see [this(page)](http://x)", "[1, 2]", "[a for a in b]", "f(a=1)", "use [f] (a=1)"])
def test_text_like_a_pythonic_call_is_content(text: str) -> None:
    assert read("pythonic", text) == (text, (), None)


@pytest.mark.parametrize("text", ['{"answer": 5}', '{"name": "Bob", "age": 5}', '{"name": "Bob"}', '{"type": "x"}', "{x}"])
def test_json_answer_is_not_a_llama_call(text: str) -> None:
    assert read("llama3", text) == (text, (), None)


def test_llama_calls_of_known_and_built_in_tools_are_read() -> None:
    assert only(read("llama3", '{"name": "now"}')).name == "now"
    call = only(read("llama3", '<|python_tag|>brave_search.call(query="rain")<|eom_id|>'))
    assert (call.name, call.arguments) == ("brave_search", {"query": "rain"})


def test_end_marks_behind_the_last_call_are_not_content() -> None:
    assert read("llama3", '{"name": "find", "parameters": {}}<|eom_id|>').content == ""
    assert read("hermes", '<tool_call>{"name": "now"}</tool_call><|im_end|>').content == ""


def test_ids_are_numbered_or_the_models_own() -> None:
    assert [c.id for c in make("hermes").parse(WRITINGS["hermes"], id_prefix="c").tool_calls] == ["c_0", "c_1"]
    kimi = WRITINGS["kimi_k2"]
    assert [c.id for c in read("kimi_k2", kimi).tool_calls] == ["functions.find:0", "functions.now:1"]
    twice = kimi.replace("functions.now:1", "functions.find:0")
    assert [c.id for c in read("kimi_k2", twice).tool_calls] == ["functions.find:0", "call_1"]
    made = [c.id for c in read("mistral", WRITINGS["mistral"]).tool_calls]
    assert len(set(made)) == 2
    assert all(len(i) == 9 and i.isalnum() for i in made)
    assert read("mistral", VARIANTS[3][1]).tool_calls[1].id == "abcDEF123"


def test_harmony_channels_are_content_and_reasoning() -> None:
    assert read("gpt-oss", "<|channel|>final<|message|>Four.") == ("Four.", (), None)
    assert read("gpt-oss", "<|channel|>analysis<|message|>two and") == ("", (), "two and")


@pytest.mark.parametrize("name", FAMILIES)
def test_damaged_turns_are_read_without_an_exception(name: str) -> None:
    rng = random.Random(name)
    parser = make(name, calls_in_reasoning=True)
    seeds = [WRITINGS.get(name, WRITINGS["hermes"]), *(t for n, t in VARIANTS if parsers.resolve(n) is type(parser))]
    for index in range(1_000):
        turn = parser.parse(mutate(seeds[index % len(seeds)], rng), id_prefix="c", tools=TOOLS)
        assert len({c.id for c in turn.tool_calls}) == len(turn.tool_calls)
        for call in turn.tool_calls:
            assert call.raw
            assert call.name or call.error
            json.dumps(dict(call.arguments), allow_nan=False)


@pytest.mark.parametrize("name", FAMILIES)
def test_ten_times_the_text_takes_ten_times_the_steps(name: str) -> None:
    parser = make(name, calls_in_reasoning=True)
    for unit in PIECES:
        text = unit * (4_000 // len(unit))
        short, long = (num_steps(partial(parser.parse, text * copies, tools=TOOLS)) for copies in (1, 10))
        assert long <= 11 * short, unit


@pytest.mark.parametrize("unit", ["<tool_call>", "<think>", "</think>", "<think>a</think>"])
def test_no_tag_makes_hermes_look_through_the_rest_of_the_text(unit: str) -> None:
    """A search through the rest at each of so many tags would not end in time."""
    make("hermes").parse(unit * 50_000)


def test_tags_in_hermes_arguments_are_text() -> None:
    text = '<tool_call>\n{"name": "f", "arguments": {"a": "<tool_call>x</tool_call> <tool_call>"}}\n</tool_call>'
    call = only(read("hermes", text))
    assert (dict(call.arguments), call.error) == ({"a": "<tool_call>x</tool_call> <tool_call>"}, None)
    broken, call = read("hermes", '<tool_call>{"name": "f", "arguments": {}}\n' + ADD).tool_calls
    assert "not closed" in (broken.error or "")
    assert call.name == "add"
