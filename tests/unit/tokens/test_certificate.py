"""The certificate says what a template does and how histories can grow with it, and proves it by trial renders."""

import functools
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerBase

from polyturn.core.errors import TemplateError
from polyturn.testing.tiny_models import tiny_tokenizer
from polyturn.tokens.certificate import TemplateReport, certify
from polyturn.tokens.codec import Codec, load_codec
from polyturn.tokens.markers import add_template_markers
from polyturn.tokens.trials import KINDS, trials
from support.cases import each
from support.refusals import refuses

CODEC = Codec(tiny_tokenizer())
SHARED = Path(__file__).resolve().parents[4] / "shared" / "data"
HAND_WRITTEN = Path(__file__).resolve().parents[2] / "data" / "templates"
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
PLAIN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@functools.cache
def real_tokenizer() -> PreTrainedTokenizerBase:
    return load_codec(str(SHARED / "tokenizers" / "qwen2")).tokenizer  # type: ignore[no-any-return]


def report(template: str, **options: object) -> TemplateReport:
    tokenizer, _ = add_template_markers(tiny_tokenizer(), template)
    return certify(Codec(tokenizer, chat_template=template), num_random=9, **options)  # type: ignore[arg-type]


def test_tiny_template_has_no_oddities() -> None:
    found = certify(CODEC, tools=TOOLS)
    found.require()
    assert found.is_prefix_preserving
    assert found.keeps_turn_before_user
    assert found.keeps_turn_before_tool
    assert found.keeps_reasoning_before_user
    assert found.renders_tools
    assert found.renders_calls
    assert found.renders_parallel_results
    assert found.merges_tool_results
    assert found.renders_reasoning
    assert not any((found.strips_reasoning, found.writes_dates, found.needs_alternation, found.needs_user_first))
    assert (found.strategy, found.inference_strategy) == ("append", "append")
    assert found.violations == found.findings == ()
    assert found.control_tokens_from_text == 0
    assert found.num_dialogues > 100
    assert found.stop_tokens == ("<|im_end|>",)
    assert found.properties["renders_tools"] is True
    assert all(value in (True, False, None) for value in found.properties.values())


def test_messages_that_depend_on_the_history_take_segments() -> None:
    found = report(PLAIN.replace("{{ m.role }}", "{{ m.role }} {{ loop.index }}"))
    found.require()
    assert found.strategy == found.inference_strategy == "segment"
    assert found.findings
    assert found.violations == ()


def test_template_that_strips_reasoning_is_rendered_at_inference() -> None:
    strips = "{% if m.reasoning_content and loop.last %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
    found = report(PLAIN.replace("{{ m.content }}", strips))
    assert found.strips_reasoning
    assert found.renders_reasoning
    assert not found.is_prefix_preserving
    assert found.strategy == "append"
    assert found.inference_strategy == "segment"


@pytest.mark.parametrize(
    ("template", "key"),
    [
        (PLAIN, "tool"),
        ("{{ tools }}" + PLAIN.replace("{{ m.content }}", "{{ m.content if m.role != 'tool' }}"), "tool results"),
    ],
    ids=["no tools", "no results"],
)
def test_template_without_tools_is_refused_for_a_run_with_tools(template: str, key: str) -> None:
    report(template).require()
    refuses(lambda: report(template, tools=TOOLS).require(), TemplateError, key)


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
    found = certify(Codec(tokenizer, chat_template=template), num_random=9)
    assert found.strategy == "none"
    refuses(lambda: found.require(), TemplateError, key)


@pytest.mark.parametrize("takes_system", [False, True])
def test_trials_have_a_system_message_where_it_is_taken(takes_system: bool) -> None:
    tried = trials(2 * len(KINDS), seed=0, kinds=KINDS, takes_system=takes_system, control=[])
    assert {trial.prompt[0].role for trial in tried} == ({"user", "system"} if takes_system else {"user"})


@pytest.mark.parametrize(
    ("name", "strategy", "facts"),
    [
        ("other_end", "append", {"other_end_in_history": True, "keeps_turn_before_user": False}),
        ("no_end", "append", {"merges_tool_results": True}),
        ("opens_with_think", "append", {"generation_prompt_is_header": False}),
        ("dated_headers", "append", {"writes_dates": True, "writes_today": True, "renders_parallel_results": False}),
        ("alternates", "segment", {"needs_alternation": True, "trims_content": True}),
        ("refuses_system", "append", {"takes_system": False}),
        ("positional", "segment", {}),
    ],
)
def test_traits_are_found_by_rendering(name: str, strategy: str, facts: dict[str, bool]) -> None:
    found = report((HAND_WRITTEN / f"{name}.jinja").read_text(encoding="utf-8"))
    assert found.error is None
    assert found.strategy == strategy
    assert {fact: getattr(found, fact) for fact in facts} == facts
    assert found.violations == ()
    assert found.control_tokens_from_text == 0


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
    found = certify(Codec(tokenizer, chat_template=template), num_random=0)
    assert {fact: getattr(found, fact) for fact in facts} == facts
    assert (found.error, found.strategy, found.violations, found.control_tokens_from_text) == (None, "append", (), 0)


def test_markers_without_a_token_are_named() -> None:
    template = PLAIN.replace("<|im_start|>", "<|turn|>")
    assert any("<|turn|>" in finding for finding in certify(Codec(tiny_tokenizer(), chat_template=template)).findings)
    assert report(template).findings == ()


def test_certificate_names_the_parser_of_the_template() -> None:
    assert certify(CODEC).parser == "hermes"
    assert report(PLAIN).parser == "none"


def test_reasoning_without_a_field_is_content() -> None:
    found = report(PLAIN)
    assert not found.has_reasoning_field
    assert found.renders_reasoning
    assert not found.strips_reasoning
    assert found.is_prefix_preserving
    cut = report(PLAIN.replace("{{ m.content }}", "{{ m.content if loop.last else m.content.split('</think>')[-1] }}"))
    assert cut.renders_reasoning
    assert cut.strips_reasoning
    assert cut.inference_strategy == "segment"
