"""verl.tools.base_tool: the base class of tools, and the loader of tool files, which this module had in 0.4.

`VerlTool` is verl's BaseTool.
"""

from __future__ import annotations

from typing import Any

from polyturn.compat.verl.code_constants import names_in
from polyturn.tools.base import BaseTool
from polyturn.tools.registry import initialize_tools_from_config
from polyturn.tools.schema import OpenAIFunctionToolSchema, ToolResponse

__all__ = ["BaseTool", "OpenAIFunctionToolSchema", "ToolResponse", "initialize_tools_from_config"]


class VerlTool(BaseTool):
    """A tool whose `create` and `execute` may use `create_kwargs`, `agent_data` and unnamed arguments."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.reads = names_in(cls.create) | names_in(cls.execute)


BaseTool = VerlTool  # type: ignore[misc]
