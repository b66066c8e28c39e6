"""The sanity check names what differs, and the probe says what a template does."""

from pathlib import Path

import pytest

from polyturn.core.arrays import Ids, ids_array
from polyturn.core.errors import ConfigError, TemplateError
from polyturn.core.messages import Message, ToolCall
from polyturn.testing.tiny import tiny_tokenizer
from polyturn.tokens.codec import Codec, load_codec
from polyturn.tokens.delta import DeltaEncoder
from polyturn.tokens.sanity import check, probe

CODEC = Codec(tiny_tokenizer())
SHARED = Path(__file__).resolve().parents[4] / "shared" / "data"
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
HEAD = "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n"
TAIL = "<|im_end|>\n<|im_start|>user\nno<|im_end|>\n<|im_start|>assistant\nok<|im_end|>"


def ids(text: str) -> Ids:
    return CODEC.encode(text)


def kind(held: str, full: str, mode: str = "strict") -> str | None:
    found = check(ids(HEAD + held + TAIL), ids(HEAD + full + TAIL + "\n"), CODEC, mode)
    return None if found is None else found.kind


def test_equal_ids_are_no_difference() -> None:
    assert kind("same", "same") is None


@pytest.mark.parametrize(
    ("held", "full"), [("a", "a"), ("a", "a<|im_end|>\n"), ("a<|im_end|>", "a<|im_end|>\n"), ("a<|im_end|>", "a"), ("", "")]
)
def test_what_the_template_writes_behind_the_last_turn_is_no_difference(held: str, full: str) -> None:
    assert check(ids(HEAD + held), ids(HEAD + full), CODEC) is None


CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'


@pytest.mark.parametrize(
    ("held", "full", "expected"),
    [
        ("the answer", "an answer", "other"),
        ("the  answer\n", "the answer", "whitespace"),
        ("<think>\nhm\n</think>\n\nfour", "four", "reasoning_stripped"),
        ("four", "<think>\n\n</think>\n\nfour", "reasoning_stripped"),
        ("hm\n</think>\n\nfour", "four", "reasoning_stripped"),
        ('<tool_call>{"name":"add","arguments":{"b":2,"a":1}}</tool_call>', CALL, "tool_call_json"),
        (
            'Now <tool_call>{"arguments": "{\\"a\\": 1, \\"b\\": 2}", "name": "add"}</tool_call>',
            "Now\n" + CALL,
            "tool_call_json",
        ),
        ('<tool_call>{"name": "add", "arguments": {"a": 9}}</tool_call>', CALL, "other"),
    ],
)
def test_a_difference_is_named(held: str, full: str, expected: str) -> None:
    assert kind(held, full) == expected


def test_the_same_text_in_other_tokens_is_a_merge() -> None:
    held = ids_array([*ids(HEAD), *(ids(letter)[0] for letter in "function"), *ids(TAIL)])
    full = ids(HEAD + "function" + TAIL)
    found = check(held, full, CODEC)
    assert found is not None
    assert found.kind == "merge"
    assert check(held, full, CODEC, "ignore_strippable") is None


def test_a_turn_that_history_opens_differently_is_a_generation_prompt() -> None:
    template = (CODEC.chat_template or "").replace("assistant\\n' -}}{%- endif", "assistant\\n<think>' -}}{%- endif")
    codec = Codec(tiny_tokenizer(), chat_template=template)
    assert codec.generation_prompt.endswith("<think>")
    encoder = DeltaEncoder(codec)
    first, turn = [Message(role="user", content="q")], Message(role="assistant", content="a")
    held = [*encoder.start(first), *codec.encode("a<|im_end|>")]
    found = check(held, encoder.full([*first, turn]), codec)
    assert found is not None
    assert found.kind == "generation_prompt"


def test_the_first_difference_comes_with_its_place_and_context() -> None:
    found = check(ids(HEAD + "the right answer" + TAIL), ids(HEAD + "the wrong answer" + TAIL), CODEC)
    assert found is not None
    assert found.index == found.full_index == len(ids(HEAD + "the"))
    assert found.block == 1
    assert "right" in found.held
    assert "wrong" in found.full
    assert "other at token" in str(found)


def test_strippable_differences_are_passed_over_to_the_next_one() -> None:
    assert kind("a  b", "a b", "ignore_strippable") is None
    assert kind("a  b", "a b c", "ignore_strippable") == "other"
    held, full = HEAD + "a  b" + TAIL + "\n<|im_start|>user\nx", HEAD + "a b" + TAIL + "\n<|im_start|>user\ny"
    found = check(ids(held), ids(full), CODEC, "ignore_strippable")
    assert found is not None
    assert (found.kind, found.block) == ("other", 4)


def test_a_missing_turn_is_a_difference() -> None:
    assert check(ids(HEAD + "a"), ids(HEAD + "a" + TAIL), CODEC) is not None
    assert check(ids(HEAD + "a" + TAIL), ids(HEAD + "a"), CODEC) is not None


@pytest.mark.parametrize("mode", ["off", "disable"])
def test_the_check_can_be_switched_off(mode: str) -> None:
    assert kind("a", "b", mode) is None


def test_an_unknown_mode_comes_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'strict'"):
        kind("a", "b", "stric")


def test_the_probe_finds_nothing_odd_in_the_tiny_template() -> None:
    report = probe(CODEC, tools=TOOLS)
    report.require()
    assert report.keeps_turn_before_user
    assert report.keeps_turn_before_tool
    assert report.keeps_reasoning_before_user
    assert report.renders_tools
    assert report.renders_calls
    assert report.renders_parallel_results
    assert report.generation_prompt_is_header
    assert not any((report.strips_reasoning, report.writes_dates, report.needs_alternation, report.needs_user_first))
    assert report.strategy == "append"


def test_a_template_without_tools_is_refused_only_when_the_run_has_tools() -> None:
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    codec = Codec(tiny_tokenizer(), chat_template=template)
    probe(codec).require()
    with pytest.raises(TemplateError, match=r"1 tool\(s\) and the chat template renders none"):
        probe(codec, tools=TOOLS).require()


def test_a_codec_without_template_is_an_error_of_the_report() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    assert "has no chat template" in (probe(Codec(tokenizer)).error or "")


@pytest.mark.skipif(not SHARED.exists(), reason="needs the tokenizers and templates in ../shared/data")
@pytest.mark.parametrize(
    ("name", "facts"),
    [
        ("qwen2_5", {"renders_tools": True, "keeps_turn_before_user": True, "generation_prompt_is_header": True}),
        ("qwen3", {"renders_tools": True, "keeps_turn_before_user": False, "strips_reasoning": True}),
        ("gemma3", {"renders_tools": False, "needs_alternation": True, "renders_results": False}),
        ("llama3_1", {"renders_tools": True, "writes_dates": True, "renders_parallel_results": False}),
        ("glm4moe", {"renders_tools": True, "strips_reasoning": True, "generation_prompt_is_header": False}),
        ("phi3", {"renders_tools": False}),
        ("deepseekv3", {"renders_tools": False, "renders_results": True}),
        ("lfm2", {"renders_tools": True, "renders_calls": False, "renders_results": True}),
    ],
)
def test_published_templates_are_read_right(name: str, facts: dict[str, bool]) -> None:
    codec = load_codec(str(SHARED / "tokenizers" / "qwen2"), chat_template=str(SHARED / "chat_templates" / f"{name}.jinja"))
    report = probe(codec)
    assert {fact: getattr(report, fact) for fact in facts} == facts


def test_a_broken_call_in_the_history_is_compared_as_written() -> None:
    raw = "<tool_call>\n{oops\n</tool_call>"
    turn = Message(role="assistant", content="", tool_calls=(ToolCall(id="c", name="", raw=raw, error="not JSON"),))
    encoder = DeltaEncoder(CODEC)
    first = [Message(role="user", content="q")]
    held = [*encoder.start(first), *ids(raw + "<|im_end|>")]
    assert check(held, encoder.full([*first, turn]), CODEC) is None
