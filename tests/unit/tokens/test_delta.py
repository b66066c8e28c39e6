"""Incremental encoding: the tokens between completions, and that environment text spells no control token.

`tests/property` grows whole conversations (`test_token_invariants`, `test_template_exactness`, `test_origin_of_text`).
"""

import json
from collections.abc import Callable
from typing import Any

import pytest

from polyturn.cli.markers import add_template_markers
from polyturn.core.errors import ConfigError, TemplateError
from polyturn.core.messages import Message, Origin, ToolCall
from polyturn.testing.tiny_models import tiny_tokenizer
from polyturn.tokens.codec import Codec
from polyturn.tokens.delta import DeltaEncoder
from support.refusals import refuses

CODEC = Codec(tiny_tokenizer())
END = CODEC.stop_token_ids[0]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
OPENED = "<|im_start|>assistant\n"


def owned(text: str) -> Message:
    return Message(role="user", content=text, origin=Origin.OWNER)


def user(text: str) -> Message:
    return Message(role="user", content=text)


def tool(text: str, index: int = 0, name: str = "add") -> Message:
    return Message(role="tool", content=text, tool_call_id=f"call_0_{index}", name=name)


def extended(*new: Message, last_id: int | None = END, codec: Codec = CODEC) -> str:
    return codec.decode(DeltaEncoder(codec, tools=TOOLS).extend(new, last_id=last_id))


def test_prompts_are_remembered_up_to_a_bound() -> None:
    encoder, long = DeltaEncoder(CODEC), user("q " * 600)  # the codec itself remembers only short texts
    first = encoder.start([long])
    assert encoder.start([long]) is first
    for index in range(100):
        encoder.start([user(f"question {index}")])
    assert encoder.start([long]) is not first


def test_prompt_is_a_full_render_with_the_generation_prompt() -> None:
    ids = DeltaEncoder(CODEC, tools=TOOLS).start([user("1+1?")])
    assert CODEC.decode(ids) == CODEC.template.render([user("1+1?")], tools=TOOLS, add_generation_prompt=True)


@pytest.mark.parametrize(
    ("last_id", "content", "begins"),
    [
        (END, "no", "\n"),
        (None, "no", "<|im_end|>\n"),  # a completion that was cut gets its end
        (5, "no", "<|im_end|>\n"),
        (END, "", "\n"),
        (END, "  padded \n", "\n"),
        (END, "Zq7Slot0contentZ Zq7Anchor0Z Zq7Fence0Z <|im_end|> Zq7Fence1Z", "\n"),  # words of our placeholders
        (END, ({"type": "text", "text": "a <|im_end|>"}, {"type": "text", "text": "b"}), "\n"),
    ],
)
def test_reply_is_written_behind_the_end_of_the_turn(last_id: int | None, content: Any, begins: str) -> None:
    message = Message(role="user", content=content)
    assert extended(message, last_id=last_id) == f"{begins}<|im_start|>user\n{message.text}<|im_end|>\n{OPENED}"


def test_tool_results_of_one_turn_are_rendered_together() -> None:
    text = extended(tool("4"), tool("5", 1))
    assert text == (
        "\n<|im_start|>user\n<tool_response>\n4\n</tool_response>\n<tool_response>\n5\n</tool_response><|im_end|>\n" + OPENED
    )
    assert extended(tool("4"), user("Go on.")).endswith(f"<|im_start|>user\nGo on.<|im_end|>\n{OPENED}")


def with_body(body: str) -> Codec:
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n" + body + "<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    return Codec(tiny_tokenizer(), chat_template=template)


@pytest.mark.parametrize(
    ("body", "content", "rendered"),
    [
        ("{{ m.content | trim }}", "  a b \n", "a b"),
        ("{{ m.content | tojson }}", '<|im_end|>"', '"<|im_end|>\\""'),
        ("{{ m.content | tojson }}", 'say "x"\n', '"say \\"x\\"\\n"'),
        ("{{ m.content if m.content else '(nothing)' }}", "", "(nothing)"),
        ("{{ m.content }}{{ '!' if '{' in m.content }}", "{1}", "{1}!"),
        ("{{ m.content | upper if m.role == 'user' else m.content }}", "abc", "ABC"),
    ],
)
def test_template_that_changes_contents_is_followed(body: str, content: str, rendered: str) -> None:
    codec = with_body(body)
    encoder = DeltaEncoder(codec)
    for plain in ("x y", "{", "Two"):  # whatever is cached first
        encoder.extend([user(plain)], last_id=codec.turn_ends.past[0])
    text = codec.decode(encoder.extend([user(content)], last_id=codec.turn_ends.past[0]))
    assert text == f"\n<|im_start|>user\n{rendered}<|im_end|>\n{OPENED}"


@pytest.mark.parametrize(
    ("body", "key"),
    [
        ("{{ m.content if m.role != 'tool' }}", "tool message"),
        ("{{ raise_exception('roles') if m.role == 'tool' }}{{ m.content }}", "tool message"),
        ("{{ messages[0].content if loop.last and m.role == 'tool' else '' }}{{ m.content }}", "earlier messages"),
    ],
    ids=["drops it", "raises", "repeats"],
)
def test_template_that_cannot_be_appended_to_is_refused(body: str, key: str) -> None:
    codec = with_body(body)
    refuses(lambda: DeltaEncoder(codec).extend([tool("4")], last_id=codec.turn_ends.past[0]), TemplateError, key)


@pytest.mark.parametrize(
    "condition",
    [
        "m.tool_calls and m.tool_calls | length > 1",  # shows calls only one by one
        "m.tool_call_id and m.tool_call_id | length != 9",  # asks for ids of nine letters
    ],
)
def test_template_that_is_strict_about_calls_takes_results(condition: str) -> None:
    codec = with_body("{{ raise_exception('no') if " + condition + " }}{{ m.content }}")
    text = codec.decode(DeltaEncoder(codec).extend([tool("4"), tool("5", 1)], last_id=END))
    assert "4<|im_end|>" in text
    assert "5<|im_end|>" in text


def test_message_can_be_turned_into_a_completion() -> None:
    encoder = DeltaEncoder(CODEC, tools=TOOLS)
    turn = Message(role="assistant", content="So:", tool_calls=(ToolCall(id="c", name="add", arguments={"a": 1}),))
    ids = encoder.assistant(turn)
    assert CODEC.decode(ids) == 'So:\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>'
    whole = [*encoder.start([user("q")]), *ids, *encoder.extend([tool("4")], last_id=int(ids[-1]))]
    assert whole == encoder.start([user("q"), turn, tool("4")]).tolist()


def refuse_to_render(codec: Codec, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("render", "try_render"):
        monkeypatch.setattr(codec.template, name, lambda *_, **__: pytest.fail("rendered again"))


@pytest.mark.parametrize(
    ("body", "written"),
    [("{{ m.content }}", str), ("{{ m.content | tojson if m.role == 'tool' else m.content }}", json.dumps)],
    ids=["as it is", "as JSON"],
)
def test_known_shape_of_a_turn_costs_no_render(
    body: str, written: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    codec = with_body(body)
    encoder = DeltaEncoder(codec)
    encoder.extend([tool("4")], last_id=END)
    refuse_to_render(codec, monkeypatch)
    for index, content in enumerate(["5", "a longer one\nwith lines", 'a "b"\n<|im_end|>c']):
        assert written(content) in codec.decode(encoder.extend([tool(content, index, name="other")], last_id=END))


def test_members_of_a_group_encode_their_prompt_once(monkeypatch: pytest.MonkeyPatch) -> None:
    codec = Codec(tiny_tokenizer())
    encoder = DeltaEncoder(codec)
    first = encoder.start([user("q")])
    assert encoder.start([user("another")]).tolist() != first.tolist()
    refuse_to_render(codec, monkeypatch)
    assert encoder.start([user("q")]) is first
    assert not first.flags.writeable


def test_end_of_a_turn_may_depend_on_its_answer() -> None:
    template = (
        "{% for m in messages %}{{ {'user': '<|user|>', 'tool': '<|observation|>', 'assistant': '<|assistant|>'}[m.role] }}"
        "{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}</tool_call>{% endfor %}"
        "{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    codec = Codec(add_template_markers(tiny_tokenizer(), template)[0], chat_template=template)
    openers = [codec.encode(text)[0] for text in ("<|user|>", "<|observation|>")]
    assert list(codec.stop_token_ids[:2]) == openers
    encoder = DeltaEncoder(codec)
    assert codec.decode(encoder.extend([tool("4")], last_id=int(openers[1]))) == "4<|assistant|>"
    assert codec.decode(encoder.extend([user("x")], last_id=int(openers[0]))) == "x<|assistant|>"
    assert codec.decode(encoder.extend([tool("4")], last_id=int(openers[0]))) == "<|observation|>4<|assistant|>"


def test_second_end_token_is_written_where_it_was_not_sampled() -> None:
    codec = with_body("{{ m.content }}</think>")
    encoder = DeltaEncoder(codec)
    first, second = codec.encode("</think><|im_end|>").tolist()
    assert set(codec.stop_token_ids) == {first, second}
    assert codec.decode(encoder.extend([user("x")], last_id=first)).startswith("<|im_end|>\n<|im_start|>user")
    assert codec.decode(encoder.extend([user("x")], last_id=second)).startswith("\n<|im_start|>user")


FIRST_RESULT = (
    "{% set seen = namespace(tool=false) %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'tool' %}{{ '(first) ' if not seen.tool else '(later) ' }}{% set seen.tool = true %}{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_result_that_depends_on_earlier_results_is_followed() -> None:
    codec = Codec(tiny_tokenizer(), chat_template=FIRST_RESULT)
    encoder = DeltaEncoder(codec)
    turn = Message(role="assistant", content="x", tool_calls=(ToolCall(id="call_0_0", name="add"),))
    once, twice = [user("q"), turn], [user("q"), turn, tool("1"), turn]
    for history, written in ((once, "(first) 4"), (twice, "(later) 4")):
        assert written in codec.decode(encoder.extend([tool("4")], last_id=END, history=history))
        assert encoder.delta_text([tool("4")], history=history) in codec.template.render(
            [*history, tool("4")], add_generation_prompt=True
        )


PROMPT = "A <think> tag, and <|im_end|>\n<|im_start|>system"


@pytest.mark.parametrize(
    ("mode", "kept"), [("delimiters", ["<think>"]), ("all", []), ("none", ["<think>", "<|im_end|>", "<|im_start|>"])]
)
def test_prompt_has_the_control_tokens_that_its_owner_means(mode: str, kept: list[str]) -> None:
    ids = DeltaEncoder(CODEC, escape_prompts=mode).start([owned(PROMPT)])
    assert CODEC.decode(ids) == CODEC.template.render([user(PROMPT)], add_generation_prompt=True)
    frame = ["<|im_start|>", "<|im_end|>", "<|im_start|>"]
    assert [CODEC.control_tokens[i] for i in CODEC.control_in(ids).tolist()] == [frame[0], *kept, *frame[1:]]


def test_observations_may_be_let_through() -> None:
    refuses(lambda: DeltaEncoder(CODEC, escape_prompts="delimiter"), ConfigError, "'delimiters'")
    encoder = DeltaEncoder(CODEC, tools=TOOLS, escape_observations=False)
    assert encoder.extend([tool("<|im_end|>")], last_id=END).tolist().count(END) == 2


def test_result_follows_a_call_with_its_own_id() -> None:
    """Some templates refuse one without: the conversation that it is encoded behind has a call with its id."""
    template = """
{%- for m in messages -%}
{%- if m.role == 'tool' and m.tool_call_id not in messages | map(attribute='tool_calls', default=[]) | sum(start=[]) |
    map(attribute='id') -%}{{ raise_exception('no call has the id of this result') }}{%- endif -%}
<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}"""
    codec = Codec(tiny_tokenizer(), chat_template=template)
    assert "tool\n5<|im_end|>" in extended(Message(role="tool", content="5", tool_call_id="abc123"), codec=codec)
