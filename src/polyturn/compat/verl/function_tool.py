"""verl.tools.function_tool: `@function_tool`, which registers a function as a named tool.

    @function_tool("search")                 also @function_tool, and @function_tool("search", schema={...})
    def look_up(query: str) -> str: ...

The tools are native, so `rollout.tools.functions` and tool files accept them, too.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from polyturn.core.errors import ConfigError, did_you_mean
from polyturn.infra.plugins import import_file, is_same_source
from polyturn.tools import function as native
from polyturn.tools.result_shape import normalize
from polyturn.tools.schema import OpenAIFunctionToolSchema, ToolResponse

logger = logging.getLogger(__name__)

FUNCTION_TOOL_REGISTRY: dict[str, FunctionTool] = {}
"""Name -> tool."""

Schema = OpenAIFunctionToolSchema | Mapping[str, Any] | None


class VerlFunctionTool(native.FunctionTool):
    """A registered function, with verl's attribute names."""

    def __init__(self, name: str, fn: Callable[..., Any], tool_schema: Schema = None, is_async: bool | None = None) -> None:
        super().__init__(fn, name=name, schema=tool_schema)

    @property
    def fn(self) -> Callable[..., Any]:
        """The function itself."""
        return self.function

    @property
    def is_async(self) -> bool:
        """Whether the function is a coroutine function."""
        return self._is_async

    async def call(self, parameters: dict[str, Any]) -> Any:
        """Call the function and return its result; a sync function runs in a thread."""
        arguments = self.read_arguments(parameters)
        if self._is_async:
            return await self.function(**arguments)
        return await self.threads.run(functools.partial(self.function, **arguments))


FunctionTool = VerlFunctionTool  # the name in users' imports


def function_tool(name: Callable[..., Any] | str | None = None, schema: Schema = None) -> Any:
    """Register a function as a tool.

    Args:
        name: The tool's name; by default the function's. If the decorator has no arguments, the function itself.
        schema: The whole schema, instead of one derived from signature and docstring.

    Raises:
        ConfigError: a schema cannot be derived from the function, or the name is already registered.
    """
    if callable(name):
        return _register(name, None, schema)
    return functools.partial(_register, name=name, schema=schema)


def _register(fn: Callable[..., Any], name: str | None, schema: Schema) -> FunctionTool:
    chosen = name or str(getattr(fn, "__name__", ""))
    if chosen in FUNCTION_TOOL_REGISTRY and not is_same_source(FUNCTION_TOOL_REGISTRY[chosen].function, fn):
        raise ConfigError(f"function tool {chosen!r} is already registered; give this one another name")
    tool = FUNCTION_TOOL_REGISTRY[chosen] = native.keep(FunctionTool(chosen, fn, schema))
    return tool


def get_function_tool(name: str) -> FunctionTool:
    """Return a registered tool.

    Raises:
        KeyError: the name is not registered.
    """
    if name not in FUNCTION_TOOL_REGISTRY:
        raise KeyError(f"there is no function tool {name!r}.{did_you_mean(name, FUNCTION_TOOL_REGISTRY)}")
    return FUNCTION_TOOL_REGISTRY[name]


_LOADED_FUNCTION_TOOL_PATHS: dict[str, list[native.FunctionTool]] = {}
"""File -> the tools that it registered. Programs that clear the registry also clear this, so that files are read again."""


def load_function_tools_from_path(path: str) -> list[native.FunctionTool]:
    """Return the tools that a Python file registers; each file is read once.

    Raises:
        FileNotFoundError: the file does not exist.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"function_tool_path does not exist: {path}")
    file = str(Path(path).resolve())
    if file not in _LOADED_FUNCTION_TOOL_PATHS:
        _LOADED_FUNCTION_TOOL_PATHS[file] = native.tools_in(import_file(Path(file)))
    if not _LOADED_FUNCTION_TOOL_PATHS[file]:
        logger.warning("no @function_tool decorators found in %s", path)
    return list(_LOADED_FUNCTION_TOOL_PATHS[file])


def normalize_function_tool_return(ret: Any) -> tuple[ToolResponse, float, dict[str, Any]]:
    """Return a function's result as (response, reward, metrics); a missing reward is 0.0.

    Raises:
        TypeError: the result is a tuple that is empty or longer than three.
    """
    response, reward, metrics = normalize(ret)
    return response, 0.0 if reward is None else reward, dict(metrics)


def clear() -> None:
    """Clear the registered tools and the list of read files."""
    FUNCTION_TOOL_REGISTRY.clear()
    _LOADED_FUNCTION_TOOL_PATHS.clear()
