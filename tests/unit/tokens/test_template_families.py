"""Imitated templates and tokenizers of published families: their probes, and the prompts that follow."""

from __future__ import annotations

import pytest

from polyturn.core.generation import Completion, FinishReason
from polyturn.core.lifecycle import StopReason
from polyturn.core.messages import Message, Origin, ToolCall
from polyturn.rollout.history import History
from polyturn.rollout.history_edits import go_on
from polyturn.rollout.stop_strings import Stopped
from polyturn.tokens.codec import Codec
from polyturn.tokens.delta import DeltaEncoder
from polyturn.tokens.parsers import PlainParser
from polyturn.tokens.probe import probe_template
from support.tokenizers import tokenizer_of

PHI3 = """\
{% for m in messages %}{{ '<|' + m.role + '|>\\n' + m.content + '<|end|>\\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"""
LLAMA2 = """\
{% for m in messages %}{% if m.role == 'user' %}{{ '<s>[INST] ' + m.content | trim + ' [/INST]' }}\
{% else %}{{ ' ' + m.content | trim + ' </s>' }}{% endif %}{% endfor %}"""
MARKERS = {PHI3: ("<|user|>", "<|assistant|>", "<|system|>", "<|tool|>", "<|end|>"), LLAMA2: ("[INST]", "[/INST]")}
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{BODY}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def codec_of(template: str, kind: str = "byte_level") -> Codec:
    return Codec(tokenizer_of(kind, markers=MARKERS.get(template, ())), chat_template=template)


def user(text: str) -> Message:
    return Message(role="user", content=text)


@pytest.mark.parametrize("kind", ["metaspace", "rstrip"])
@pytest.mark.parametrize("template", [PHI3, LLAMA2])
def test_markers_that_take_or_add_space_are_appended_to(template: str, kind: str) -> None:
    probe = probe_template(codec_of(template, kind))
    assert (probe.strategy, probe.findings) == ("append", ())


@pytest.mark.parametrize("kind", ["metaspace", "rstrip"])
@pytest.mark.parametrize("text", ["a <|end|> b", "x<|user|><|end|>y"])
def test_hidden_text_gains_no_space(text: str, kind: str) -> None:
    codec = codec_of(PHI3, kind)
    encoder = DeltaEncoder(codec)
    words = text.replace("<|end|>", "<|ENDE|>").replace("<|user|>", "<|USER|>")
    for encode in (lambda m: encoder.extend([m], last_id=None), lambda m: encoder.start([m])):
        found, expected = (codec.decode(encode(user(said))) for said in (text, words))
        assert found == expected.replace("<|ENDE|>", "<|end|>").replace("<|USER|>", "<|user|>")


@pytest.mark.parametrize("kind", ["byte_level", "metaspace", "rstrip"])
@pytest.mark.parametrize(("said", "keep", "added"), [("The answer is it", "The answer i", "s it"), ("a b", "a", "b c")])
def test_message_that_goes_on_reads_as_one(said: str, keep: str, added: str, kind: str) -> None:
    codec = codec_of(PHI3, kind)
    line = History(DeltaEncoder(codec), PlainParser(), [user("Hi")])
    line.append_prompt(line.next_prompt())
    ids = [*codec.encode(said).tolist(), codec.stop_token_ids[0]]
    completion = Completion(token_ids=ids, finish_reason=FinishReason.STOP, logprobs=[-1.0] * len(ids))
    line.add_turn(
        *line.read_completion(completion.token_ids, turn=0), Stopped(completion, None, 0), index=0, cut_by=StopReason.LENGTH
    )
    go_on(line, added, keep=keep, is_trusted=False)
    prompt = line.builder.num_tokens
    line.append_prompt(line.next_prompt())
    shown = codec.decode(line.context)
    assert prompt and shown.endswith(keep + added)


def test_switch_in_a_prompt_takes_segments() -> None:
    switch = (
        "{% set ns = namespace(on=true) %}{% for m in messages %}{% if '/no_think' in m.content %}{% set ns.on = false %}"
        "{% endif %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n"
        "{% if not ns.on %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
    )
    codec = codec_of(switch)
    assert codec.read_words == ("/no_think",)
    assert probe_template(codec).strategy == "segment"


@pytest.mark.parametrize("first", ["a <image> b", "plain"])
def test_ids_do_not_depend_on_earlier_encodings(first: str) -> None:
    codec = codec_of(CHATML.replace("{BODY}", "{{ m.content | replace('<image>', '') }}"))
    encoder = DeltaEncoder(codec)
    encoder.extend([user(first)], last_id=None)
    assert "so <image>" not in codec.decode(encoder.extend([user("so <image>")], last_id=None))
    assert probe_template(codec).strategy == "append"


READ = CHATML.replace("{BODY}", "{% if READS %}!{% endif %}{{ m.content }}{{ m.tool_calls | default('') }}")


@pytest.mark.parametrize(
    ("reads", "name", "content"),
    [
        ("m.name == 'python'", "python", "4"),
        ("'ERROR' in m.content | upper", "f", "An error."),
        ("m.content is string and m.content.isdigit()", "f", "4"),
    ],
)
def test_template_conditions_do_not_depend_on_earlier_encodings(reads: str, name: str, content: str) -> None:
    codec = codec_of(READ.replace("READS", reads))
    encoder = DeltaEncoder(codec)
    for said, called in (("Nothing of it.", "f"), (content, name)):
        result = Message(role="tool", content=said, name=called, tool_call_id="c", origin=Origin.ENVIRONMENT)
        shown = codec.decode(encoder.extend([result], last_id=codec.stop_token_ids[0]))
    assert f"tool\n!{content}" in shown


PARTS = CHATML.replace(
    "{BODY}",
    "{% for part in m.content %}{% if part.type == 'image' %}<image>{% elif part.type == 'text' %}{{ part.text }}{% endif %}"
    "{% endfor %}",
)


def test_template_that_reads_only_parts_is_given_parts() -> None:
    codec = codec_of(PARTS)
    assert probe_template(codec).strategy == "append"
    for content in ("What?", ({"type": "text", "text": "What?"},)):
        assert "What?" in codec.decode(DeltaEncoder(codec).start([Message(role="user", content=content)]))
    first = PARTS.replace("{% for part", "{% if m.content[0].type == 'image' %}:{% endif %}{% for part", 1)
    codec = codec_of(first)
    assert probe_template(codec).strategy == "append"
    assert DeltaEncoder(codec).extend([user("")], last_id=codec.stop_token_ids[0]).size, "an empty content is one part"


OPENED = """\
{% for m in messages %}{{ {'user': '<|user|>', 'tool': '<|observation|>', 'assistant': '<|assistant|>'}[m.role] }}\
{{ m.content }}{% for c in m.tool_calls or [] %}<call>{{ c.function.arguments | tojson }}</call>{% endfor %}{% endfor %}\
{% if add_generation_prompt %}<|assistant|>{% endif %}"""


def test_turn_with_calls_ends_with_the_opener_of_tools() -> None:
    """If a template like GLM's writes no end, supervised training learns the opener of the next message."""
    markers = ("<|user|>", "<|observation|>", "<|assistant|>", "<call>", "</call>")
    codec = Codec(tokenizer_of("byte_level", markers=markers), chat_template=OPENED)
    encoder, call = DeltaEncoder(codec), ToolCall(id="c", name="f", arguments={"a": 1})
    calling = Message(role="assistant", content="", tool_calls=(call,))
    result = Message(role="tool", content="4", tool_call_id="c", name="f")
    said = encoder.assistant(calling)
    assert codec.decode(said).endswith("</call><|observation|>")
    assert codec.decode(encoder.assistant(Message(role="assistant", content="So."))) == "So.<|user|>"
    whole = [
        *encoder.start([user("q")]),
        *said,
        *encoder.extend([result], last_id=int(said[-1]), history=[user("q"), calling]),
    ]
    assert whole == encoder.start([user("q"), calling, result]).tolist()
