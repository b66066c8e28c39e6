"""Tools: from the author's function or class to the observation that the model reads."""

from polyturn.tools.function import FromTask, FunctionTool, tool

__all__ = ["FromTask", "FunctionTool", "tool"]
