"""Tools: turn an author's function or class into tools that the model can call."""

from polyturn.tools.function import FromTask, FunctionTool, tool

__all__ = ["FromTask", "FunctionTool", "tool"]
