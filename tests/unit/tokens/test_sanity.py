"""The sanity check names the differences between the ids of a history and a full render."""

import pytest

from polyturn.core.arrays import Ids, ids_array
from polyturn.core.errors import ConfigError, TemplateError
from polyturn.core.messages import Message, Origin, ToolCall
from polyturn.testing.tiny_models import tiny_tokenizer
from polyturn.tokens.codec import Codec
from polyturn.tokens.delta import DeltaEncoder
from polyturn.tokens.sanity import KINDS, check_mode, differences, refused
from support.differences import check
from support.refusals import refuses

CODEC = Codec(tiny_tokenizer())
HEAD = "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n"
TAIL = "<|im_end|>\n<|im_start|>user\nno<|im_end|>\n<|im_start|>assistant\nok<|im_end|>"


def ids(text: str) -> Ids:
    return CODEC.encode(text)


def kind(held: str, full: str, mode: str = "strict") -> str | None:
    found = check(ids(HEAD + held + TAIL), ids(HEAD + full + TAIL + "\n"), CODEC, mode)
    return None if found is None else found.kind


@pytest.mark.parametrize(
    ("held", "full"), [("a", "a"), ("a", "a<|im_end|>\n"), ("a<|im_end|>", "a<|im_end|>\n"), ("a<|im_end|>", "a"), ("", "")]
)
def test_text_behind_the_last_turn_is_not_a_difference(held: str, full: str) -> None:
    assert check(ids(HEAD + held), ids(HEAD + full), CODEC) is None


CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'


@pytest.mark.parametrize(
    ("held", "full", "expected"),
    [
        ("same", "same", None),
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
def test_difference_is_named(held: str, full: str, expected: str | None) -> None:
    assert kind(held, full) == expected


def test_same_text_in_other_tokens_is_a_merge() -> None:
    held = ids_array([*ids(HEAD), *(ids(letter)[0] for letter in "function"), *ids(TAIL)])
    full = ids(HEAD + "function" + TAIL)
    found = check(held, full, CODEC)
    assert found.kind == "merge"
    assert check(held, full, CODEC, "ignore_strippable") is None


def test_turn_opened_differently_is_a_generation_prompt() -> None:
    template = (CODEC.chat_template or "").replace("assistant\\n' -}}{%- endif", "assistant\\n<think>' -}}{%- endif")
    codec = Codec(tiny_tokenizer(), chat_template=template)
    assert codec.generation_prompt.endswith("<think>")
    encoder = DeltaEncoder(codec)
    first, turn = [Message(role="user", content="q")], Message(role="assistant", content="a")
    held = [*encoder.start(first), *codec.encode("a<|im_end|>")]
    found = check(held, encoder.full([*first, turn]), codec)
    assert found.kind == "generation_prompt"


def test_first_difference_comes_with_place_and_context() -> None:
    found = check(ids(HEAD + "the right answer" + TAIL), ids(HEAD + "the wrong answer" + TAIL), CODEC)
    assert found.index == found.full_index == len(ids(HEAD + "the"))
    assert found.block == 1
    assert "right" in found.kept
    assert "wrong" in found.full


def test_unknown_mode_comes_with_the_closest_one() -> None:
    assert [check_mode(mode) for mode in ("strict", "off", "disable")] == ["strict", "off", "off"]
    refuses(lambda: check_mode("stric"), ConfigError, "'strict'")


def test_lenient_mode_passes_over_strippable_differences() -> None:
    assert kind("a  b", "a b", "ignore_strippable") is None
    assert kind("a  b", "a b c", "ignore_strippable") == "other"
    held, full = HEAD + "a  b" + TAIL + "\n<|im_start|>user\nx", HEAD + "a b" + TAIL + "\n<|im_start|>user\ny"
    found = check(ids(held), ids(full), CODEC, "ignore_strippable")
    assert (found.kind, found.block) == ("other", 4)


def test_broken_call_is_compared_as_written() -> None:
    raw = "<tool_call>\n{oops\n</tool_call>"
    call = ToolCall(id="c", name="", raw=raw, error="not JSON")
    turn = Message(role="assistant", content="", tool_calls=(call,), origin=Origin.MODEL)
    encoder = DeltaEncoder(CODEC)
    first = [Message(role="user", content="q")]
    held = [*encoder.start(first), *ids(raw + "<|im_end|>")]
    assert check(held, encoder.full([*first, turn]), CODEC) is None


def test_every_different_turn_is_reported_with_its_kind() -> None:
    held = HEAD + "<think>hm</think>a" + TAIL + "\n<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\nb  c"
    full = HEAD + "a" + TAIL + "\n<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\nb c<|im_end|>\n"
    found = differences(ids(held), ids(full), CODEC)
    assert [(d.kind, d.block) for d in found] == [("reasoning_stripped", 1), ("whitespace", 5)]
    assert [d.kind for d in differences(ids(held), ids(full), CODEC, "ignore_strippable")] == ["reasoning_stripped"]
    assert {d.kind for d in found} <= set(KINDS)


def test_missing_turn_does_not_shift_the_others() -> None:
    assert check(ids(HEAD + "a"), ids(HEAD + "a" + TAIL), CODEC) is not None
    assert check(ids(HEAD + "a" + TAIL), ids(HEAD + "a"), CODEC) is not None
    extra = "<|im_start|>user\nforgotten<|im_end|>\n"
    found = differences(ids(extra + HEAD + "a" + TAIL), ids(HEAD + "a" + TAIL), CODEC)
    assert len(found) == 1
    assert "forgotten" in found[0].kept


OTHER_END = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{{ '<|endoftext|>' if loop.last and m.role == 'assistant' and not add_generation_prompt else '<|im_end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_other_end_token_is_its_own_kind() -> None:
    codec = Codec(tiny_tokenizer(), chat_template=OTHER_END)
    encoder = DeltaEncoder(codec)
    question, again = Message(role="user", content="q"), Message(role="user", content="no")
    turns = [Message(role="assistant", content=text) for text in ("a", "b")]
    held = [*encoder.start([question]), *codec.encode("a<|endoftext|>")]
    held += [*encoder.extend([again], last_id=held[-1]), *codec.encode("b<|endoftext|>")]
    assert codec.decode(held).count("<|im_end|>") == 2, "the sampled end stays and no second one is written"
    full = encoder.full([question, turns[0], again, turns[1]])
    assert [d.kind for d in differences(held, full, codec)] == ["end_token"]


def test_refused_conversation_is_a_difference_with_its_reason() -> None:
    found = refused(TemplateError("roles must alternate"), ids(HEAD), CODEC)
    assert found.kind == "other"
    assert "roles must alternate" in str(found)
