"""A chat template that would never end, or would fill the memory, is refused."""

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from polyturn.core.errors import TemplateError
from polyturn.core.messages import Message
from polyturn.tokens.template import ChatTemplate

pytestmark = pytest.mark.clock

GROW = "{%% set ns = namespace(x=%s) %%}{%% for i in range(60) %%}%s{%% endfor %%}{{ ns.x }}"
ENDLESS = {
    "nested loops": "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
    "macros": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "recursive loop": "{% for m in messages recursive %}{{ loop(messages) }}{{ loop(messages) }}{% endfor %}",
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
    "join": GROW % ("'x'", "{% set ns.x = ns.x ~ ns.x %}"),
    "a method by filter": "{{ ('x' | attr('center'))(10 ** 10) }}",
    "bytes": "{{ (5).to_bytes(10 ** 10, 'big') }}",
    "round": "{{ 1.5 | round(10 ** 9) }}",
    "nested lists": GROW % ("['x']", "{% set ns.x = [ns.x, ns.x] %}"),
    "filter": "{{ 'x' | center(9999999999) }}",
    "percent star": "{{ '%*d' % (9999999999, 1) }}",
    "format": "{{ '{:9999999999}'.format(1) }}",
    "replace": "{% set x = 'y' * 100000 %}{{ x.replace('y', x) }}",
    "indent": "{{ messages | tojson(indent=10 ** 9) }}",
    "long output": "{% set x = 'y' * 100000 %}{% for i in range(100000) %}{{ x }}{% endfor %}",
}
TOKENIZER = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, unk_token="a")))
USER = Message(role="user", content="Hi")


@pytest.mark.parametrize("name", [*ENDLESS, *EXPLODING])
def test_template_without_an_end_or_a_bound_is_refused(name: str) -> None:
    source = {**ENDLESS, **EXPLODING}[name]
    with pytest.raises(TemplateError):
        ChatTemplate(TOKENIZER, source).render([USER])


def test_quadratic_template_renders_a_long_conversation() -> None:
    source = (
        "{% for m in messages %}{% for n in messages %}{% if n == m %}{{ loop.index }}{% endif %}{% endfor %}{% endfor %}"
    )
    messages = [Message(role="user", content=str(i)) for i in range(600)]
    assert ChatTemplate(TOKENIZER, source).render(messages) == "".join(str(i + 1) for i in range(600))


def test_long_message_may_be_searched_and_copied() -> None:
    long = Message(role="user", content="a<b " * 250_000)
    source = (
        "{% for m in messages %}{% set text = '[' + m.content.replace('<', '&lt;') + ']' %}"
        "{{ text | trim + '' }}{% for c in m.content[:100000] %}{% endfor %}{% endfor %}"
    )
    assert ChatTemplate(TOKENIZER, source).render([long]) == "[" + long.text.replace("<", "&lt;") + "]"
