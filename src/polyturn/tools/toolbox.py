"""Toolbox: every tool of a run, with the deadline, result size, concurrency limits and breaker of its calls.

toolbox = Toolbox([search, calculator], ToolOptions(timeout_s=60))
async with EpisodeTools(toolbox, "train-7/2") as tools: ...        the tools in one episode; see `episode_tools.py`
"""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from polyturn.core.code_origin import defined_at
from polyturn.core.errors import ConfigError, DataError, RolloutError, did_you_mean, one_line, raised_at
from polyturn.core.messages import Origin
from polyturn.core.protocols import Tool
from polyturn.core.snapshots import SnapshotHooks
from polyturn.core.task import Task, select_tools
from polyturn.core.trajectory import RAISED_AT, ToolResult
from polyturn.infra.deadline import MAX_ABANDONED, CallWithDeadline
from polyturn.infra.nesting import excess
from polyturn.tokens.codec import Codec
from polyturn.tools.adapters import methods_of
from polyturn.tools.base import BaseTool, check_names
from polyturn.tools.breaker import Breaker
from polyturn.tools.concurrency import ConcurrencyLimits
from polyturn.tools.function import FunctionTool
from polyturn.tools.options import ToolOptions
from polyturn.tools.result_shape import finite
from polyturn.tools.truncate import ResultLimit
from polyturn.tools.validate import ArgumentSchema

logger = logging.getLogger(__name__)

MAX_SCHEMA_PARTS = 1 << 16
"""Maximum number of lists and mappings in the schema of one tool."""


class Toolbox:
    """Every tool of a run, and the limits of each call. Shared by all episodes."""

    def __init__(self, tools: Sequence[Tool], options: ToolOptions | None = None, *, codec: Codec | None = None) -> None:
        """Collect the tools.

        Args:
            tools: Objects with `name`, `schema`, `create`, `execute`, `calc_reward` and `release`.
            options: The limits of each call.
            codec: Counts tokens, and finds control texts, which a cut must not split.

        Raises:
            ConfigError: two tools have the same name, or a value is invalid.
        """
        check_names(tools)
        self.max_abandoned = MAX_ABANDONED
        self.tools: dict[str, Tool] = {tool.name: tool for tool in tools}
        self.options = options = options or ToolOptions()
        for tool in self.tools.values():
            if isinstance(tool, BaseTool):
                tool.fit_deadline(options.timeout_s)
        self.limit = ResultLimit(
            max_chars=options.max_result_chars,
            max_tokens=options.max_result_tokens,
            side=options.truncate_side,
            codec=codec,
        )
        self.concurrency = _concurrency_limits(self.tools, options.max_concurrency, options.max_per_host)
        self.breakers = {name: Breaker(name, options.breaker) for name in self.tools}
        self.schemas = {name: _schema_of(tool) for name, tool in self.tools.items()}
        self.foreign = frozenset(
            name for name, tool in self.tools.items() if isinstance(tool, BaseTool) and tool.origin is not Origin.OWNER
        )
        """Names of the tools whose schemas do not come from the run's owner."""
        self.bounded = {name: CallWithDeadline(name=f"tool-{name}", timeout_s=options.timeout_s) for name in self.tools}
        self.methods = {name: methods_of(tool) for name, tool in self.tools.items()}
        self.arguments = {name: self._arguments_of(name, tool) for name, tool in self.tools.items()}
        """Tool name -> schema of its arguments; None if the tool checks arguments itself."""
        self.hooks = {name: SnapshotHooks.of(tool, label=f"tool {name!r}") for name, tool in self.tools.items()}
        """Tool name -> hooks that save and restore its state across a restart."""
        self.live_ids: set[tuple[str, str]] = set()
        self._warned: set[str] = set()
        self.late: set[asyncio.Task[None]] = set()
        """Running releases for creates that finished after their episode had ended."""

    def _arguments_of(self, name: str, tool: Tool) -> ArgumentSchema | None:
        if isinstance(tool, BaseTool) and tool.checks_own_arguments:
            return None
        parameters = self.schemas[name].get("function", {}).get("parameters") or {}
        return ArgumentSchema(parameters, tool=name, also=self.methods[name].also_reads)

    @property
    def scoring(self) -> frozenset[str]:
        """The names of the tools that may return a reward, for a call or for the episode."""
        return frozenset(name for name, tool in self.tools.items() if not isinstance(tool, FunctionTool) or tool.may_score)

    def select(self, task: Task) -> tuple[str, ...]:
        """Return the names of the task's tools; warn once per run about each unknown name that the task skips.

        Raises:
            DataError: the task names an unknown tool that it does not skip, or it needs tools and the run has none of them.
        """
        try:
            chosen = select_tools(task, self.tools)
        except DataError as problem:
            raise DataError(f"task {task.id!r}: {problem}") from problem
        for name in chosen.skipped:
            if name not in self._warned:
                self._warned.add(name)
                hint = did_you_mean(name, self.tools) if self.tools else " No tool is configured."
                logger.warning("the tool %r, named by tasks such as %r, is not configured: left out.%s", name, task.id, hint)
        return chosen.names

    def schemas_of(self, task: Task) -> tuple[Mapping[str, Any], ...]:
        """Return the schemas of the task's tools, for rendering.

        Raises:
            DataError: the task names an unknown tool.
        """
        return tuple(self.schemas[name] for name in self.select(task))

    @property
    def num_abandoned(self) -> int:
        """Number of calls that are still running past their deadline."""
        return sum(map(self._abandoned, self.tools))

    def number_or_none(self, name: str, value: Any) -> float | None:
        """Convert the result of `calc_reward` to a reward; a list of texts, which some tools return, counts as None.

        Raises:
            RewardError: the result is neither a list of texts nor a finite number nor None.
        """
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
            return finite(value, what="episode")
        if f"{name}: texts" not in self._warned:
            self._warned.add(f"{name}: texts")
            logger.warning("tool %r: calc_reward returned a list of texts, which does not count as a reward", name)
        return None

    def crashed(self, result: ToolResult, problem: Exception) -> ToolResult:
        """Log a tool's exception once per tool and line; return the result with that line in its metrics.

        It is the line that raised; if reading the tool's answer raised, it is the first line of the tool's code.
        """
        where = raised_at(problem) or self.defined_at(result.name)
        if f"{result.name}{where}" not in self._warned:
            self._warned.add(f"{result.name}{where}")
            logger.warning("tool %r raised %s%s", result.name, one_line(problem), where, exc_info=problem)
        return dataclasses.replace(result, metrics={**result.metrics, RAISED_AT: where.strip(" ()")}) if where else result

    def defined_at(self, name: str, method: str = "execute") -> str:
        """Return the position of a tool's method, for messages; "" if the tool is not an author's."""
        tool = self.tools[name]
        return defined_at(tool if isinstance(tool, FunctionTool) else getattr(tool, method))

    def check_abandoned(self) -> None:
        """Check that at most `max_abandoned` calls are still running past their deadline.

        Raises:
            RolloutError: there are too many such calls.
        """
        if self.num_abandoned > self.max_abandoned:
            worst = max(self.tools, key=self._abandoned)
            raise RolloutError(
                f"{self.num_abandoned} tool calls still run past their deadline, most of them in {worst!r}; give the tool "
                "a time-out of its own that ends its work"
            )

    def close(self) -> None:
        """Let the tools' threads end once they are idle, at the end of a run; the tools can still be used."""
        for name, tool in self.tools.items():
            self.bounded[name].close()
            if isinstance(tool, FunctionTool):
                tool.threads.close()

    def _abandoned(self, name: str) -> int:
        tool = self.tools[name]
        return self.bounded[name].num_abandoned + (tool.threads.num_abandoned if isinstance(tool, FunctionTool) else 0)


def _schema_of(tool: Tool) -> dict[str, Any]:
    try:
        schema = dict(tool.schema)
        problem = excess(schema, max_count=MAX_SCHEMA_PARTS)
    except RecursionError:  # a schema that is not a plain dictionary converts itself by recursion
        problem = "it is nested without end, or refers to itself"
    if problem is not None:
        raise ConfigError(f"the tool {tool.name!r} has a schema that cannot be put in a prompt: {problem}; write it flatter")
    schema = copy.deepcopy(schema)
    name = schema.get("function", {}).get("name")
    if name != tool.name:
        raise ConfigError(f"the tool {tool.name!r} is called {name!r} in its schema; the model would call it by that name")
    return schema


def _concurrency_limits(tools: Mapping[str, Tool], wanted: Mapping[str, int], max_per_host: int | None) -> ConcurrencyLimits:
    for name in wanted:
        if name not in tools:
            raise ConfigError(f"max_concurrency names the tool {name!r}, which the run lacks.{did_you_mean(name, tools)}")
    ours = {name: tool for name, tool in tools.items() if isinstance(tool, BaseTool)}
    own = {name: tool.max_concurrency for name, tool in ours.items() if tool.max_concurrency is not None}
    hosts = {name: ours[name].host if name in ours else None for name in tools}
    return ConcurrencyLimits(of_tools={**own, **wanted}, hosts=hosts, max_per_host=max_per_host)
