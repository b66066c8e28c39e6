"""EpisodeTools: the tools that one episode has, each created once and released exactly once (I9), whatever happens.

    create    ok                               ->  owned; `release` when the episode ends
              failed or cancelled on its way   ->  it may have taken something; `release`, whose failure is not counted
              ended in its thread afterwards   ->  owned late; released at once if the episode is over

Separate from the session, which answers calls: here is only who holds what.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
from collections.abc import Coroutine, Mapping
from typing import Any

from polyturn.core.aio import finish
from polyturn.core.errors import PolyturnError, SnapshotError, one_line
from polyturn.core.interrupts import PLUGIN_RAISES, pass_interrupt
from polyturn.core.task import ToolKwargs
from polyturn.core.trajectory import ToolResult
from polyturn.tools import results
from polyturn.tools.result_shape import to_response
from polyturn.tools.run_tools import RunTools

logger = logging.getLogger(__name__)

_NO_KWARGS = ToolKwargs()


class ToolStartError(PolyturnError, RuntimeError):
    """A tool whose `create` failed: the trajectory fails, the run goes on."""


class EpisodeTools:
    """One episode's share of the run's tools."""

    def __init__(self, box: RunTools, episode_id: str) -> None:
        """Begin with none."""
        self.ids: dict[str, str] = {}
        """The id of each tool's instance, by the tool's name."""
        self.kwargs: Mapping[str, ToolKwargs] = {}
        """The row's arguments for the tools, by name."""
        self._box = box
        self._episode_id = episode_id
        self._half_created: list[str] = []
        """Tools whose create began and failed or was cancelled, maybe after it took something."""
        self._closing: asyncio.Task[tuple[str, ...]] | None = None

    @property
    def is_closing(self) -> bool:
        """Whether the episode has ended."""
        return self._closing is not None

    def kwargs_of(self, name: str) -> ToolKwargs:
        """Return the row's arguments for a tool."""
        return self.kwargs.get(name, _NO_KWARGS)

    async def create(self, name: str) -> ToolResult | None:
        """Create a tool; return its opening message, None if it has none.

        Raises:
            ToolStartError: its `create` raised, was late, or returned an id that another live episode uses.
        """
        methods, kwargs = self._box.methods[name], self.kwargs_of(name).create_kwargs
        bounded, loop = self._box.bounded[name], asyncio.get_running_loop()

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
                if not is_late:  # what runs on in its thread is taken over by `on_late`
                    self._own_half(name)
                raise
            self._own(name, returned)  # at once: nothing may come between a create and our knowing of it
            return returned

        try:
            returned = await bounded.run(create)
            response = to_response(returned[1] if isinstance(returned, tuple) and len(returned) > 1 else None)
            content = results.content_of(response, limit=self._box.limit)
        except ToolStartError:
            raise
        except PLUGIN_RAISES as problem:
            pass_interrupt(problem)
            raise ToolStartError(
                f"tool {name!r}: create failed for episode {self._episode_id!r}: {one_line(problem)}; check the row's "
                f"tools_kwargs[{name!r}]['create_kwargs']"
            ) from problem
        return None if response.is_empty() else ToolResult(call_id="", name=name, content=content)

    async def hooks(self, name: str, which: str, *args: Any) -> Any:
        """Call a tool's `snapshot` or `restore`.

        Raises:
            SnapshotError: it raised or was late.
        """
        hooks = self._box.hooks[name]
        method: Any = hooks.snapshot if which == "snapshot" else hooks.restore
        try:
            return await self._box.bounded[name].run(functools.partial(method, *args))
        except Exception as problem:
            raise SnapshotError(f"{hooks.label}: {which} failed: {one_line(problem)}") from problem

    async def close(self) -> tuple[str, ...]:
        """Release everything once; return the failures. A cancellation goes on once everything is released."""
        if self._closing is None:
            self._closing = asyncio.create_task(self._release_all())
        problems, cancelled = await finish(self._closing)
        if cancelled is not None:
            raise cancelled
        return problems

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
        self.ids[name] = instance_id
        if self._closing is not None:
            self._do_late(self._release(name, []))

    def _own_half(self, name: str) -> None:
        """Release with the rest what a failed `create` may have taken; now, if the episode has ended meanwhile."""
        if self._closing is None:
            self._half_created.append(name)
        else:
            self._do_late(self._release_half(name))

    def _do_late(self, release: Coroutine[Any, Any, None]) -> None:
        """Release something of an episode that has ended."""
        late = asyncio.get_running_loop().create_task(release)
        self._box.late.add(late)
        late.add_done_callback(self._box.late.discard)

    async def _release_all(self) -> tuple[str, ...]:
        problems: list[str] = []
        async with asyncio.TaskGroup() as group:
            for name in list(self.ids):
                group.create_task(self._release(name, problems))
            for name in self._half_created:
                group.create_task(self._release_half(name))
        return tuple(problems)

    async def _release(self, name: str, problems: list[str]) -> None:
        instance_id = self.ids.pop(name, None)
        if instance_id is None:  # a create that came late has begun to release it
            return
        methods, kwargs = self._box.methods[name], self.kwargs_of(name).release_kwargs
        bounded = self._box.bounded[name]
        try:
            await bounded.run(functools.partial(methods.release, instance_id, **kwargs), is_owed=True)
        except Exception as problem:
            problems.append(f"tool {name!r}: release failed for episode {self._episode_id!r}: {one_line(problem)}")
            logger.warning("%s", problems[-1])
        finally:
            self._box.live_ids.discard((name, instance_id))

    async def _release_half(self, name: str) -> None:
        """Release what a failed create may have taken; where it took nothing, a release may well fail."""
        methods, kwargs = self._box.methods[name], self.kwargs_of(name).release_kwargs
        try:
            release = functools.partial(methods.release, self._episode_id, **kwargs)
            await self._box.bounded[name].run(release, is_owed=True)
        except Exception as problem:
            logger.debug("tool %r: release after a failed create: %s", name, one_line(problem))
