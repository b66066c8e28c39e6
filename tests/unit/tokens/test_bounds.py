"""A chat template that would never end, or would fill the memory, fails with a sentence; no clock decides."""

import itertools
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from polyturn.core.errors import TemplateError
from polyturn.core.messages import Message, ToolCall
from polyturn.tokens import template
from polyturn.tokens.template import ChatTemplate

GROW = "{%% set ns = namespace(x=%s) %%}{%% for i in range(60) %%}%s{%% endfor %%}{{ ns.x }}"
ENDLESS = {
    "nested loops": "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
    "loops over nothing": "{% for i in range(100000) %}{% for j in range(100000) if false %}{% endfor %}{% endfor %}",
    "macros": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "recursive loop": "{% for m in messages recursive %}{{ loop(messages) }}{{ loop(messages) }}{% endfor %}",
    "blocks": "{% block a %}{{ self.a() }}{{ self.a() }}{% endblock %}",
    "characters one by one": "{% for i in range(99999) %}{% set a = messages[0].content[::-1] %}{% endfor %}",
    "callers": "{% macro f(n) %}{{ caller(n) }}{{ caller(n) }}{% endmacro %}"
    + "{% call(a) f(1) %}" * 25
    + "{% endcall %}" * 25,
    "a macro without an end": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "filters in a loop": "{% for i in range(100000) %}{{ range(100000) | sum }}{% endfor %}",
    "comparisons of long texts": "{% set a = 'y' * 9999999 %}{% set b = 'y' * 9999999 %}"
    "{% for i in range(100000) %}{% if a == b %}{% endif %}{% endfor %}",
}
EXPLODING = {
    "product": "{{ 'x' * 10 ** 10 }}",
    "list": "{{ [0] * 10 ** 9 }}",
    "power": "{{ 9 ** (9 ** 9) }}",
    "squares": GROW % ("7", "{% set ns.x = ns.x * ns.x %}"),
    "sum": GROW % ("'x'", "{% set ns.x = ns.x + ns.x %}"),
    "join": GROW % ("'x'", "{% set ns.x = ns.x ~ ns.x %}"),
    "nested namespaces": GROW % ("1", "{% set ns.x = dict(a=ns.x, b=ns.x) %}"),
    "lists of lists": GROW % ("[1]", "{% set ns.x = ns.x + ns.x %}"),
    "a long sum": "{% set x = 'y' * 9999999 %}{{ [" + "x + " * 100 + "x] | length }}",
    "a chain of filters": "{{ 'x' " + "| list | string " * 30 + "}}",
    "a chain of encodings": "{{ 'x'" + ".encode('utf-32').decode('latin1')" * 30 + "}}",
    "a method by name": "{{ 'x'['center'](10 ** 10) }}",
    "a method by filter": "{{ ('x' | attr('center'))(10 ** 10) }}",
    "a method of an attribute": "{{ (['x'] | map(attribute='center') | first)(10 ** 10) }}",
    "bytes": "{{ (5).to_bytes(10 ** 10, 'big') }}",
    "date": "{{ strftime_now('%9999999999d') }}",
    "translation": "{{ 'xyz'.translate({120: 'y' * 100000000}) }}",
    "round": "{{ 1.5 | round(10 ** 9) }}",
    "block": GROW % ("'x'", "{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = y %}"),
    "nested lists": GROW % ("['x']", "{% set ns.x = [ns.x, ns.x] %}"),
    "nested dicts": GROW % ("['x']", "{% set ns.x = {'a': ns.x, 'b': ns.x} %}"),
    "method": "{{ 'x'.center(10 ** 10) }}",
    "filter": "{{ 'x' | center(9999999999) }}",
    "mapped filter": "{{ ['x'] | map('center', 9999999999) | list }}",
    "percent": "{{ '%9999999999d' % 1 }}",
    "percent star": "{{ '%*d' % (9999999999, 1) }}",
    "format": "{{ '{:9999999999}'.format(1) }}",
    "format filter": "{{ '%9999999999d' | format(1) }}",
    "replace": "{% set x = 'y' * 100000 %}{{ x.replace('y', x) }}",
    "long joins": "{% set x = 'y' * 100000 %}{{ x.join(x | list) }}",
    "indent": "{{ messages | tojson(indent=10 ** 9) }}",
    "long text": "{% for i in range(100000) %}" + "y" * 5000 + "{% endfor %}",
    "long output": "{% set x = 'y' * 100000 %}{% for i in range(100000) %}{{ x }}{% endfor %}",
}
TOKENIZER = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, unk_token="a")))
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer", "description": "A number."}}, "required": ["a"]}
TEMPLATES = sorted((Path(__file__).resolve().parents[4] / "shared" / "data" / "chat_templates").glob("*.jinja"))
USER = Message(role="user", content="Hi")


LONG = ("lists of lists", "a chain of filters")
"""What computes for seconds until it meets its bound."""
SOURCES = [
    pytest.param(source, id=name, marks=pytest.mark.slow if name in LONG else ())
    for name, source in {**ENDLESS, **EXPLODING}.items()
]


@pytest.mark.parametrize("source", SOURCES)
def test_a_template_without_an_end_or_a_bound_fails_with_a_sentence(source):
    with pytest.raises(
        TemplateError, match=r"more than .* steps|up to .* characters|of any width|recursion depth|no blocks"
    ):
        ChatTemplate(TOKENIZER, source).render([USER])


def test_a_template_that_looks_at_all_messages_for_each_renders_a_long_conversation():
    source = (
        "{% for m in messages %}{% for n in messages %}{% if n == m %}{{ loop.index }}{% endif %}{% endfor %}{% endfor %}"
    )
    messages = [Message(role="user", content=str(i)) for i in range(600)]
    assert ChatTemplate(TOKENIZER, source).render(messages) == "".join(str(i + 1) for i in range(600))


def test_a_bounded_render_is_followed_by_one_that_has_all_its_steps():
    long = ChatTemplate(TOKENIZER, "{% for i in range(3000) %}{% endfor %}{{ messages[0].content }}")
    assert [long.render([USER]) for _ in range(30)] == ["Hi"] * 30


def test_a_long_message_may_be_looked_through_and_copied():
    long = Message(role="user", content="a<b " * 250_000)
    source = (
        "{% for m in messages %}{% set text = '[' + m.content.replace('<', '&lt;') + ']' %}"
        "{{ text | trim + '' }}{% for c in m.content[:100000] %}{% endfor %}{% endfor %}"
    )
    assert ChatTemplate(TOKENIZER, source).render([long]) == "[" + long.text.replace("<", "&lt;") + "]"


@pytest.mark.parametrize("source", TEMPLATES, ids=lambda path: path.stem)
def test_a_template_in_use_renders_as_it_does_without_bounds(source, monkeypatch):
    call = ToolCall(id="call00000", name="add", arguments={"a": 1})
    schema = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": PARAMETERS}}
    chats = [
        [Message(role="system", content="Be brief."), USER, Message(role="assistant", content="Yes", reasoning="Hm"), USER],
        [USER, Message(role="assistant", content="", tool_calls=(call,)), Message(role="tool", content="2", name="add")],
    ]
    for chat, tools, opened in itertools.product(chats, ((), (schema,)), (False, True)):
        own = ChatTemplate(TOKENIZER, source.read_text()).try_render(chat, tools=tools, add_generation_prompt=opened)
        with monkeypatch.context() as patch:
            patch.setattr(template, "bounded", lambda text: text)
            plain = ChatTemplate(TOKENIZER, source.read_text()).try_render(chat, tools=tools, add_generation_prompt=opened)
        assert own == plain
