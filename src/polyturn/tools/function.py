"""`@polyturn.tool`: turns an annotated function into a tool, which can still be called like the function.

    @polyturn.tool
    async def look_up(key: str, table: Annotated[dict, FromTask]) -> str:
        \"\"\"Look a key up.

        Args:
            key: What to look up.
        \"\"\"
        return table[key]

The model sees `key`; `table` comes from the row's `create_kwargs` and is not in the schema. A plain function runs in one of
the tool's threads. If an annotation or a description is missing, the decorator raises an error.
"""

from __future__ import annotations

import functools
import inspect
import json
import re
import typing
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Annotated, Any, TypeVar, overload

from polyturn.core.code_origin import defined_at
from polyturn.core.errors import PLUGIN_RAISES, ConfigError, DataError, LifecycleError, errors_at, one_line
from polyturn.core.reward import brief
from polyturn.infra.plugin_shape import refuse_generator
from polyturn.infra.threads import DaemonThreads
from polyturn.tools.annotation import AS_WRITTEN, Types, json_type, read_argument
from polyturn.tools.base import BaseTool
from polyturn.tools.docstring import read_docstring
from polyturn.tools.result_shape import ToolOutcome, normalize
from polyturn.tools.schema import OpenAIFunctionToolSchema, ToolResponse

Decorated = TypeVar("Decorated", bound="FunctionTool")


class FromTask:
    """Marks a parameter that the row fills, not the model: `table: Annotated[dict, FromTask]`."""


class FunctionTool(BaseTool):
    """A function as a tool. Calling it calls the function."""

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        name: str | None = None,
        schema: OpenAIFunctionToolSchema | Mapping[str, Any] | None = None,
        stateless: bool = True,
    ) -> None:
        if not isinstance(getattr(function, "__name__", None), str):
            raise ConfigError(
                f"a tool is a function or a method, not {brief(function)}; write a function that calls "
                f"it{defined_at(function)}"
            )
        self.function = function
        self.stateless = stateless
        refuse_generator(function, where=f"tool {name or function.__name__!r}")
        with errors_at(function):
            self._hidden = _hidden(function)
        self._types: Types = {}
        """The types of the parameters that the model fills; empty if the schema was passed explicitly."""
        if schema is None:
            with errors_at(function):
                schema, self._types = read_signature(function, name=name)
        super().__init__({}, schema)
        if name is not None and name != self.name:
            self.tool_schema = self.tool_schema.model_copy(deep=True)
            self.name = self.tool_schema.function.name = name
        self._is_async = inspect.iscoroutinefunction(function)
        self.threads = DaemonThreads(name=f"tool-{self.name}")
        self._row_values: dict[str, dict[str, Any]] = {}
        functools.update_wrapper(self, function)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle only the function and its schema, without threads and episodes."""
        return _unpickled, (self.function, self.name, self.tool_schema, self.stateless, bool(self._types))

    @property
    def may_score(self) -> bool:
        """Whether it may return a step reward, as (answer, reward); false if the return annotation excludes tuples."""
        returns = inspect.signature(self.function).return_annotation
        words = ("tuple", "any", "outcome")
        return returns is inspect.Signature.empty or any(word in str(returns).lower() for word in words)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    def __repr__(self) -> str:
        return f"FunctionTool({self.name!r})"

    def require(self, kwargs: Mapping[str, Any]) -> None:
        """Check that a row's create_kwargs have every hidden parameter without a default.

        Raises:
            DataError: one is missing.
        """
        for parameter, is_required in self._hidden.items():
            if is_required and parameter not in kwargs:
                raise DataError(
                    f"tool {self.name!r}: its parameter {parameter!r} comes from the task, and the task has none"
                )

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse]:
        """Start an instance for one episode with the row's values of the hidden parameters.

        Raises:
            DataError: a hidden parameter without a default is not in the row's create_kwargs.
        """
        self.require(kwargs)
        chosen, response = await super().create(instance_id)
        self._row_values[chosen] = {k: v for k, v in kwargs.items() if k in self._hidden}
        return chosen, response

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> ToolOutcome:
        """Call the function with the model's arguments and the row's values of the hidden parameters."""
        if instance_id not in self._row_values:
            raise LifecycleError(f"tool {self.name!r}: execute for the id {instance_id!r}, which create never returned")
        visible = {k: v for k, v in parameters.items() if k not in self._hidden}
        arguments = {**self.read_arguments(visible), **self._row_values[instance_id]}
        if self._is_async:
            return normalize(await self.function(**arguments))
        return normalize(await self.threads.run(functools.partial(self.function, **arguments)))

    def read_arguments(self, parameters: Mapping[str, Any]) -> dict[str, Any]:
        """Convert the model's arguments to the types of the function's annotations.

        Raises:
            ArgumentError: an argument does not fit its annotation.
        """
        types, tool = self._types, self.name
        return {k: read_argument(types[k], v, name=k, tool=tool) if k in types else v for k, v in parameters.items()}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> None:
        """Return None: a function does not reward episodes."""

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """Drop the episode's state."""
        del self._row_values[instance_id]


@overload
def tool(function: Callable[..., Any], /) -> FunctionTool: ...


@overload
def tool(
    function: str | None = None,
    /,
    *,
    name: str | None = None,
    schema: OpenAIFunctionToolSchema | Mapping[str, Any] | None = None,
    stateless: bool = True,
) -> Callable[[Callable[..., Any]], FunctionTool]: ...


def tool(
    function: Callable[..., Any] | str | None = None,
    /,
    *,
    name: str | None = None,
    schema: OpenAIFunctionToolSchema | Mapping[str, Any] | None = None,
    stateless: bool = True,
) -> FunctionTool | Callable[[Callable[..., Any]], FunctionTool]:
    """Turn an annotated async or plain function into a tool: `@tool`, `@tool("name")` or `@tool(name=..., schema=...)`.

    Args:
        function: The function. Each parameter needs an annotation and an entry under `Args:` in the docstring. A string is
            the tool's name.
        name: The tool's name; by default the function's.
        schema: The whole schema, which replaces the one from signature and docstring. The function then gets the model's
            JSON unchanged.
        stateless: Whether no call depends on state that an earlier call left in this process. If False, a resumed run
            restarts the episodes that were in flight.

    Raises:
        ConfigError: the schema cannot be derived from the function; the message names the missing part.
    """
    chosen = name or (function if isinstance(function, str) else None)

    def decorate(fn: Callable[..., Any]) -> FunctionTool:
        decorated = FunctionTool(fn, name=chosen, schema=schema, stateless=stateless)
        return decorated if "<locals>" in getattr(fn, "__qualname__", "<locals>") else keep(decorated)

    return decorate if function is None or isinstance(function, str) else decorate(function)


_DECORATED: dict[str, dict[str, FunctionTool]] = {}
"""Module -> name -> tool; if a loop decorates functions, the module's variables have only the last one."""


def keep(decorated: Decorated) -> Decorated:
    """Add a tool to the tools of its module, and return it."""
    _DECORATED.setdefault(decorated.function.__module__, {})[decorated.name] = decorated
    return decorated


def tools_in(module: ModuleType) -> list[FunctionTool]:
    """Return the functions of a module that are decorated as tools, in the file's order."""
    name = module.__name__
    variables = [v for v in vars(module).values() if isinstance(v, FunctionTool) and v.function.__module__ == name]
    last = {variable.name: variable for variable in variables}
    decorated = [one for one in _DECORATED.get(name, {}).values() if last.get(one.name, one) is one]
    return list(dict.fromkeys([*decorated, *variables]))


def read_signature(function: Callable[..., Any], *, name: str | None = None) -> tuple[OpenAIFunctionToolSchema, Types]:
    """Return the schema of a function, and the types of the arguments that are converted from the model's JSON.

    A parameter's description comes from the Google-style docstring, else from its type or `Field(description=...)`.

    Raises:
        ConfigError: a parameter lacks an annotation or a description, or cannot be passed by name.
    """
    label = f"tool {name or function.__name__!r}"
    doc = read_docstring(inspect.getdoc(function) or "")
    if not doc.description:
        raise ConfigError(f"{label}: the function has no docstring; its first lines tell the model what the tool does")
    hints, properties, required = _hints(function), {}, []
    types: Types = {}
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise ConfigError(f"{label}: {parameter} is a variadic parameter; a model can only give named ones")
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise ConfigError(f"{label}: the parameter {parameter.name!r} is positional-only; take the '/' away")
        if parameter.name not in hints and parameter.name == "self":
            raise ConfigError(f"{label} is a method of a class; give an object's method: tools=[it.{function.__name__}]")
        if parameter.name not in hints:
            raise ConfigError(f"{label}: the parameter {parameter.name!r} is missing a type hint; write one such as ': str'")
        if _is_hidden(hints[parameter.name]):
            continue
        where = f"{label}: the parameter {parameter.name!r}"
        types[parameter.name], schema = json_type(hints[parameter.name], where=where)
        if (description := doc.parameters.get(parameter.name, schema.get("description"))) is None:
            raise ConfigError(
                f"{label}: there is no description for the argument {parameter.name!r}; add "
                f"'{parameter.name}: what it is' under 'Args:' in the docstring"
            )
        properties[parameter.name] = {**schema, **_description(description, where=where)}
        if parameter.default is parameter.empty:
            required.append(parameter.name)
    types = {name: of for name, of in types.items() if hints[name] not in AS_WRITTEN}
    return OpenAIFunctionToolSchema.of(name or function.__name__, doc.description, properties, required=required), types


_CHOICES = re.compile(r"\s*\(choices:\s*(\[.*\])\)$", re.IGNORECASE)
"""The end of a description that lists the allowed values of a parameter, in the syntax of transformers."""


def _description(text: str, *, where: str) -> dict[str, Any]:
    """Split the text of a parameter into its description and the allowed values, as parts of a schema."""
    if (listed := _CHOICES.search(text)) is None:
        return {"description": text}
    try:
        values = json.loads(listed[1])
    except ValueError as problem:
        raise ConfigError(f"{where} has choices that are not a JSON list ({problem}): {listed[1]:.100}") from problem
    return {"enum": values, "description": text[: listed.start()]}


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    try:
        return typing.get_type_hints(function, include_extras=True)
    except PLUGIN_RAISES as problem:  # an annotation is an author's expression
        raise ConfigError(
            f"tool {function.__name__!r}: an annotation cannot be read ({one_line(problem)}); annotations must use names of "
            "the module's top level"
        ) from problem


def _is_hidden(hint: Any) -> bool:
    return typing.get_origin(hint) is Annotated and FromTask in typing.get_args(hint)[1:]


def _unpickled(
    function: Callable[..., Any], name: str, schema: OpenAIFunctionToolSchema, stateless: bool, is_inferred: bool
) -> FunctionTool:
    tool = FunctionTool(function, name=name, schema=None if is_inferred else schema, stateless=stateless)
    tool.tool_schema = schema
    return tool


def _hidden(function: Callable[..., Any]) -> dict[str, bool]:
    """Return the parameters that the row fills: name -> whether it is required."""
    hints = _hints(function)
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default is p.empty for p in parameters if p.name in hints and _is_hidden(hints[p.name])}
