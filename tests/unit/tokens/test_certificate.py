"""The certificate says what a template does, which way to grow histories is safe with it, and proves it by trial."""

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


def test_nothing_is_odd_in_the_tiny_template() -> None:
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


def test_a_short_certificate_renders_a_few_hundred_times() -> None:
    """Well under a second on an idle machine: every run asks for one before it starts."""
    codec, renders = Codec(tiny_tokenizer()), []
    right = codec.template._apply
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(codec.template, "_apply", lambda *args: (renders.append(args), right(*args))[1])
        certify(codec, tools=TOOLS, num_random=0)
    assert 100 < len(renders) < 700


def test_new_messages_that_depend_on_what_came_before_take_segments() -> None:
    found = report(PLAIN.replace("{{ m.role }}", "{{ m.role }} {{ loop.index }}"))
    found.require()
    assert found.strategy == found.inference_strategy == "segment"
    assert "not written the same way behind every history" in found.reason
    assert found.findings
    assert found.violations == ()


def test_a_template_that_strips_reasoning_is_appended_to_and_rendered_only_for_inference() -> None:
    strips = "{% if m.reasoning_content and loop.last %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
    found = report(PLAIN.replace("{{ m.content }}", strips))
    assert found.strips_reasoning
    assert found.renders_reasoning
    assert not found.is_prefix_preserving
    assert found.strategy == "append"
    assert found.inference_strategy == "segment"
    assert "the held ids keep it" in found.reason


def test_a_template_without_tools_is_refused_only_when_the_run_has_tools() -> None:
    report(PLAIN).require()
    with pytest.raises(TemplateError, match=r"1 tool\(s\) and the chat template renders none"):
        report(PLAIN, tools=TOOLS).require()


def test_a_template_that_renders_nothing_for_a_tool_message_is_refused_when_the_run_has_tools() -> None:
    silent = "{{ tools }}" + PLAIN.replace("{{ m.content }}", "{{ m.content if m.role != 'tool' }}")
    report(silent).require()
    with pytest.raises(TemplateError, match="renders no tool results"):
        report(silent, tools=TOOLS).require()


def test_a_template_that_leaves_out_what_the_model_said_is_refused() -> None:
    found = report(PLAIN.replace("{{ m.content }}", "{{ m.content if m.role != 'assistant' }}"))
    assert found.strategy == "none"
    with pytest.raises(TemplateError, match="leaves out what an assistant message says"):
        found.require()


@pytest.mark.parametrize("takes_system", [False, True])
def test_a_template_is_tried_with_a_system_message_where_it_takes_one(takes_system: bool) -> None:
    tried = trials(2 * len(KINDS), seed=0, kinds=KINDS, takes_system=takes_system, control=[])
    assert {trial.prompt[0].role for trial in tried} == ({"user", "system"} if takes_system else {"user"})


def test_a_codec_without_template_is_an_error_of_the_report() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    found = certify(Codec(tokenizer))
    assert found.strategy == "none"
    assert "has no chat template" in (found.error or "")


def test_a_template_that_is_not_jinja_is_an_error_with_its_line() -> None:
    error = certify(Codec(tiny_tokenizer(), chat_template="{% for m in messages %}\n{% endif %}")).error
    assert error is not None
    assert "not valid Jinja" in error
    assert "line 2" in error


def test_a_template_that_raises_says_on_which_message() -> None:
    error = report("{{ raise_exception('no assistants') if messages[-1].role == 'assistant' }}").error
    assert error is not None
    assert "an assistant message" in error
    assert "no assistants" in error


def test_the_properties_are_named_for_a_machine_to_read() -> None:
    properties = certify(CODEC, num_random=0).properties
    assert properties["renders_tools"] is True
    assert all(value in (True, False, None) for value in properties.values())


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
def test_published_templates_are_read_right(name: str, facts: dict[str, bool]) -> None:
    template = (SHARED / "chat_templates" / f"{name}.jinja").read_text(encoding="utf-8")
    tokenizer, _ = add_template_markers(real_tokenizer(), template)
    found = certify(Codec(tokenizer, chat_template=template), num_random=0)
    assert {fact: getattr(found, fact) for fact in facts} == facts
    assert (found.error, found.strategy, found.violations, found.control_tokens_from_text) == (None, "append", (), 0)


def test_markers_that_are_no_tokens_of_this_tokenizer_are_named() -> None:
    template = PLAIN.replace("<|im_start|>", "<|turn|>")
    assert any("<|turn|>" in finding for finding in certify(Codec(tiny_tokenizer(), chat_template=template)).findings)
    assert report(template).findings == ()


def test_the_certificate_names_the_parser_of_the_calls_that_the_template_writes() -> None:
    assert certify(CODEC).parser == "hermes"
    assert report(PLAIN).parser == "none"


def test_reasoning_without_a_field_is_content_and_a_template_that_cuts_it_strips_it() -> None:
    found = report(PLAIN)
    assert not found.has_reasoning_field
    assert found.renders_reasoning and not found.strips_reasoning and found.is_prefix_preserving
    assert "no field for reasoning" in found.reason
    cut = report(PLAIN.replace("{{ m.content }}", "{{ m.content if loop.last else m.content.split('</think>')[-1] }}"))
    assert cut.renders_reasoning and cut.strips_reasoning and cut.inference_strategy == "segment"
