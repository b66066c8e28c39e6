"""The report of `polyturn check`: a template's traits, found by rendering, and its treatment of hostile text."""

import functools
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerBase

from polyturn.cli.markers import add_template_markers
from polyturn.cli.template_report import TemplateReport, report_template
from polyturn.testing.tiny_models import tiny_tokenizer
from polyturn.tokens.codec import Codec, load_codec
from support.cases import each

CODEC = Codec(tiny_tokenizer())
SHARED = Path(__file__).resolve().parents[4] / "shared" / "data"
HAND_WRITTEN = Path(__file__).resolve().parents[2] / "data" / "templates"
PLAIN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@functools.cache
def real_tokenizer() -> PreTrainedTokenizerBase:
    return load_codec(str(SHARED / "tokenizers" / "qwen2")).tokenizer  # type: ignore[no-any-return]


def report(template: str) -> TemplateReport:
    tokenizer, _ = add_template_markers(tiny_tokenizer(), template)
    return report_template(Codec(tokenizer, chat_template=template))


def test_tiny_template_has_no_oddities() -> None:
    found = report_template(CODEC)
    traits = found.traits
    assert traits.is_prefix_preserving
    assert traits.keeps_turn_before_user and traits.keeps_turn_before_tool and traits.keeps_reasoning_before_user
    assert traits.renders_tools and traits.renders_calls and traits.renders_parallel_results and traits.merges_tool_results
    assert traits.renders_reasoning
    assert not any((traits.strips_reasoning, traits.writes_dates, traits.needs_alternation, traits.needs_user_first))
    assert found.inference_strategy == "append"
    assert found.leaks == found.findings == ()
    assert (found.parser, found.stop_tokens) == ("hermes", ("<|im_end|>",))


def test_template_that_strips_reasoning_is_rendered_at_inference() -> None:
    strips = "{% if m.reasoning_content and loop.last %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
    found = report(PLAIN.replace("{{ m.content }}", strips))
    assert found.traits.strips_reasoning and found.traits.renders_reasoning
    assert not found.traits.is_prefix_preserving
    assert (found.probe.strategy, found.inference_strategy, found.parser) == ("append", "segment", "none")


@pytest.mark.parametrize(
    ("name", "facts"),
    [
        ("other_end", {"other_end_in_history": True, "keeps_turn_before_user": False}),
        ("no_end", {"merges_tool_results": True}),
        ("opens_with_think", {"generation_prompt_is_header": False}),
        ("dated_headers", {"writes_dates": True, "writes_today": True, "renders_parallel_results": False}),
        ("alternates", {"needs_alternation": True, "trims_content": True}),
        ("refuses_system", {"takes_system": False}),
    ],
)
def test_traits_are_found_by_rendering(name: str, facts: dict[str, bool]) -> None:
    found = report((HAND_WRITTEN / f"{name}.jinja").read_text(encoding="utf-8"))
    assert {fact: getattr(found.traits, fact) for fact in facts} == facts
    assert found.leaks == ()


@pytest.mark.skipif(not SHARED.exists(), reason="needs the tokenizers and templates in ../shared/data")
@pytest.mark.parametrize(
    ("name", "facts"),
    each(
        3,
        [
            ("qwen2_5", {"renders_tools": True, "keeps_turn_before_user": True, "generation_prompt_is_header": True}),
            ("qwen3", {"renders_tools": True, "keeps_turn_before_user": False, "strips_reasoning": True}),
            ("gemma3", {"renders_tools": False, "needs_alternation": True, "renders_results": False}),
            ("llama3_1", {"renders_tools": True, "writes_dates": True, "renders_parallel_results": False}),
            ("glm4moe", {"renders_tools": True, "strips_reasoning": True, "keeps_reasoning_before_user": False}),
            ("phi3", {"renders_tools": False}),
            ("deepseekv3", {"renders_tools": False, "renders_results": True, "generation_prompt_is_header": False}),
            ("lfm2", {"renders_tools": True, "renders_calls": False, "renders_results": True}),
            ("gptoss", {"other_end_in_history": True, "keeps_turn_before_user": False, "writes_today": True}),
        ],
    ),
)
def test_traits_of_published_templates(name: str, facts: dict[str, bool]) -> None:
    template = (SHARED / "chat_templates" / f"{name}.jinja").read_text(encoding="utf-8")
    tokenizer, _ = add_template_markers(real_tokenizer(), template)
    found = report_template(Codec(tokenizer, chat_template=template))
    assert {fact: getattr(found.traits, fact) for fact in facts} == facts
    assert found.leaks == ()


def test_markers_without_a_token_are_named() -> None:
    template = PLAIN.replace("<|im_start|>", "<|turn|>")
    found = report_template(Codec(tiny_tokenizer(), chat_template=template))
    assert any("<|turn|>" in finding for finding in found.findings)
    assert report(template).findings == ()


def test_reasoning_without_a_field_is_content() -> None:
    found = report(PLAIN).traits
    assert not found.has_reasoning_field
    assert found.renders_reasoning
    assert not found.strips_reasoning
    assert found.is_prefix_preserving
    cut = report(PLAIN.replace("{{ m.content }}", "{{ m.content if loop.last else m.content.split('</think>')[-1] }}"))
    assert cut.traits.renders_reasoning
    assert cut.traits.strips_reasoning
    assert cut.inference_strategy == "segment"
