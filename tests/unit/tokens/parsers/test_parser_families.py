"""Every family: the same turn in its own writing, what it keeps though broken, types of arguments, ids, damaged turns."""

import json
import random
from functools import partial
from typing import Any

import pytest

from polyturn.core.errors import UnknownNameError
from polyturn.core.messages import ToolCall
from polyturn.tokens.parsers import HermesParser, ParsedTurn, PlainParser, TurnParser, parsers, reasoning_formats
from support.parser_samples import CALLS, CONTENT, PIECES, REASONING, TOOLS, VARIANTS, WRITINGS, mutate
from support.steps import num_steps

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
def test_a_family_reads_its_own_writing(name: str) -> None:
    turn = read(name, WRITINGS[name])
    assert (turn.content, turn.reasoning, said(turn.tool_calls)) == (CONTENT, REASONING, CALLS)
    assert all(c.raw and c.raw in WRITINGS[name] for c in turn.tool_calls)


@pytest.mark.parametrize(("name", "text"), VARIANTS)
def test_a_family_reads_its_other_writings(name: str, text: str) -> None:
    turn = read(name, text)
    assert (turn.content, turn.reasoning, said(turn.tool_calls)) == ("", None, CALLS)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("text", ["", "  The answer is 4.\n#### 4\n", "a < b, [1, 2] and {x}", "🙂 日本\n\n"])
def test_text_without_calls_is_kept_exactly(name: str, text: str) -> None:
    assert read(name, text) == (text, (), None)


def test_no_parser_reads_no_calls_and_no_reasoning() -> None:
    assert read("none", WRITINGS["hermes"]) == (WRITINGS["hermes"], (), None)


@pytest.mark.parametrize(
    ("alias", "name"),
    [
        *(("qwen", "hermes"), ("qwen25", "hermes"), ("glm", "glm45"), ("glm4", "glm45"), ("glm47", "glm45")),
        *(("lfm2", "pythonic"), ("step3p5", "qwen3_coder"), ("nanbeige", "qwen3_coder")),
    ],
)
def test_an_alias_is_the_same_parser(alias: str, name: str) -> None:
    assert parsers.resolve(alias) is parsers.resolve(name)


@pytest.mark.parametrize(
    ("name", "text", "called", "says"),
    [
        ("hermes", '<tool_call>{"name": "find", "argum', "", "not closed"),
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
def test_a_broken_call_is_kept_with_the_reason_and_its_text(name: str, text: str, called: str, says: str) -> None:
    is_anywhere = name not in ("llama3", "pythonic", "gpt-oss")
    call = only(read(name, f"Now: {text}" if is_anywhere else text))
    assert (call.name, dict(call.arguments)) == (called, {})
    assert call.error is not None
    assert says in call.error
    assert call.raw


@pytest.mark.parametrize("name", CALLING)
def test_calls_before_a_cut_are_kept(name: str) -> None:
    text = WRITINGS[name]
    cut = text[: text.rindex("now") + 3]
    calls = read(name, cut).tool_calls
    assert said(calls[:1]) == CALLS[:1]
    assert all(c.error for c in calls[1:])


def test_a_pythonic_list_that_is_cut_behind_a_call_is_read_and_one_that_goes_on_is_kept() -> None:
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


def test_reasoning_that_the_generation_prompt_opened_and_that_was_cut_is_all_reasoning() -> None:
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
    with pytest.raises(UnknownNameError, match="Did you mean 'kimi_k2'"):
        parsers.resolve("kimi-k2")
    with pytest.raises(UnknownNameError, match="Did you mean 'deepseek-r1'"):
        HermesParser(reasoning="deepseek_r1")


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "5", "5"),
        ({"type": "string"}, " 5\n", " 5\n"),
        ({"type": "string"}, "null", "null"),
        ({"type": "integer"}, "5", 5),
        ({"type": "integer"}, " -5 ", -5),
        ({"type": "integer"}, "5.0", 5),
        ({"type": "integer"}, "five", "five"),
        ({"type": "integer"}, "5.5", "5.5"),
        ({"type": "integer"}, "true", "true"),
        ({"type": "number"}, "2.5", 2.5),
        ({"type": "number"}, "1e999", "1e999"),
        ({"type": "boolean"}, "True", True),
        ({"type": "boolean"}, "false", False),
        ({"type": "boolean"}, "1", "1"),
        ({"type": "array"}, "[1, 2,]", [1, 2]),
        ({"type": "array"}, "{}", "{}"),
        ({"type": "object"}, '{"a": {"b": null}}', {"a": {"b": None}}),
        ({"type": ["integer", "null"]}, "null", None),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "None", None),
        ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, "x", "x"),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({}, "5", 5),
        ({}, "five", "five"),
        ({}, '"five"', '"five"'),
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
def test_a_closing_tag_inside_a_value_does_not_end_it(name: str) -> None:
    closing = {"glm45": "</arg_value>", "minimax-m2": "</parameter>", "qwen3_coder": "</parameter>"}[name]
    query = f"write {closing} here"
    text = WRITINGS[name].replace('Köln "am" Rhein\nnow', query)
    assert read(name, text).tool_calls[0].arguments["query"] == query


def test_trailing_commas_and_line_breaks_in_strings_are_accepted_and_commas_in_strings_are_kept() -> None:
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
def test_what_only_resembles_a_pythonic_call_is_content(text: str) -> None:
    assert read("pythonic", text) == (text, (), None)


@pytest.mark.parametrize("text", ['{"answer": 5}', '{"name": "Bob", "age": 5}', '{"name": "Bob"}', '{"type": "x"}', "{x}"])
def test_an_answer_in_json_is_not_a_llama_call(text: str) -> None:
    assert read("llama3", text) == (text, (), None)


def test_a_llama_call_of_a_known_tool_needs_no_arguments() -> None:
    assert only(read("llama3", '{"name": "now"}')).name == "now"


def test_llama_built_in_calls_are_read() -> None:
    call = only(read("llama3", '<|python_tag|>brave_search.call(query="rain")<|eom_id|>'))
    assert (call.name, call.arguments) == ("brave_search", {"query": "rain"})


def test_end_marks_behind_the_last_call_are_not_content() -> None:
    assert read("llama3", '{"name": "find", "parameters": {}}<|eom_id|>').content == ""
    assert read("hermes", '<tool_call>{"name": "now"}</tool_call><|im_end|>').content == ""


def test_ids_are_numbered_or_the_models_own_where_templates_need_them() -> None:
    assert [c.id for c in make("hermes").parse(WRITINGS["hermes"], id_prefix="c").tool_calls] == ["c_0", "c_1"]
    kimi = WRITINGS["kimi_k2"]
    assert [c.id for c in read("kimi_k2", kimi).tool_calls] == ["functions.find:0", "functions.now:1"]
    twice = kimi.replace("functions.now:1", "functions.find:0")
    assert [c.id for c in read("kimi_k2", twice).tool_calls] == ["functions.find:0", "call_1"]
    made = [c.id for c in read("mistral", WRITINGS["mistral"]).tool_calls]
    assert len(set(made)) == 2
    assert all(len(i) == 9 and i.isalnum() for i in made)
    assert read("mistral", VARIANTS[3][1]).tool_calls[1].id == "abcDEF123"


def test_a_harmony_turn_without_marks_is_content_and_final_is_content() -> None:
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


def test_plain_parser_is_called_none() -> None:
    assert parsers.resolve("none") is PlainParser


def test_an_opening_tag_in_an_argument_is_part_of_the_argument() -> None:
    said = '<tool_call>\n{"name": "f", "arguments": {"a": "<tool_call>x</tool_call> <tool_call>"}}\n</tool_call>'
    (call,) = parsers.resolve("hermes")().parse(said).tool_calls
    assert (dict(call.arguments), call.error) == ({"a": "<tool_call>x</tool_call> <tool_call>"}, None)


def test_a_block_that_is_not_closed_does_not_swallow_the_next_one() -> None:
    said = '<tool_call>{"name": "f", "arguments": {}}\n<tool_call>{"name": "g", "arguments": {}}</tool_call>'
    broken, call = parsers.resolve("hermes")().parse(said).tool_calls
    assert "not closed" in (broken.error or "") and call.name == "g"
