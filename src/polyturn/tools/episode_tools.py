"""ToolSession: the tools of a run, in one episode.

    async with box.session("train-7/2") as session:
        await session.start(task)                   create, once per tool the task selects
        results = await session.call(calls)         execute, in parallel, answered in call order
        rewards = await session.finish()            calc_reward, once
                                                    release, exactly once per create (`instances`)

    a call:   can it be read, is the tool there, do the arguments fit -> its turn -> breaker -> execute, with a deadline

A call that fails is an observation: the model reads what went wrong and the episode goes on. Only what the model cannot
answer for raises: a `create` that fails, a tool that cannot begin a call, a reward that is no number, too many calls left
behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import dataclasses
import functools
import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any

from polyturn.core.aio import first_error
from polyturn.core.errors import LifecycleError, RewardError, ToolUnavailableError, one_line
from polyturn.core.interrupts import PLUGIN_RAISES, pass_interrupt
from polyturn.core.messages import ToolCall
from polyturn.core.task import Task
from polyturn.core.trajectory import ToolResult
from polyturn.tools import results
from polyturn.tools.agent_data import ToolContext
from polyturn.tools.failures import ToolFailure, kind_of, reason_of
from polyturn.tools.result_shape import ToolOutcome, normalize
from polyturn.tools.run_tools import RunTools
from polyturn.tools.tool_lifecycle import EpisodeTools

logger = logging.getLogger(__name__)

Messages = Callable[[], list[dict[str, Any]]]
"""Gives a conversation so far, in OpenAI's form."""


class ToolSession:
    """The tools in one episode. `close` must be called whatever happened; `async with` does."""

    def __init__(self, box: RunTools, episode_id: str) -> None:
        self._box = box
        self._episode_id = episode_id
        self._names: tuple[str, ...] = ()
        self._instances = EpisodeTools(box, episode_id)
        self._is_started = False
        self._is_finished = False
        self._locks: dict[str, asyncio.Lock] = {}
        self._agent_data: ToolContext | None = None

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
        if self._is_started or self._instances.is_closing:
            raise LifecycleError(f"episode {self._episode_id!r}: its tools were started already")
        self._is_started = True
        self._names = self._box.select(task)
        self._instances.kwargs = task.tools_kwargs
        said = await self._create(self._names)
        return tuple(result for result in said if result is not None)

    async def _create(self, names: Iterable[str]) -> list[ToolResult | None]:
        with first_error():
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._instances.create(name)) for name in names]
        return [task.result() for task in tasks]

    async def call(self, calls: Sequence[ToolCall], *, messages: Messages = list) -> tuple[ToolResult, ...]:
        """Answer the calls of one turn: run in parallel, answered in call order, each with a deadline.

        Args:
            calls: What the model wrote.
            messages: Gives the conversation so far to the tools that ask for it.

        Raises:
            RewardError: a step reward is not a finite number.
            ToolUnavailableError: a tool cannot begin a call; or, where the run counts it so, cannot be reached.
            RolloutError: too many calls run on past their deadline.
            asyncio.CancelledError: the episode is cancelled; the calls are too.
        """
        if not self._is_started or self._instances.is_closing:
            raise LifecycleError(f"episode {self._episode_id!r}: tools called before their start or after their end")
        self._box.check_abandoned()
        runnable = calls[: self._box.options.max_parallel_calls]
        if len(runnable) == 1:
            answers = [await self._answer(runnable[0], messages)]
        else:
            with first_error():
                async with asyncio.TaskGroup() as group:
                    tasks = [group.create_task(self._answer(call, messages)) for call in runnable]
            answers = [t.result() for t in tasks]
        limit = f"at most {self._box.options.max_parallel_calls} calls a turn are run; make this one again in your next turn"
        answers += [self._failed(call, ToolFailure.SKIPPED, limit) for call in calls[len(runnable) :]]
        return tuple(answers)

    async def finish(self) -> dict[str, float | None]:
        """Ask every tool for its reward for the episode.

        Raises:
            RewardError: one raised, was late, or returned something that is neither a finite number nor None.
        """
        if self._is_finished or self._instances.is_closing:
            raise LifecycleError(f"episode {self._episode_id!r}: the rewards of its tools were asked for already")
        self._is_finished = True
        rewards: dict[str, float | None] = {}
        for name, instance_id in self._instances.ids.items():
            methods, kwargs = self._box.methods[name], self._instances.kwargs_of(name).calc_reward_kwargs
            bounded = self._box.bounded[name]
            try:
                value = await bounded.run(functools.partial(methods.calc_reward, instance_id, **kwargs))
                rewards[name] = self._box.number_or_none(name, value)
            except PLUGIN_RAISES as problem:
                pass_interrupt(problem)
                raise RewardError(f"tool {name!r}: calc_reward failed: {one_line(problem)}") from problem
        return rewards

    async def snapshot(self) -> dict[str, Any]:
        """Return the tools' state of the episode, behind a complete turn.

        Raises:
            SnapshotError: a tool's `snapshot` raised or was late.
        """
        offered = [(name, id) for name, id in self._instances.ids.items() if self._box.hooks[name].snapshot is not None]
        states = {name: await self._instances.hooks(name, "snapshot", id) for name, id in offered}
        data = self._agent_data
        return {"states": states, "rewards": data.tool_rewards, "extra": data.extra_fields} if data else {"states": states}

    async def restore(self, state: Mapping[str, Any]) -> None:
        """Let the tools, created again, take up what `snapshot` returned.

        Raises:
            SnapshotError: a tool's `restore` raised or was late.
        """
        for name, held in state["states"].items():
            await self._instances.hooks(name, "restore", self._instances.ids[name], held)
        if "extra" in state:
            data = self._seen_by_tools()
            data.tool_rewards, data.extra_fields = list(state["rewards"]), dict(state["extra"])

    async def close(self) -> tuple[str, ...]:
        """Release every tool that was created, exactly once, however often and in whatever state this is called.

        A create that failed on its way may have taken something, so its tool is released too; if that fails, it is not
        counted.

        Returns:
            What went wrong in a `release`; it is logged and counted, never raised.

        Raises:
            asyncio.CancelledError: the caller was cancelled meanwhile; everything has been released first.
        """
        return await self._instances.close()

    # One call.

    async def _answer(self, call: ToolCall, messages: Messages) -> ToolResult:
        """Answer one call; what cannot be read, found or fitted costs no tool anything."""
        if (refused := self._refused(call)) is not None:
            return refused
        is_plain, concurrency = not self._box.methods[call.name].is_async, self._box.concurrency
        if not is_plain and not concurrency.has_limit(call.name):
            return await self._execute(call, messages)
        alone = (
            self._locks.setdefault(call.name, asyncio.Lock()) if is_plain else contextlib.nullcontext()
        )  # threads must not share one's state
        # Waiting, for that or for a slot, is no part of the call's deadline.
        async with alone, concurrency.turn(call.name, owner=self._episode_id) as waited_s:
            result = await self._execute(call, messages)
        if not concurrency.has_limit(call.name):
            return result
        return dataclasses.replace(result, metrics={**result.metrics, results.WAITED_S: waited_s})

    def _refused(self, call: ToolCall) -> ToolResult | None:
        """Return the answer to a call that reaches no tool; None for any other call."""
        if call.error is not None:
            return self._failed(call, ToolFailure.BAD_JSON, call.error)
        if call.name not in self._names:
            return self._failed(
                call, ToolFailure.UNKNOWN_TOOL, f"there is no tool {call.name!r}. {results.available(self._names)}"
            )
        takes = self._box.arguments[call.name]
        if takes is not None and (wrong := takes.problem(dict(call.arguments))):
            return self._failed(call, ToolFailure.SCHEMA, f"{wrong} (tool {call.name!r})")
        return None

    async def _execute(self, call: ToolCall, messages: Messages) -> ToolResult:
        """Make a call, with its deadline, unless the tool's breaker is open, and tell the breaker what came of it."""
        box, breaker, clock = self._box, self._box.breakers[call.name], asyncio.get_running_loop().time
        if (rest_s := breaker.admit()) is not None:
            if box.options.unreachable == "failure":
                raise ToolUnavailableError(f"tool {call.name!r} cannot be reached; its breaker is open")
            why = f"{call.name!r} does not work at the moment and was not asked; try again in {math.ceil(rest_s)} s"
            return self._failed(call, ToolFailure.CIRCUIT_OPEN, why)
        began, began_at = time.monotonic(), clock()
        try:
            kwargs = self._instances.kwargs_of(call.name).execute_kwargs
            if box.methods[call.name].wants_agent_data:
                seen = self._seen_by_tools()
                seen.messages = messages()
                kwargs = {"agent_data": seen, **kwargs}
            arguments = _own_copy(dict(call.arguments))  # the tool may keep or change them; the record must not
            execute = functools.partial(box.tools[call.name].execute, self._instances.ids[call.name], arguments, **kwargs)
            try:
                outcome = normalize(await box.bounded[call.name].run(execute))
                result = self._result(call, outcome, duration_s=clock() - began_at)
            except PLUGIN_RAISES as problem:
                pass_interrupt(problem)
                error = problem if isinstance(problem, Exception) else RuntimeError(one_line(problem))
                result = self._raised(call, error, duration_s=clock() - began_at)
        except BaseException:
            breaker.left()
            raise
        if result.error is not None and ToolFailure(result.error).is_infrastructure:
            breaker.failed(self._episode_id, began=began, is_late=result.error == ToolFailure.TIMEOUT)
        else:
            breaker.answered()
        if box.options.unreachable == "failure" and result.error == ToolFailure.CONNECTION:
            raise ToolUnavailableError(f"tool {call.name!r} cannot be reached: {str(result.content)[:500]}")
        return result

    def _result(self, call: ToolCall, outcome: ToolOutcome, *, duration_s: float) -> ToolResult:
        """Return a tool's answer as the observation."""
        content = results.content_of(outcome.response, limit=self._box.limit)
        if outcome.reward is not None and self._agent_data is not None:
            self._agent_data.tool_rewards.append(outcome.reward)
        return ToolResult(
            call_id=call.id,
            name=call.name,
            content=content,
            reward=outcome.reward,
            metrics=_with_cut(outcome, content),
            error=results.told_failure(outcome.metrics),
            duration_s=duration_s,
        )

    def _raised(self, call: ToolCall, problem: Exception, *, duration_s: float) -> ToolResult:
        """Return a tool's exception as the observation; its kind tells whether the tool or the model failed.

        Raises:
            RewardError, ToolUnavailableError: it is no observation, but the trajectory's failure.
        """
        if isinstance(problem, RewardError):
            raise RewardError(f"tool {call.name!r}: {problem}") from problem
        if isinstance(problem, ToolUnavailableError):
            raise ToolUnavailableError(f"tool {call.name!r}: {problem}") from problem
        kind = kind_of(problem)
        failed = self._failed(call, kind, reason_of(problem, tool=call.name), duration_s=duration_s)
        return failed if kind is not ToolFailure.EXCEPTION else self._box.crashed(failed, problem)

    def _seen_by_tools(self) -> ToolContext:
        if self._agent_data is None:
            kwargs = {name: dataclasses.asdict(of) for name, of in self._instances.kwargs.items()}
            self._agent_data = ToolContext(request_id=self._episode_id, tools_kwargs=kwargs)
        return self._agent_data

    def _failed(self, call: ToolCall, kind: ToolFailure, reason: str, *, duration_s: float = 0.0) -> ToolResult:
        text = self._box.limit.cut(results.error_text(kind, reason))
        return ToolResult(call_id=call.id, name=call.name, content=text, error=kind.value, duration_s=duration_s)


def _own_copy(value: Any) -> Any:
    """Return a deep copy of a call's arguments, which are JSON unless a plug-in made the call."""
    if type(value) in (str, int, float, bool, type(None)):
        return value
    if type(value) is dict:
        return {key: _own_copy(inner) for key, inner in value.items()}
    return [_own_copy(inner) for inner in value] if type(value) is list else copy.deepcopy(value)


def _with_cut(outcome: ToolOutcome, content: str | tuple[Mapping[str, Any], ...]) -> Mapping[str, Any]:
    """Return a call's metrics, with what was cut of its text."""
    text = outcome.response.text or ""
    kept = content if isinstance(content, str) else str(content[-1].get("text", ""))
    return {**outcome.metrics, results.CUT_CHARS: len(text) - len(kept)} if len(kept) < len(text) else outcome.metrics
