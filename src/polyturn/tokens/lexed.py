"""Reads the code of a chat template without rendering it: its string literals and the attribute names in it."""

from __future__ import annotations

from collections.abc import Iterator

from polyturn.core.errors import TemplateError, one_line


def string_literals(template: str) -> Iterator[str]:
    """Yield the string literals in the template's code.

    Raises:
        TemplateError: the template is not valid Jinja.
    """
    for kind, value in lexed(template):
        if kind == "string":
            yield value[1:-1].encode("raw_unicode_escape", "backslashreplace").decode("unicode_escape", "replace")


def names_read(template: str) -> frozenset[str]:
    """Return the attribute names in the template's code: `content` in `message.content`.

    Raises:
        TemplateError: the template is not valid Jinja.
    """
    names, before = set[str](), ""
    for kind, value in lexed(template):
        if kind == "name" and before == ".":
            names.add(value)
        before = value
    return frozenset(names)


def lexed(template: str) -> Iterator[tuple[str, str]]:
    """Yield the kind and the text of each of the template's tokens, as Jinja's lexer names them.

    Raises:
        TemplateError: the template is not valid Jinja.
    """
    from jinja2 import Environment, TemplateSyntaxError

    try:
        for _, kind, value in Environment(autoescape=False).lex(template):
            yield kind, value
    except TemplateSyntaxError as problem:
        raise TemplateError(
            f"the chat template is not valid Jinja ({one_line(problem)}, line {problem.lineno}); repair it"
        ) from problem
