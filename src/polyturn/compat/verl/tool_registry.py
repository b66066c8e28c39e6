"""verl.tools.tool_registry, beside the native registry: the tools of a tool file and of a Python file together."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from polyturn.core.errors import ConfigError
from polyturn.tools.base import BaseTool, check_names
from polyturn.tools.registry import initialize_tools_from_config, load_function_tools
from polyturn.tools.schema import OpenAIFunctionToolSchema as OpenAIFunctionToolSchema  # users import it from here too


def load_all_tools(
    tool_config_path: str | Path | Mapping[str, Any] | None = None, function_tool_path: str | Path | None = None
) -> list[BaseTool]:
    """Build the tools of a tool file and collect the decorated functions of a Python file.

    Raises:
        ConfigError: a tool is invalid, or two tools have the same name.
    """
    tools = [] if tool_config_path is None else initialize_tools_from_config(tool_config_path)
    functions = [] if function_tool_path is None else load_function_tools(function_tool_path)
    if both := sorted({tool.name for tool in tools} & {tool.name for tool in functions}):
        raise ConfigError(
            f"the function tools {both} of {str(function_tool_path)!r} collide with tools of the tool file; "
            "the model calls tools by name, so rename one of each"
        )
    check_names(functions)
    return [*tools, *functions]
