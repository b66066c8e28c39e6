"""EpisodeTools: the tools of a run in one episode; each is created once and released exactly once on every exit (I9).

    async with EpisodeTools(Toolbox([search, calculator]), "train-7/2") as tools:
        await tools.start(task)                   create, once per tool the task selects
        results = await tools.call(calls)         execute, in parallel, answered in call order
        rewards = await tools.finish()            calc_reward, once
                                                  release, exactly once per create

    a call:   parsed? known tool? valid arguments? -> wait for a slot -> breaker -> execute, with a deadline
    create    returns in time                  ->  owns an instance; `release` runs when the episode ends
              raises or is cancelled           ->  may have taken resources; `release` runs too, and its errors are ignored
              returns late, in its thread      ->  owns an instance; `release` runs at once if the episode has ended

A failing call does not end the episode: the model sees the error and continues. Only failures that the model cannot cause
raise an error: a `create` that fails, a tool that cannot start a call, a reward that is not a number, or too many hanging
calls.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import dataclasses
import functools
import inspect
import logging
import math
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from types import TracebackType
from typing import Any

from polyturn.core.errors import (
    PLUGIN_RAISES,
    LifecycleError,
    PolyturnError,
    RewardError,
    SnapshotError,
    ToolUnavailableError,
    one_line,
    raised_at,
)
from polyturn.core.messages import ToolCall
from polyturn.core.task import Task, ToolKwargs
from polyturn.core.trajectory import ToolResult
from polyturn.infra.aio import finish, first_error
from polyturn.infra.deadline import Stretch
from polyturn.tools import results
from polyturn.tools.agent_data import ToolContext
from polyturn.tools.base import BaseTool
from polyturn.tools.failures import ToolFailure, kind_of, reason_of
from polyturn.tools.result_shape import ToolOutcome, normalize, to_response
from polyturn.tools.toolbox import Toolbox

logger = logging.getLogger(__name__)

Messages = Callable[[], list[dict[str, Any]]]
"""Returns the conversation so far, in OpenAI's format."""


_NO_KWARGS = ToolKwargs()


class ToolStartError(PolyturnError, RuntimeError):
    """A tool's `create` failed. This fails the trajectory, not the run."""


class EpisodeTools:
    """The tools in one episode. `close` must be called on every exit, which `async with` does."""

    def __init__(self, toolbox: Toolbox, episode_id: str) -> None:
        self._toolbox = toolbox
        self._episode_id = episode_id
        self._names: tuple[str, ...] = ()
        self._ids: dict[str, str] = {}
        """The id of each tool's instance, by the tool's name."""
        self._kwargs: Mapping[str, ToolKwargs] = {}
        """The row's arguments for the tools, by name."""
        self._half_created: list[str] = []
        """Tools whose `create` failed or was cancelled, and may have taken resources."""
        self._closing: asyncio.Task[tuple[str, ...]] | None = None
        self._is_started = False
        self._is_finished = False
        self._locks: dict[str, asyncio.Lock] = {}
        self._agent_data: ToolContext | None = None

    async def __aenter__(self) -> EpisodeTools:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def schemas(self) -> tuple[Mapping[str, Any], ...]:
        """The schemas of the selected tools, for rendering."""
        return tuple(self._toolbox.schemas[name] for name in self._names)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the selected tools."""
        return self._names

    async def start(self, task: Task) -> tuple[ToolResult, ...]:
        """Create every tool that the task selects, concurrently.

        Returns:
            The opening messages of the tools that have one; `call_id` is empty.

        Raises:
            DataError: the task names an unknown tool.
            ToolStartError: a `create` raised, was late, or returned an id that another live episode uses.
        """
        if self._is_started or self._closing is not None:
            raise LifecycleError(f"episode {self._episode_id!r}: its tools were started already")
        self._is_started = True
        self._names = self._toolbox.select(task)
        self._kwargs = task.tools_kwargs
        with first_error():
            async with asyncio.TaskGroup() as group:
                creating = [group.create_task(self._create_one(name)) for name in self._names]
        return tuple(message for one in creating if (message := one.result()) is not None)

    async def call(self, calls: Sequence[ToolCall], *, messages: Messages = list) -> tuple[ToolResult, ...]:
        """Run the calls of one turn concurrently, each with a deadline; return the results in call order.

        Args:
            calls: The model's calls.
            messages: Returns the conversation so far, for tools that take it.

        Raises:
            RewardError: a step reward is not a finite number.
            ToolUnavailableError: a tool cannot start a call; or, with `unreachable: failure`, a tool cannot be reached.
            RolloutError: too many calls are still running past their deadline.
            asyncio.CancelledError: the episode was cancelled, which also cancels its calls.
        """
        if not self._is_started or self._closing is not None:
            raise LifecycleError(f"episode {self._episode_id!r}: tools called before their start or after their end")
        self._toolbox.check_abandoned()
        max_calls = self._toolbox.options.max_parallel_calls
        runnable = calls[:max_calls]
        if len(runnable) == 1:
            answers = [await self._answer(runnable[0], messages)]
        else:
            with first_error():
                async with asyncio.TaskGroup() as group:
                    tasks = [group.create_task(self._answer(call, messages)) for call in runnable]
            answers = [t.result() for t in tasks]
        limit = f"at most {max_calls} calls a turn are run; make this one again in your next turn"
        answers += [self._failed(call, ToolFailure.SKIPPED, limit) for call in calls[len(runnable) :]]
        return tuple(answers)

    async def finish(self) -> dict[str, float | None]:
        """Call `calc_reward` of every tool, and return the rewards by the tools' names.

        Raises:
            RewardError: a tool raised, was late, or returned neither a finite number nor None.
        """
        if self._is_finished or self._closing is not None:
            raise LifecycleError(f"episode {self._episode_id!r}: the rewards of its tools were asked for already")
        self._is_finished = True
        rewards: dict[str, float | None] = {}
        for name, instance_id in self._ids.items():
            methods, kwargs = self._toolbox.methods[name], self._kwargs_of(name).calc_reward_kwargs
            bounded = self._toolbox.bounded[name]
            try:
                value = await bounded.run(functools.partial(methods.calc_reward, instance_id, **kwargs))
                rewards[name] = self._toolbox.number_or_none(name, value)
            except PLUGIN_RAISES as problem:
                at = raised_at(problem) or self._toolbox.defined_at(name, "calc_reward")
                raise RewardError(f"tool {name!r}: calc_reward failed: {one_line(problem)}{at}") from problem
        return rewards

    async def snapshot(self) -> dict[str, Any]:
        """Return the state that the tools keep for this episode; call this only after a complete turn.

        Raises:
            SnapshotError: a tool's `snapshot` raised or was late.
        """
        offered = [(name, id) for name, id in self._ids.items() if self._toolbox.hooks[name].snapshot is not None]
        states = {name: await self._hook(name, "snapshot", id) for name, id in offered}
        data = self._agent_data
        return {"states": states, "rewards": data.tool_rewards, "extra": data.extra_fields} if data else {"states": states}

    async def restore(self, state: Mapping[str, Any]) -> None:
        """Restore a result of `snapshot`; the tools must have been created again before.

        Raises:
            SnapshotError: a tool's `restore` raised or was late.
        """
        for name, tool_state in state["states"].items():
            await self._hook(name, "restore", self._ids[name], tool_state)
        if "extra" in state:
            data = self._context()
            data.tool_rewards, data.extra_fields = list(state["rewards"]), dict(state["extra"])

    async def close(self) -> tuple[str, ...]:
        """Release every created tool exactly once; further calls do nothing.

        A tool whose `create` failed is released too, because it may have taken resources; an error of that release is
        ignored.

        Returns:
            The errors of `release`, which are logged and counted but never raised.

        Raises:
            asyncio.CancelledError: the caller was cancelled; raised after everything has been released.
        """
        if self._closing is None:
            self._closing = asyncio.create_task(self._release_all())
        problems, cancelled = await finish(self._closing)
        if cancelled is not None:
            raise cancelled
        return problems

    # Creating and releasing.

    def _kwargs_of(self, name: str) -> ToolKwargs:
        """Return the row's arguments for a tool."""
        return self._kwargs.get(name, _NO_KWARGS)

    async def _create_one(self, name: str) -> ToolResult | None:
        """Create a tool, and return its opening message or None.

        Raises:
            ToolStartError: `create` raised, was late, or returned an id that another live episode uses.
        """
        methods, kwargs = self._toolbox.methods[name], self._kwargs_of(name).create_kwargs
        bounded, loop = self._toolbox.bounded[name], asyncio.get_running_loop()

        def on_late(returned: Any) -> None:
            try:
                loop.call_soon_threadsafe(self._own, name, returned)
            except RuntimeError:  # the loop has ended, and with it the run
                logger.warning("tool %r: create of episode %s ended after the run", name, self._episode_id)

        async def create() -> Any:
            try:
                returned = await bounded.call(functools.partial(methods.create, self._episode_id, **kwargs), on_late=on_late)
            except BaseException as problem:
                is_late = isinstance(problem, asyncio.CancelledError) and not inspect.iscoroutinefunction(methods.create)
                if not is_late:  # `on_late` handles a create that is still running in its thread
                    self._own_half(name)
                raise
            self._own(name, returned)  # at once, without an await in between, so that a cancellation cannot lose it
            return returned

        try:
            returned = await bounded.run(create)
            response = to_response(returned[1] if isinstance(returned, tuple) and len(returned) > 1 else None)
            content = results.content_of(response, text=self._toolbox.limit.cut(response.text or ""))
        except ToolStartError:
            raise
        except PLUGIN_RAISES as problem:
            raise ToolStartError(
                f"tool {name!r}: create failed for episode {self._episode_id!r}: {one_line(problem)}; its arguments "
                f"come from the row's tools_kwargs[{name!r}]['create_kwargs']"
            ) from problem
        return None if response.is_empty() else ToolResult(call_id="", name=name, content=content)

    async def _hook(self, name: str, which: str, *args: Any) -> Any:
        """Call a tool's `snapshot` or `restore`.

        Raises:
            SnapshotError: the hook raised or was late.
        """
        hooks = self._toolbox.hooks[name]
        method: Any = hooks.snapshot if which == "snapshot" else hooks.restore
        try:
            return await self._toolbox.bounded[name].run(functools.partial(method, *args))
        except Exception as problem:
            raise SnapshotError(f"{hooks.label}: {which} failed: {one_line(problem)}") from problem

    def _own(self, name: str, returned: Any) -> None:
        """Register a created instance for release; release it now if the episode has already ended."""
        first = returned[0] if isinstance(returned, tuple) and returned else returned
        instance_id = self._episode_id if first is None or isinstance(first, tuple) else str(first)
        if (name, instance_id) in self._toolbox.live_ids:
            raise ToolStartError(
                f"tool {name!r}: create returned the id {instance_id!r}, which another live episode uses; return the id it "
                "was given, or a new one"
            )
        self._toolbox.live_ids.add((name, instance_id))
        self._ids[name] = instance_id
        if self._closing is not None:
            self._do_late(self._release(name, []))

    def _own_half(self, name: str) -> None:
        """Register a failed `create` for release with the others; release it now if the episode has already ended."""
        if self._closing is None:
            self._half_created.append(name)
        else:
            self._do_late(self._release_half(name))

    def _do_late(self, release: Coroutine[Any, Any, None]) -> None:
        """Run a release for an episode that has already ended."""
        late = asyncio.get_running_loop().create_task(release)
        self._toolbox.late.add(late)
        late.add_done_callback(self._toolbox.late.discard)

    async def _release_all(self) -> tuple[str, ...]:
        problems: list[str] = []
        async with asyncio.TaskGroup() as group:
            for name in list(self._ids):
                group.create_task(self._release(name, problems))
            for name in self._half_created:
                group.create_task(self._release_half(name))
        return tuple(problems)

    async def _release(self, name: str, problems: list[str]) -> None:
        instance_id = self._ids.pop(name, None)
        if instance_id is None:  # a late create is already releasing it
            return
        methods, kwargs = self._toolbox.methods[name], self._kwargs_of(name).release_kwargs
        bounded = self._toolbox.bounded[name]
        try:
            await bounded.run(functools.partial(methods.release, instance_id, **kwargs), is_owed=True)
        except Exception as problem:
            reason = f"{one_line(problem)}{raised_at(problem)}"
            problems.append(f"tool {name!r}: release failed for episode {self._episode_id!r}: {reason}")
            logger.warning("%s", problems[-1])
        finally:
            self._toolbox.live_ids.discard((name, instance_id))

    async def _release_half(self, name: str) -> None:
        """Release the resources of a failed `create`, and ignore errors, because it may not have taken any."""
        methods, kwargs = self._toolbox.methods[name], self._kwargs_of(name).release_kwargs
        try:
            release = functools.partial(methods.release, self._episode_id, **kwargs)
            await self._toolbox.bounded[name].run(release, is_owed=True)
        except Exception as problem:
            logger.debug("tool %r: release after a failed create: %s", name, one_line(problem))

    # One call.

    async def _answer(self, call: ToolCall, messages: Messages) -> ToolResult:
        """Answer one call; a malformed call, an unknown tool or invalid arguments never reach a tool."""
        if (refused := self._refused(call)) is not None:
            return refused
        is_plain, concurrency = not self._toolbox.methods[call.name].is_async, self._toolbox.concurrency
        if not is_plain and not concurrency.has_limit(call.name):
            return await self._execute(call, messages)
        # Plain methods run in threads; no two of them may use an instance's state at the same time.
        alone = self._locks.setdefault(call.name, asyncio.Lock()) if is_plain else contextlib.nullcontext()
        # Waiting for the lock or for a slot does not count towards the call's deadline.
        async with alone, concurrency.turn(call.name) as waited_s:
            result = await self._execute(call, messages)
        if not concurrency.has_limit(call.name):
            return result
        return dataclasses.replace(result, metrics={**result.metrics, results.WAITED_S: waited_s})

    def _refused(self, call: ToolCall) -> ToolResult | None:
        """Return the answer to a call that must not reach a tool; None for any other call."""
        if call.error is not None:
            return self._failed(call, ToolFailure.BAD_JSON, call.error)
        if call.name not in self._names:
            return self._failed(
                call, ToolFailure.UNKNOWN_TOOL, f"there is no tool {call.name!r}. {results.available(self._names)}"
            )
        schema = self._toolbox.arguments[call.name]
        if schema is not None and (wrong := schema.problem(dict(call.arguments))):
            return self._failed(call, ToolFailure.SCHEMA, f"{wrong} (tool {call.name!r})")
        return None

    async def _execute(self, call: ToolCall, messages: Messages) -> ToolResult:
        """Make a call with a deadline, unless the tool's breaker is open, and report the outcome to the breaker."""
        toolbox, breaker, clock = self._toolbox, self._toolbox.breakers[call.name], asyncio.get_running_loop().time
        if (rest_s := breaker.admit()) is not None:
            if toolbox.options.unreachable == "failure":
                raise ToolUnavailableError(f"tool {call.name!r} cannot be reached; its breaker is open")
            why = f"{call.name!r} does not work at the moment and was not called; try again in {math.ceil(rest_s)} s"
            return self._failed(call, ToolFailure.CIRCUIT_OPEN, why)
        began, began_at = time.monotonic(), clock()
        kwargs = self._kwargs_of(call.name).execute_kwargs
        if toolbox.methods[call.name].wants_agent_data:
            context = self._context()
            context.messages = messages()
            kwargs = {"agent_data": context, **kwargs}
        arguments = _own_copy(dict(call.arguments))  # the tool may change them, which must not affect the record
        execute = functools.partial(toolbox.tools[call.name].execute, self._ids[call.name], arguments, **kwargs)
        try:
            tool = toolbox.tools[call.name]
            stretch = Stretch() if isinstance(tool, BaseTool) and tool.waits_apart else None
            outcome = normalize(await toolbox.bounded[call.name].run(execute, stretch=stretch))
            result = self._result(call, outcome, duration_s=clock() - began_at)
        except PLUGIN_RAISES as problem:
            error = problem if isinstance(problem, Exception) else RuntimeError(one_line(problem))
            result = self._raised(call, error, duration_s=clock() - began_at)
        if result.error is not None and ToolFailure(result.error).is_infrastructure:
            breaker.failed(began=began)
        else:
            breaker.answered()
        if toolbox.options.unreachable == "failure" and result.error == ToolFailure.CONNECTION:
            raise ToolUnavailableError(f"tool {call.name!r} cannot be reached: {str(result.content)[:500]}")
        return result

    def _result(self, call: ToolCall, outcome: ToolOutcome, *, duration_s: float) -> ToolResult:
        """Convert a tool's answer to an observation."""
        text, num_cut = self._toolbox.limit.cut_and_count(outcome.response.text or "")
        content = results.content_of(outcome.response, text=text)
        if outcome.reward is not None and self._agent_data is not None:
            self._agent_data.tool_rewards.append(outcome.reward)
        return ToolResult(
            call_id=call.id,
            name=call.name,
            content=content,
            reward=outcome.reward,
            metrics={**outcome.metrics, **_cut_metrics(num_cut)},
            error=results.reported_failure(outcome.metrics),
            duration_s=duration_s,
        )

    def _raised(self, call: ToolCall, problem: Exception, *, duration_s: float) -> ToolResult:
        """Convert a tool's exception to an observation; its error kind says whether the tool or the model failed.

        Raises:
            RewardError, ToolUnavailableError: the exception fails the trajectory instead.
        """
        if isinstance(problem, RewardError):
            at = raised_at(problem) or self._toolbox.defined_at(call.name)
            raise RewardError(f"tool {call.name!r}: {problem}{at}") from problem
        if isinstance(problem, ToolUnavailableError):
            raise ToolUnavailableError(f"tool {call.name!r}: {problem}") from problem
        kind = kind_of(problem)
        failed = self._failed(call, kind, reason_of(problem, tool=call.name), duration_s=duration_s)
        return failed if kind is not ToolFailure.EXCEPTION else self._toolbox.crashed(failed, problem)

    def _context(self) -> ToolContext:
        if self._agent_data is None:
            kwargs = {name: dataclasses.asdict(of) for name, of in self._kwargs.items()}
            self._agent_data = ToolContext(request_id=self._episode_id, tools_kwargs=kwargs)
        return self._agent_data

    def _failed(self, call: ToolCall, kind: ToolFailure, reason: str, *, duration_s: float = 0.0) -> ToolResult:
        text, num_cut = self._toolbox.limit.cut_and_count(results.error_text(kind, reason))
        return ToolResult(
            call_id=call.id,
            name=call.name,
            content=text,
            metrics=_cut_metrics(num_cut),
            error=kind.value,
            duration_s=duration_s,
        )


def _own_copy(value: Any) -> Any:
    """Return a deep copy of a call's arguments. They are JSON unless a plug-in made the call."""
    if type(value) in (str, int, float, bool, type(None)):
        return value
    if type(value) is dict:
        return {key: _own_copy(inner) for key, inner in value.items()}
    return [_own_copy(inner) for inner in value] if type(value) is list else copy.deepcopy(value)


def _cut_metrics(num_cut: int) -> Mapping[str, Any]:
    return {results.CUT_CHARS: num_cut} if num_cut else {}
