"""Chat templates by name, in a file or as source."""

from __future__ import annotations

from pathlib import Path

import pytest

from polyturn.core.errors import ConfigError
from polyturn.testing.tiny_models import tiny_tokenizer
from polyturn.tokens.codec import Codec
from polyturn.tokens.parsers import detect
from polyturn.tokens.probe import probe_template
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
    probe = probe_template(codec, tools=[ADD])
    assert (probe.strategy, probe.error, detect(codec)) == ("append", None, "hermes")


def test_template_without_tools_names_the_key_and_a_shipped_template() -> None:
    error = probe_template(Codec(tiny_tokenizer(), chat_template=CHATML), tools=[ADD]).error
    assert error is not None
    assert "model.chat_template" in error and "hermes" in error and "react" in error


def test_source_and_file_are_taken_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "mine.jinja").write_text(CHATML)
    assert template_source("mine.jinja", base=tmp_path, key="k") == CHATML == template_source(CHATML, base=tmp_path, key="k")


def test_unknown_template_comes_with_the_closest_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model.chat_template is 'hermess'.*hermes"):
        template_source("hermess", base=tmp_path, key="model.chat_template")
