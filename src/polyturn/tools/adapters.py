"""Adapters from the supported forms of tool classes to one form, applied when a tool joins a run.

    create(instance_id, ground_truth=…)                     the row's create_kwargs, one by one
    create(instance_id, create_kwargs={"ground_truth": …})  the same in one mapping
    execute(instance_id, parameters, agent_data=…)          with a `ToolContext` of the episode
    release()  calc_reward()                                without the instance id
    reads = frozenset({"timeout"})                          an argument that the schema does not name

The form is determined once, from the signatures. Methods that already have the usual form are called directly.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from polyturn.core.protocols import Tool
from polyturn.infra.plugin_shape import has_parameter, num_positional, takes_any_keyword
from polyturn.tools.base import BaseTool

Method = Callable[..., Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolMethods:
    """A tool's four methods, each callable in the usual form."""

    create: Method
    execute: Method
    calc_reward: Method
    release: Method
    also_reads: frozenset[str]
    """Names of arguments that `execute` reads although the schema may not name them."""
    is_async: bool
    """Whether `execute` is a coroutine function; a plain function runs in a thread."""
    wants_agent_data: bool
    """Whether `execute` takes `agent_data`."""


def methods_of(tool: Tool) -> ToolMethods:
    """Return the methods of a tool, adapted to the usual form if necessary."""
    read = tool.reads if isinstance(tool, BaseTool) else frozenset()
    return ToolMethods(
        create=_create(tool.create, read),
        execute=tool.execute,
        calc_reward=_without_id(tool.calc_reward),
        release=_without_id(tool.release),
        also_reads=read,
        is_async=inspect.iscoroutinefunction(tool.execute),
        wants_agent_data=has_parameter(tool.execute, "agent_data") or "agent_data" in read,
    )


def _create(create: Method, read: frozenset[str]) -> Method:
    is_nested = has_parameter(create, "create_kwargs")
    is_both = not is_nested and takes_any_keyword(create) and "create_kwargs" in read
    if not is_nested and not is_both:
        return create

    def arguments(kwargs: dict[str, Any]) -> dict[str, Any]:
        if "create_kwargs" in kwargs:  # the row itself nests them
            return kwargs
        named = {k: v for k, v in kwargs.items() if is_both or has_parameter(create, k)}
        return {**named, "create_kwargs": dict(kwargs)}

    if inspect.iscoroutinefunction(create):

        @functools.wraps(create)
        async def call(instance_id: str, **kwargs: Any) -> Any:
            return await create(instance_id, **arguments(kwargs))

        return call

    @functools.wraps(create)
    def call_plain(instance_id: str, **kwargs: Any) -> Any:
        return create(instance_id, **arguments(kwargs))

    return call_plain


def _without_id(method: Method) -> Method:
    if num_positional(method) != 0:
        return method
    if inspect.iscoroutinefunction(method):

        @functools.wraps(method)
        async def call(instance_id: str, **kwargs: Any) -> Any:
            return await method(**kwargs)

        return call

    @functools.wraps(method)
    def call_plain(instance_id: str, **kwargs: Any) -> Any:
        return method(**kwargs)

    return call_plain
