"""ToolBox and ToolSession: every tool of a run, and their use in one episode.

    async with box.session("train-7/2") as session:
        await session.start(task)                   create, once per tool the task selects
        results = await session.call(calls)         execute, in parallel, answered in call order
        rewards = await session.finish()            calc_reward, once
                                                    release, exactly once per create (I9), also after errors

A call that fails is an observation: the model reads what went wrong and the episode goes on. Only what the model cannot
answer for raises: a `create` that fails, a reward that is no number, too many calls left behind.
"""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import inspect
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

from polyturn.core.aio import first_error
from polyturn.core.errors import (
    ConfigError,
    DataError,
    LifecycleError,
    PolyturnError,
    RewardError,
    RolloutError,
    ToolError,
    did_you_mean,
    one_line,
)
from polyturn.core.messages import ToolCall
from polyturn.core.protocols import Tool
from polyturn.core.task import Task, ToolKwargs, select_tools
from polyturn.core.trajectory import ToolResult
from polyturn.tools import results
from polyturn.tools.agent_data import AgentData
from polyturn.tools.base import BaseTool, check_names
from polyturn.tools.bounded import Bounded, DeadlineError
from polyturn.tools.forms import methods_of
from polyturn.tools.function import FunctionTool
from polyturn.tools.outcome import finite, normalize, to_response
from polyturn.tools.validate import arguments_problem

logger = logging.getLogger(__name__)

_NO_KWARGS = ToolKwargs()


class ToolStartError(PolyturnError, RuntimeError):
    """A tool whose `create` failed: the trajectory fails, the run goes on."""


class ToolBox:
    """Every tool of a run and the limits of each call. Shared by all episodes."""

    def __init__(
        self,
        tools: Sequence[Tool],
        *,
        timeout_s: float = 60.0,
        max_parallel_calls: int = 16,
        max_result_chars: int | None = 8192,
        truncate_side: results.TruncateSide = "middle",
        max_abandoned: int = 64,
    ) -> None:
        """Collect the tools.

        Args:
            tools: Objects with `name`, `schema`, `create`, `execute`, `calc_reward` and `release`.
            timeout_s: Deadline of every single call into a tool.
            max_parallel_calls: Calls of one turn beyond this many are answered as skipped.
            max_result_chars: How much of a result's text the model reads; None is all.
            truncate_side: Which part of a longer text goes; see `results.truncate`.
            max_abandoned: How many calls past their deadline may be running before the run ends.

        Raises:
            ConfigError: two tools have one name, or a value cannot work.
        """
        check_names(tools)
        self.tools: dict[str, Tool] = {tool.name: tool for tool in tools}
        if timeout_s <= 0 or max_parallel_calls < 1:
            raise ConfigError(
                f"timeout_s is {timeout_s} and max_parallel_calls is {max_parallel_calls}; the first must be positive, the "
                "second at least 1"
            )
        results.check_side(truncate_side)
        self.max_parallel_calls = max_parallel_calls
        self.max_result_chars = max_result_chars
        self.truncate_side: results.TruncateSide = truncate_side
        self.max_abandoned = max_abandoned
        self.schemas = {name: _schema_of(tool) for name, tool in self.tools.items()}
        self.bounded = {name: Bounded(name=f"tool-{name}", timeout_s=timeout_s) for name in self.tools}
        self.methods = {name: methods_of(tool) for name, tool in self.tools.items()}
        self.live_ids: set[tuple[str, str]] = set()
        self._warned: set[str] = set()
        self.late: set[asyncio.Task[None]] = set()
        """Releases of creates that came back after their episode had ended."""

    def select(self, task: Task) -> tuple[str, ...]:
        """Return the names of the tools that a task may call; a name that it skips is warned of once in a run.

        Raises:
            DataError: it names a tool that is not there and that it does not skip, or it needs tools and has none.
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
        """Return the schemas of the tools that a task may call, for rendering.

        Raises:
            DataError: it names a tool that is not there.
        """
        return tuple(self.schemas[name] for name in self.select(task))

    def session(self, episode_id: str) -> ToolSession:
        """Return the tools' part of one episode, which is also the id that the tools get."""
        return ToolSession(self, episode_id)

    @property
    def num_abandoned(self) -> int:
        """How many calls run on although their deadline has passed."""
        return sum(map(self._abandoned, self.tools))

    def number_or_none(self, name: str, value: Any) -> float | None:
        """Return what `calc_reward` returned as a reward; a list of texts, as some tools return, is no opinion.

        Raises:
            RewardError: it is neither that nor a finite number nor None.
        """
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
            return finite(value, what="calc_reward")
        if f"{name}: texts" not in self._warned:
            self._warned.add(f"{name}: texts")
            logger.warning("tool %r: calc_reward returned a list of texts, which is no reward; none is counted", name)
        return None

    def check_abandoned(self) -> None:
        """Check that the tools keep their deadlines on the whole.

        Raises:
            RolloutError: too many calls were left behind.
        """
        if self.num_abandoned > self.max_abandoned:
            worst = max(self.tools, key=self._abandoned)
            raise RolloutError(
                f"{self.num_abandoned} tool calls still run past their deadline, most of them in {worst!r}; give the tool "
                "a time-out of its own that ends its work"
            )

    def _abandoned(self, name: str) -> int:
        tool = self.tools[name]
        return self.bounded[name].num_abandoned + (tool.threads.num_abandoned if isinstance(tool, FunctionTool) else 0)


class ToolSession:
    """The tools in one episode. `close` must be called whatever happened; `async with` does."""

    def __init__(self, box: ToolBox, episode_id: str) -> None:
        self._box = box
        self._episode_id = episode_id
        self._names: tuple[str, ...] = ()
        self._kwargs: Mapping[str, ToolKwargs] = {}
        self._ids: dict[str, str] = {}
        self._half_created: list[str] = []
        """Tools whose create began and failed or was cancelled, maybe after it took something."""
        self._is_started = False
        self._is_finished = False
        self._closing: asyncio.Task[tuple[str, ...]] | None = None
        self._locks: dict[str, asyncio.Lock] = {}
        self._messages: Callable[[], list[dict[str, Any]]] = list
        self._agent_data: AgentData | None = None

    async def __aenter__(self) -> ToolSession:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def schemas(self) -> tuple[Mapping[str, Any], ...]:
        """The schemas of the selected tools, for rendering."""
        return tuple(self._box.schemas[name] for name in self._names)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the selected tools."""
        return self._names

    async def start(self, task: Task) -> tuple[ToolResult, ...]:
        """Create every tool that the task selects, all at once.

        Returns:
            What the tools say at the start, of those that say something; `call_id` is empty.

        Raises:
            DataError: the task names a tool that is not there.
            ToolStartError: a `create` raised, was late, or returned an id that another live episode uses.
        """
        if self._is_started or self._closing is not None:
            raise LifecycleError(f"episode {self._episode_id!r}: its tools were started already")
        self._is_started = True
        self._names = self._box.select(task)
        self._kwargs = task.tools_kwargs
        said: dict[str, ToolResult] = {}
        with first_error():
            async with asyncio.TaskGroup() as group:
                for name in self._names:
                    group.create_task(self._create(name, said))
        return tuple(said[name] for name in self._names if name in said)

    async def call(
        self, calls: Sequence[ToolCall], *, messages: Callable[[], list[dict[str, Any]]] = list
    ) -> tuple[ToolResult, ...]:
        """Answer the calls of one turn: run in parallel, answered in call order, each with a deadline.

        Args:
            calls: What the model wrote.
            messages: Gives the conversation so far to the tools that ask for it.

        Raises:
            RewardError: a step reward is not a finite number.
            RolloutError: too many calls run on past their deadline.
            asyncio.CancelledError: the episode is cancelled; the calls are too.
        """
        if not self._is_started or self._closing is not None:
            raise LifecycleError(f"episode {self._episode_id!r}: tools called before their start or after their end")
        self._box.check_abandoned()
        self._messages = messages
        runnable = calls[: self._box.max_parallel_calls]
        try:
            if len(runnable) == 1:
                answers = [await self._answer(runnable[0])]
            else:
                with first_error():
                    async with asyncio.TaskGroup() as group:
                        tasks = [group.create_task(self._answer(call)) for call in runnable]
                answers = [t.result() for t in tasks]
        finally:
            self._messages = list  # the episode, which it reads, holds this session
        limit = f"at most {self._box.max_parallel_calls} calls a turn are run; make this one again in your next turn"
        answers += [self._failed(call, results.SKIPPED, limit) for call in calls[len(runnable) :]]
        return tuple(answers)

    async def finish(self) -> dict[str, float | None]:
        """Ask every tool for its reward for the episode.

        Raises:
            RewardError: one raised, was late, or returned something that is neither a finite number nor None.
        """
        if self._is_finished or self._closing is not None:
            raise LifecycleError(f"episode {self._episode_id!r}: the rewards of its tools were asked for already")
        self._is_finished = True
        rewards: dict[str, float | None] = {}
        for name, instance_id in self._ids.items():
            methods, kwargs = self._box.methods[name], self._kwargs.get(name, _NO_KWARGS).calc_reward_kwargs
            bounded = self._box.bounded[name]
            try:
                value = await bounded.run(methods.calc_reward, instance_id, **kwargs)
                rewards[name] = self._box.number_or_none(name, value)
            except Exception as problem:
                raise RewardError(f"tool {name!r}: calc_reward failed: {one_line(problem)}") from problem
        return rewards

    async def close(self) -> tuple[str, ...]:
        """Release every tool that was created, exactly once, however often and in whatever state this is called.

        A create that failed on its way may have taken something, so its tool is released too; if that fails, it is not
        counted.

        Returns:
            What went wrong in a `release`; it is logged and counted, never raised.

        Raises:
            asyncio.CancelledError: the caller was cancelled meanwhile; everything has been released first.
        """
        if self._closing is None:
            self._closing = asyncio.create_task(self._release_all())
        cancelled: asyncio.CancelledError | None = None
        while not self._closing.done():
            try:
                await asyncio.wait({self._closing})
            except asyncio.CancelledError as problem:
                cancelled = problem
        if cancelled is not None:
            raise cancelled
        return self._closing.result()

    # ---- one tool ---------------------------------------------------------------------------------------------------

    async def _create(self, name: str, said: dict[str, ToolResult]) -> None:
        methods, kwargs = self._box.methods[name], self._kwargs.get(name, _NO_KWARGS).create_kwargs
        bounded, loop = self._box.bounded[name], asyncio.get_running_loop()

        def on_late(returned: Any) -> None:
            try:
                loop.call_soon_threadsafe(self._own, name, returned)
            except RuntimeError:  # the loop has ended, and with it the run
                logger.warning("tool %r: create of episode %s ended after the run", name, self._episode_id)

        async def create() -> Any:
            try:
                returned = await bounded.call(methods.create, self._episode_id, on_late=on_late, **kwargs)
            except BaseException as problem:
                is_late = isinstance(problem, asyncio.CancelledError) and not inspect.iscoroutinefunction(methods.create)
                if self._closing is None and not is_late:  # what runs on in its thread is taken over by `on_late`
                    self._half_created.append(name)
                raise
            self._own(name, returned)  # at once: nothing may come between a create and our knowing of it
            return returned

        try:
            returned = await bounded.run(create)
            response = to_response(returned[1] if isinstance(returned, tuple) and len(returned) > 1 else None)
            content = self._content(response)
        except ToolStartError:
            raise
        except Exception as problem:
            raise ToolStartError(
                f"tool {name!r}: create failed for episode {self._episode_id!r}: {one_line(problem)}; check the row's "
                f"tools_kwargs[{name!r}]['create_kwargs']"
            ) from problem
        if not response.is_empty():
            said[name] = ToolResult(call_id="", name=name, content=content)

    def _own(self, name: str, returned: Any) -> None:
        """Take over what a `create` made; release it now if the episode has ended meanwhile."""
        first = returned[0] if isinstance(returned, tuple) and returned else returned
        instance_id = self._episode_id if first is None or isinstance(first, tuple) else str(first)
        if (name, instance_id) in self._box.live_ids:
            raise ToolStartError(
                f"tool {name!r}: create returned the id {instance_id!r}, which another live episode uses; return the id it "
                "was given, or a new one"
            )
        self._box.live_ids.add((name, instance_id))
        self._ids[name] = instance_id
        if self._closing is not None:
            late = asyncio.get_running_loop().create_task(self._release(name, []))
            self._box.late.add(late)
            late.add_done_callback(self._box.late.discard)

    async def _answer(self, call: ToolCall) -> ToolResult:
        if call.error is not None:
            return self._failed(call, results.BAD_JSON, call.error)
        if call.name not in self._names:
            return self._failed(
                call, results.UNKNOWN_TOOL, f"there is no tool {call.name!r}. {results.available(self._names)}"
            )
        tool = self._box.tools[call.name]
        arguments = copy.deepcopy(dict(call.arguments))  # the tool may keep or change them; the record must not
        if not (isinstance(tool, BaseTool) and tool.checks_own_arguments):
            parameters = self._box.schemas[call.name].get("function", {}).get("parameters") or {}
            if wrong := arguments_problem(arguments, parameters, also=self._box.methods[call.name].also_reads):
                return self._failed(call, results.SCHEMA, f"{wrong} (tool {call.name!r})")
        if inspect.iscoroutinefunction(tool.execute):
            return await self._execute(tool, call, arguments)
        async with self._locks.setdefault(call.name, asyncio.Lock()):  # threads must not share one instance's state
            return await self._execute(tool, call, arguments)

    async def _execute(self, tool: Tool, call: ToolCall, arguments: dict[str, Any]) -> ToolResult:
        bounded, kwargs = self._box.bounded[call.name], self._kwargs.get(call.name, _NO_KWARGS).execute_kwargs
        if self._box.methods[call.name].wants_agent_data:
            kwargs = {"agent_data": self._seen_by_tools(), **kwargs}
        began = time.perf_counter()
        try:
            outcome = normalize(await bounded.run(tool.execute, self._ids[call.name], arguments, **kwargs))
            content = self._content(outcome.response)
        except DeadlineError as problem:
            return self._failed(call, results.TIMEOUT, f"{call.name!r} did not answer: {problem}", began=began)
        except ToolError as problem:
            return self._failed(call, results.TOOL_ERROR, str(problem), began=began)
        except RewardError as problem:
            raise RewardError(f"tool {call.name!r}: {problem}") from problem
        except Exception as problem:
            return self._failed(call, results.EXCEPTION, one_line(problem), began=began)
        if outcome.reward is not None and self._agent_data is not None:
            self._agent_data.tool_rewards.append(outcome.reward)
        return ToolResult(
            call_id=call.id,
            name=call.name,
            content=content,
            reward=outcome.reward,
            metrics=outcome.metrics,
            duration_s=time.perf_counter() - began,
        )

    def _seen_by_tools(self) -> AgentData:
        if self._agent_data is None:
            kwargs = {name: dataclasses.asdict(of) for name, of in self._kwargs.items()}
            self._agent_data = AgentData(request_id=self._episode_id, tools_kwargs=kwargs)
        self._agent_data.messages = self._messages()
        return self._agent_data

    async def _release_all(self) -> tuple[str, ...]:
        problems: list[str] = []
        async with asyncio.TaskGroup() as group:
            for name in list(self._ids):
                group.create_task(self._release(name, problems))
            for name in self._half_created:
                group.create_task(self._release_half(name))
        return tuple(problems)

    async def _release(self, name: str, problems: list[str]) -> None:
        instance_id = self._ids.pop(name)
        methods, kwargs = self._box.methods[name], self._kwargs.get(name, _NO_KWARGS).release_kwargs
        bounded = self._box.bounded[name]
        try:
            await bounded.run(methods.release, instance_id, is_owed=True, **kwargs)
        except Exception as problem:
            problems.append(f"tool {name!r}: release failed for episode {self._episode_id!r}: {one_line(problem)}")
            logger.warning("%s", problems[-1])
        finally:
            self._box.live_ids.discard((name, instance_id))

    async def _release_half(self, name: str) -> None:
        """Release what a failed create may have taken; where it took nothing, a release may well fail."""
        methods, kwargs = self._box.methods[name], self._kwargs.get(name, _NO_KWARGS).release_kwargs
        try:
            await self._box.bounded[name].run(methods.release, self._episode_id, is_owed=True, **kwargs)
        except Exception as problem:
            logger.debug("tool %r: release after a failed create: %s", name, one_line(problem))

    # ---- results ----------------------------------------------------------------------------------------------------

    def _content(self, response: Any) -> Any:
        return results.content_of(response, max_chars=self._box.max_result_chars, side=self._box.truncate_side)

    def _failed(self, call: ToolCall, kind: str, reason: str, *, began: float | None = None) -> ToolResult:
        text = results.truncate(
            results.error_text(kind, reason), max_chars=self._box.max_result_chars, side=self._box.truncate_side
        )
        duration = 0.0 if began is None else time.perf_counter() - began
        return ToolResult(call_id=call.id, name=call.name, content=text, error=kind, duration_s=duration)


def _schema_of(tool: Tool) -> dict[str, Any]:
    schema = copy.deepcopy(dict(tool.schema))
    shown = schema.get("function", {}).get("name")
    if shown != tool.name:
        raise ConfigError(f"the tool {tool.name!r} is called {shown!r} in its schema; the model would call it by that name")
    return schema
