"""The parser is found by rendering, for a template of each family, and reads its own writing back.

The small templates here write calls as their families do; the real ones are looked up beside the checkout.
"""

from pathlib import Path
from typing import Any

import pytest

from polyturn.core.errors import ConfigError, TemplateError
from polyturn.core.messages import Message, ToolCall
from polyturn.testing.tiny_models import tiny_tokenizer
from polyturn.tokens.codec import Codec, load_codec
from polyturn.tokens.options import ParserOptions
from polyturn.tokens.parsers import HermesParser, ParsedTurn, PlainParser, TurnParser, build_parser, detect, parsers
from support.parser_samples import CALLS, TOOLS
from support.refusals import refuses

SHARED = Path(__file__).parents[4].parent / "shared" / "data"
REAL = {
    "cohere2": "none",
    "deepseekv3": "deepseekv3",
    "gemma3": "none",
    "glm4moe": "glm",
    "gptoss": "gpt-oss",
    "lfm2": "none",
    "llama3_1": "llama3",
    "phi3": "none",
    "qwen2_5": "hermes",
    "qwen2_5_vl": "none",
    "qwen3": "hermes",
    "qwen3_instruct_2507": "hermes",
    "qwen3_vl": "hermes",
}
"""The 13 real templates; those with "none" leave calls out of a history."""
JSON = "{{ c.function.arguments | tojson }}"
NAME = "{{ c.function.name }}"
VALUES = "{% for k, v in c.function.arguments.items() %}"
VALUE = "{{ v if v is string else v | tojson }}"
PYTHON_VALUE = "{{ v | tojson | replace(': true', ': True') }}"
SECTION = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
CALLS_OF = {
    "hermes": ("", f'\n<tool_call>\n{{"name": "{NAME}", "arguments": {JSON}}}\n</tool_call>', ""),
    "qwen3_coder": (
        "",
        f"\n<tool_call>\n<function={NAME}>{VALUES}\n<parameter={{{{ k }}}}>\n{VALUE}\n</parameter>{{% endfor %}}"
        "\n</function>\n</tool_call>",
        "",
    ),
    "llama3": ("<|python_tag|>", f'{{"name": "{NAME}", "parameters": {JSON}}};', ""),
    "pythonic": ("{{ '\\n[' }}", f"{NAME}({VALUES}{{{{ k }}}}={PYTHON_VALUE}, {{% endfor %}}), ", "]"),
    "mistral": ("", f"[TOOL_CALLS]{NAME}[ARGS]{JSON}", ""),
    "deepseekv3": (
        SECTION[0],
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{NAME}\n```json\n{JSON}\n```<｜tool▁call▁end｜>",
        SECTION[1],
    ),
    "deepseekv31": (SECTION[0], f"<｜tool▁call▁begin｜>{NAME}<｜tool▁sep｜>{JSON}<｜tool▁call▁end｜>", SECTION[1]),
    "glm": (
        "",
        f"\n<tool_call>{NAME}{VALUES}\n<arg_key>{{{{ k }}}}</arg_key>\n<arg_value>{VALUE}</arg_value>{{% endfor %}}"
        "\n</tool_call>",
        "",
    ),
    "kimi_k2": (
        "<|tool_calls_section_begin|>",
        f"<|tool_call_begin|>{{{{ c.id }}}}<|tool_call_argument_begin|>{JSON}<|tool_call_end|>",
        "<|tool_calls_section_end|>",
    ),
    "minimax-m2": (
        "<minimax:tool_call>\n",
        f'<invoke name="{NAME}">\n{VALUES}<parameter name="{{{{ k }}}}">{VALUE}</parameter>\n{{% endfor %}}</invoke>\n',
        "</minimax:tool_call>",
    ),
}
"""Per family: what opens the calls of a turn, one call, what closes them."""


def template(family: str, *, reasoning: tuple[str, str] = ("<think>", "</think>")) -> str:
    begins, call, ends = CALLS_OF[family]
    return (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{% if m.reasoning_content %}" + reasoning[0] + "{{ m.reasoning_content }}" + reasoning[1] + "{% endif %}"
        "{{ m.content }}{% if m.tool_calls %}"
        + begins
        + "{% for c in m.tool_calls %}"
        + call
        + "{% endfor %}"
        + ends
        + "{% endif %}"
        "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )


def codec_of(source: str) -> Codec:
    return Codec(tiny_tokenizer(), chat_template=source)


def check_round_trip(codec: Codec, name: str, *, num_calls: int = 2) -> None:
    """Render a turn, decode its tokens, and read back the same calls."""
    parser = build_parser(codec, ParserOptions(name=name))
    ids = ("functions.find:0", "functions.now:1")
    calls = tuple(ToolCall(id=i, name=n, arguments=a) for i, (n, a) in zip(ids, CALLS[:num_calls], strict=False))
    user = Message(role="user", content="Hi")
    text = codec.template.render([user, Message(role="assistant", content="", tool_calls=calls)], tools=TOOLS)
    decoded = codec.decode(codec.encode(text))
    turn = parser.parse(decoded[decoded.rindex("Hi") :], tools=TOOLS)
    assert [(c.name, dict(c.arguments), c.error) for c in turn.tool_calls] == [(n, a, None) for n, a in CALLS[:num_calls]]


@pytest.mark.parametrize("family", CALLS_OF)
def test_parser_is_found_by_rendering_and_reads_back(family: str) -> None:
    codec = codec_of(template(family))
    assert detect(codec) == family
    if family != "pythonic":  # a bare list stands at the beginning of a line; the conversation before it is not one
        check_round_trip(codec, "auto")


@pytest.fixture(scope="module")
def real_tokenizer() -> Any:
    return load_codec(str(SHARED / "tokenizers" / "qwen2")).tokenizer


@pytest.mark.skipif(not SHARED.is_dir(), reason=f"{SHARED} is absent: the real templates and the real tokenizer are there")
@pytest.mark.parametrize("name", REAL)
def test_parser_of_a_real_template_is_found_and_reads_back(name: str, real_tokenizer: Any) -> None:
    source = (SHARED / "chat_templates" / f"{name}.jinja").read_text(encoding="utf-8")
    codec = Codec(real_tokenizer, chat_template=source)
    assert detect(codec) == REAL[name]
    if REAL[name] == "llama3":
        call = ToolCall(id="c", name="find", arguments=CALLS[0][1])
        text = codec.template.render([Message(role="user", content="Hi"), Message(role="assistant", tool_calls=(call,))])
        turn = build_parser(codec).parse(codec.decode(codec.encode(text)).rpartition("<|end_header_id|>")[2], tools=TOOLS)
        assert [(c.name, dict(c.arguments)) for c in turn.tool_calls] == [*CALLS[:1]]
    elif REAL[name] != "none":
        check_round_trip(codec, "auto", num_calls=1 if name == "gptoss" else 2)


@pytest.mark.parametrize(
    ("tags", "name"),
    [(("<think>", "</think>"), "qwen3"), (("[THINK]", "[/THINK]"), "mistral"), (("◁think▷", "◁/think▷"), "kimi")],
)
def test_reasoning_format_is_found_apart_from_the_tool_format(tags: tuple[str, str], name: str) -> None:
    codec = codec_of(template("hermes", reasoning=tags))
    parser = build_parser(codec)
    assert isinstance(parser, HermesParser)
    assert parser.reasoning_name == name
    assert parser.parse(f"{tags[0]}so{tags[1]}4") == ("4", (), "so")


@pytest.mark.parametrize("refused", ["false", "m.role == 'tool'", "not add_generation_prompt and m.role == 'tool'"])
def test_generation_prompt_that_opens_reasoning_is_seen(refused: str) -> None:
    """Also where the template refuses results of tools."""
    source = template("hermes").replace("assistant\n{% endif %}", "assistant\n<think>{% endif %}")
    refusal = "{% if " + refused + " %}{{ raise_exception('no tools') }}{% endif %}"
    parser = build_parser(codec_of(source.replace("{% for m in messages %}", "{% for m in messages %}" + refusal, 1)))
    assert parser.parse("cut") == ("", (), "cut")


def test_reasoning_format_can_be_named() -> None:
    parser = build_parser(codec_of(template("hermes")), ParserOptions(reasoning="kimi", calls_in_reasoning=True))
    turn = parser.parse('◁think▷<tool_call>{"name": "now"}</tool_call>◁/think▷')
    assert [c.name for c in turn.tool_calls] == ["now"]


PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}"


def test_template_without_calls_needs_a_named_parser_for_tools() -> None:
    codec = codec_of(PLAIN)
    assert detect(codec) == "none"
    assert isinstance(build_parser(codec), PlainParser)
    refuses(lambda: build_parser(codec, needs_calls=True), TemplateError, "rollout")
    assert isinstance(build_parser(codec, ParserOptions(name="hermes"), needs_calls=True), HermesParser)


def test_parser_of_a_file_takes_no_options(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from polyturn.tokens.parsers import ParsedTurn\n"
        "class Mine:\n"
        "    def parse(self, text, *, id_prefix='call', tools=()):\n"
        "        return ParsedTurn(text.upper())\n"
    )
    codec = codec_of(PLAIN)
    assert build_parser(codec, ParserOptions(name="mine.py:Mine"), base=tmp_path).parse("a") == ParsedTurn("A")
    refuses(
        lambda: build_parser(codec, ParserOptions(name="mine.py:Mine", reasoning="qwen3"), base=tmp_path),
        ConfigError,
        "options",
    )


def test_registered_parser_is_detected_past_one_that_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    class Raises:
        def parse(self, text: str, **_: object) -> ParsedTurn:
            raise RuntimeError(text)

    class Braces(HermesParser):
        call_tags = ("(call)", "(end)")

    monkeypatch.setattr(parsers, "_entries", {"raises": Raises, **dict(parsers._entries), "braces": Braces})
    source = template("hermes").replace("<tool_call>", "(call)").replace("</tool_call>", "(end)")
    assert detect(codec_of(source)) == "braces"
    assert issubclass(Braces, TurnParser)


def test_template_without_reasoning_leaves_the_parser_its_own():
    codec = codec_of(template("hermes", reasoning=("", "")))
    turn = build_parser(codec, ParserOptions(name="hermes")).parse("<think>two</think>4", tools=())
    assert (turn.reasoning, turn.content) == ("two", "4")


def test_tag_that_begins_like_another_turn_is_read_whole():
    """Calls, the generation prompt and other turns all begin with "<t", which is not part of their opening."""
    source = template("hermes").replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
    source = source.replace("{{ m.content }}", "{{ m.content if m.tool_calls else '<text>' + m.content + '</text>' }}")
    assert detect(codec_of(source.replace("\n<tool_call>", "<tool_call>"))) == "hermes"
