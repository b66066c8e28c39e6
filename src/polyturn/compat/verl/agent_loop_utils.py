"""verl.experimental.agent_loop.utils: paths of configuration files, the format of gpt-oss, and the event loop of a thread
(`verl.utils.ray_utils`)."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from polyturn.compat.not_offered import __getattr__  # noqa: F401  (raises for names that are not offered)


def resolve_config_path(config_path: str) -> str:
    """Return the absolute path of a file; relative paths are resolved against the working directory.

    Raises:
        FileNotFoundError: a relative path does not exist.
    """
    path = Path(config_path)
    if path.is_absolute():
        return config_path
    if not (resolved := path.resolve()).exists():
        raise FileNotFoundError(f"Agent loop configuration file not found: {config_path} (looked for {resolved})")
    return str(resolved)


def format_gpt_oss_tool_response_manually(tool_response: str, tool_call_name: str) -> str:
    """Return a tool's message for gpt-oss in the harmony format."""
    return f"<|start|>functions.{tool_call_name} to=assistant<|channel|>commentary<|message|>{tool_response}<|end|>"


def add_generation_prompt_for_gpt_oss(message_content: str) -> str:
    """Return a text in the harmony format followed by the start of the assistant's turn."""
    return f"{message_content}<|start|>assistant"


def build_gpt_oss_tool_response_text(messages: Sequence[Mapping[str, Any]], tool_call_names: Sequence[str]) -> str:
    """Return the tools' messages for gpt-oss after a turn, followed by the start of the assistant's turn."""
    texts = [format_gpt_oss_tool_response_manually(m["content"], n) for m, n in zip(messages, tool_call_names, strict=True)]
    return add_generation_prompt_for_gpt_oss("".join(texts))


def get_event_loop() -> asyncio.AbstractEventLoop:
    """Return the running event loop; without one, make a loop for this thread."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        loop = asyncio.get_event_loop_policy().new_event_loop()
        asyncio.set_event_loop(loop)
        return loop
