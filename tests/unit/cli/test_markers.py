"""The markers of a chat template, each of which gets a token."""

from __future__ import annotations

import pytest

from polyturn.cli.markers import add_template_markers, template_markers
from polyturn.core.errors import TemplateError
from polyturn.testing.tiny_models import tiny_tokenizer
from polyturn.tokens.codec import Codec
from support.refusals import refuses

LOOP = "{% for m in messages %}%s{% endfor %}"


@pytest.mark.parametrize(
    ("template", "markers"),
    [
        ("<|user|>{{ m.content }}<|end|>", ("<|user|>", "<|end|>")),
        ("{{ '<｜User｜>' + m.content }}", ("<｜User｜>",)),
        ("{{ '[INST] ' + m.content + ' [/INST]' }}</s>", ("[INST]", "[/INST]", "</s>")),
        ("<start_of_turn>{{ m.role }}\n{{ m.content }}<end_of_turn>", ("<start_of_turn>", "<end_of_turn>")),
        ("{{ '<' ~ m.role ~ '>' ~ m.content }}", ("<system>", "<user>", "<assistant>", "<tool>")),
        ("{{ m.content.split('</think>')[-1] }}", ("</think>",)),
        ("{# <|comment|> #}{{ m.content }}", ()),
        ("{{ m.content }} <tools> holds the signatures of what you may call", ()),
    ],
)
def test_markers_are_found_in_literals_and_renders(template: str, markers: tuple[str, ...]) -> None:
    assert template_markers(LOOP.replace("%s", template) if "holds" not in template else template) == markers


def test_prose_of_a_tool_instruction_is_text() -> None:
    template = "{% if tools %}Answer <tool_call> with the name of one of <tools> and its arguments{% endif %}"
    template += LOOP.replace("%s", "<|user|>{{ m.content }}{% if m.tool_calls %}<tool_call>x</tool_call>{% endif %}")
    assert template_markers(template) == ("<|user|>", "<tool_call>", "</tool_call>")


def test_copy_gets_the_missing_markers() -> None:
    tokenizer = tiny_tokenizer()
    size = len(tokenizer)
    changed, added = add_template_markers(tokenizer, LOOP.replace("%s", "<|user|>{{ m.content }}<|im_end|>"))
    assert added == ("<|user|>",)
    assert len(changed) == size + 1
    assert len(tokenizer) == size
    codec = Codec(changed)
    assert len(codec.encode("<|user|>")) == 1
    assert codec.control_tokens[size] == "<|user|>"
    assert codec.decode(codec.encode_plain("<|user|>")) == "<|user|>"
    assert not len(codec.control_in(codec.encode_plain("<|user|>")))


def test_missing_or_broken_template_is_refused() -> None:
    refuses(lambda: template_markers("{{ a }}\n{{ 'unclosed }}"), TemplateError, "line 2")
    tokenizer = tiny_tokenizer()
    assert add_template_markers(tokenizer) == (tokenizer, ()), "one that lacks nothing stays as it is"
    tokenizer.chat_template = None
    refuses(lambda: add_template_markers(tokenizer), TemplateError, "no chat template")
