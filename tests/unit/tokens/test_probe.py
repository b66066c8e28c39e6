"""The probe decides how histories grow with a template: append, segment, or an error."""

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import PreTrainedTokenizerBase

from polyturn.cli.markers import add_template_markers
from polyturn.core.errors import TemplateError
from polyturn.testing.tiny_models import tiny_tokenizer
from polyturn.tokens.codec import Codec, load_codec
from polyturn.tokens.probe import TemplateProbe, dialogues, probe_template
from support.cases import each
from support.refusals import refuses

CODEC = Codec(tiny_tokenizer())
SHARED = Path(__file__).resolve().parents[4] / "shared" / "data"
HAND_WRITTEN = Path(__file__).resolve().parents[2] / "data" / "templates"
FACTS = yaml.safe_load((HAND_WRITTEN / "facts.yaml").read_text(encoding="utf-8"))
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOLS = [{"type": "function", "function": {"name": "add", "description": "Add.", "parameters": PARAMETERS}}]
PLAIN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@functools.cache
def real_tokenizer() -> PreTrainedTokenizerBase:
    return load_codec(str(SHARED / "tokenizers" / "qwen2")).tokenizer  # type: ignore[no-any-return]


def probe(template: str, *, tools: Sequence[Mapping[str, Any]] = ()) -> TemplateProbe:
    tokenizer, _ = add_template_markers(tiny_tokenizer(), template)
    return probe_template(Codec(tokenizer, chat_template=template), tools=tools)


def test_tiny_template_is_appended_to() -> None:
    found = probe_template(CODEC, tools=TOOLS)
    found.require()
    assert (found.strategy, found.error, found.findings) == ("append", None, ())
    assert found.takes_system and found.renders_tools and found.renders_results


def test_messages_that_depend_on_the_history_take_segments() -> None:
    found = probe(PLAIN.replace("{{ m.role }}", "{{ m.role }} {{ loop.index }}"))
    found.require()
    assert found.strategy == "segment"
    assert found.findings


@pytest.mark.parametrize(
    ("template", "key"),
    [
        (PLAIN, "tool"),
        ("{{ tools }}" + PLAIN.replace("{{ m.content }}", "{{ m.content if m.role != 'tool' }}"), "tool results"),
    ],
    ids=["no tools", "no results"],
)
def test_template_without_tools_is_refused_for_a_run_with_tools(template: str, key: str) -> None:
    probe(template).require()
    refuses(lambda: probe(template, tools=TOOLS).require(), TemplateError, key)


@pytest.mark.parametrize(
    ("template", "key"),
    [
        (None, "no chat template"),
        ("{% for m in messages %}\n{% endif %}", "line 2"),
        ("{{ raise_exception('no assistants') if messages[-1].role == 'assistant' }}", "an assistant message"),
        (PLAIN.replace("{{ m.content }}", "{{ m.content if m.role != 'assistant' }}"), "an assistant message"),
    ],
    ids=["missing", "no Jinja", "raises", "leaves out turns"],
)
def test_template_that_cannot_work_is_refused(template: str | None, key: str) -> None:
    tokenizer = tiny_tokenizer()
    if template is None:
        tokenizer.chat_template = None
    found = probe_template(Codec(tokenizer, chat_template=template))
    assert found.strategy == "none"
    refuses(lambda: found.require(), TemplateError, key)


@pytest.mark.parametrize("takes_system", [False, True])
def test_dialogues_have_a_system_message_where_it_is_taken(takes_system: bool) -> None:
    tried = list(dialogues(CODEC, tools=TOOLS, takes_system=takes_system))
    assert {dialogue.messages[0].role for dialogue in tried} == ({"user", "system"} if takes_system else {"user"})
    assert {len(list(dialogue.replies())) for dialogue in tried} == {4}


@pytest.mark.parametrize("name", [name for name in FACTS["hand_written"] if name != "plain_text"])
def test_template_that_looks_back_takes_segments(name: str) -> None:
    found = probe((HAND_WRITTEN / f"{name}.jinja").read_text(encoding="utf-8"))
    assert (found.error, found.strategy) == (None, "segment" if FACTS["hand_written"][name].get("looks_back") else "append")


@pytest.mark.skipif(not SHARED.exists(), reason="needs the tokenizers and templates in ../shared/data")
@pytest.mark.parametrize("name", each(4, [*FACTS["published"]]))
def test_published_template_is_appended_to(name: str) -> None:
    template = (SHARED / "chat_templates" / f"{name}.jinja").read_text(encoding="utf-8")
    tokenizer, _ = add_template_markers(real_tokenizer(), template)
    codec = Codec(tokenizer, chat_template=template)
    found = probe_template(codec)
    assert (found.error, found.strategy) == (None, "append")
    with_tools = probe_template(codec, tools=TOOLS)
    shows_tools = found.renders_tools and found.renders_results
    assert (with_tools.strategy, with_tools.error is None) == (("append", True) if shows_tools else ("none", False))
