"""Chat templates by name: shipped, in a file, or as Jinja source."""

from __future__ import annotations

from pathlib import Path

import pytest

from polyturn.core.errors import ConfigError
from polyturn.testing.tiny_models import tiny_tokenizer
from polyturn.tokens.certificate import certify
from polyturn.tokens.codec import Codec
from polyturn.tokens.templates import TEMPLATES, template_source
from support.templates import CHATML

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_shipped_template_trains_token_exactly_with_tools(name: str) -> None:
    codec = Codec(tiny_tokenizer(), chat_template=template_source(name, base=Path(), key="model.chat_template"))
    report = certify(codec, tools=[ADD], num_random=12)
    assert report.error is None and not report.violations
    assert report.strategy == "append" and report.parser == "hermes"


def test_template_without_tools_names_the_key_and_a_shipped_template() -> None:
    report = certify(Codec(tiny_tokenizer(), chat_template=CHATML), tools=[ADD], num_random=2)
    assert report.error is not None
    assert "model.chat_template" in report.error and "hermes" in report.error and "react" in report.error


def test_source_and_file_are_taken_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "mine.jinja").write_text(CHATML)
    assert template_source("mine.jinja", base=tmp_path, key="k") == CHATML == template_source(CHATML, base=tmp_path, key="k")


def test_unknown_template_comes_with_the_closest_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model.chat_template is 'hermess'.*hermes"):
        template_source("hermess", base=tmp_path, key="model.chat_template")
