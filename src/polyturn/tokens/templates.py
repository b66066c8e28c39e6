"""Chat templates that come with polyturn, for models whose own template does not show tools.

    model: {path: smollm2, chat_template: hermes}      polyturn check smollm2 --template hermes

In a config, the name of such a template can be used in place of a Jinja source or a file name.
"""

from __future__ import annotations

from pathlib import Path

from polyturn.core.errors import ConfigError, did_you_mean
from polyturn.tokens.train import CHAT_TEMPLATE

TEMPLATES = {"hermes": CHAT_TEMPLATE}
"""Name -> template. `hermes` is ChatML with tools as JSON in the system message, calls as JSON between <tool_call> tags and
results between <tool_response> tags."""

NO_TOOLS = (
    "the chat template shows the model no tools; set model.chat_template to hermes (ChatML with tool calls as JSON, which "
    "rollout.parser: auto reads) or to a template of yours"
)
"""The part of an error message for a run with tools whose template does not render tool schemas."""


def template_source(value: str, *, base: Path, key: str) -> str:
    """Return the Jinja source for `value`: a source, the name of a shipped template, or a file.

    Args:
        value: A Jinja source, a name of `TEMPLATES`, or the path of a file.
        base: The folder from which a relative path starts.
        key: The key or option from which the value comes, for error messages.

    Raises:
        ConfigError: `value` is none of these, or the file cannot be read.
    """
    if "{%" in value or "{{" in value:
        return value
    if value in TEMPLATES:
        return TEMPLATES[value]
    file = base / value
    if not file.is_file():
        raise ConfigError(
            f"{key} is {value!r}, and there is no file {str(file)!r}; write a Jinja template, the path of a file with "
            f"one, or the name of a template that polyturn ships: {', '.join(TEMPLATES)}.{did_you_mean(value, TEMPLATES)}"
        )
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as problem:
        raise ConfigError(f"{key} names {str(file)!r}, which cannot be read ({problem})") from problem
