"""verl.tools.base_tool: the class that tools inherit, and the loader of tool files that stood beside it in 0.4."""

from polyturn.tools.base import BaseTool
from polyturn.tools.registry import initialize_tools_from_config
from polyturn.tools.schema import OpenAIFunctionToolSchema, ToolResponse

__all__ = ["BaseTool", "OpenAIFunctionToolSchema", "ToolResponse", "initialize_tools_from_config"]
