"""EnvSession: one environment for the length of one episode, closed exactly once.

Separate from the scheduler that drives it because everything here is foreign code that may raise, hang or be late. A plain
method runs in a thread, and no two methods of one environment run at once. A late method may still run when the episode is
over; its thread then closes the environment as soon as the method returns.

After a restart, `restore` gets what `snapshot` returned. With `replays = True` (the same seed and actions always give the
same answers) the environment is reset and takes the actions again. Its `trace`, a digest of all answers, tells whether it
reached the same state.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import inspect
import threading
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

from polyturn.core.env import Env, EnvStep, first_shown
from polyturn.core.errors import NoSnapshotError, SnapshotError
from polyturn.core.snapshots import SnapshotHooks

GRACE_S = 1.0
"""Seconds that the end of an episode waits for a busy environment; after that it is closed whenever it comes back."""


class EnvSession:
    """An environment from its making to its end."""

    def __init__(
        self,
        name: str,
        make: Callable[..., Env],
        config: Mapping[str, Any],
        *,
        call: Callable[..., Awaitable[Any]],
        replays: bool = False,
    ) -> None:
        """Make nothing yet.

        Args:
            name: What to call it in messages.
            make: Its class.
            config: Its arguments.
            call: Calls foreign code with a deadline, `Episode.call`.
            replays: Whether the same seed and the same actions always draw the same answers.
        """
        self.name = name
        self._make = make
        self._config = config
        self._call = call
        self._lock = threading.Lock()
        """Held to look at and to change what follows, never while foreign code runs."""
        self._open: Env | None = None
        """The environment, until it is closed."""
        self._num_busy = 0
        """Plain methods of it that run in a thread: one, or none."""
        self._is_over = False
        self._replays = replays
        self._answers = hashlib.blake2b(digest_size=8)

    @property
    def replays(self) -> bool:
        """Whether it stands where it stood once it is reset with the same seed and took the same actions."""
        return self._replays or inspect.getattr_static(self._open, "replays", False) is True

    @property
    def trace(self) -> str:
        """A digest of all that it answered so far."""
        return self._answers.hexdigest()

    async def reset(self, *, seed: int) -> Any:
        """Make the environment and return its first observation.

        Raises:
            SchedulerError: it raised or was late.
        """
        env = await self._ask(self.make)
        answer = first_shown(await self._ask(env.reset, seed=seed))
        self._answers.update(repr(answer).encode("utf-8", "replace"))
        return answer

    async def snapshot(self) -> Mapping[str, Any]:
        """Return the environment's own snapshot, or else the trace of one that is replayed.

        Raises:
            NoSnapshotError: it offers neither.
            SchedulerError: it raised or was late.
        """
        hooks = SnapshotHooks.of(self._open, label=f"the environment {self.name!r}")
        if hooks.why_not is None:
            return {"state": None if hooks.snapshot is None else await self._ask(hooks.snapshot)}
        if not self.replays:
            raise NoSnapshotError(hooks.why_not)
        return {"trace": self.trace}

    async def restore(self, kept: Mapping[str, Any], *, seed: int, actions: Iterable[str]) -> None:
        """Make the environment again and let it take up what `snapshot` returned; one that keeps nothing is reset.

        Args:
            kept: What `snapshot` returned.
            seed: What it was reset with.
            actions: All that it took, for one that is replayed.

        Raises:
            SnapshotError: it offers no snapshot any more, or answers otherwise than it did.
            SchedulerError: it raised or was late.
        """
        if "trace" in kept:
            await self.reset(seed=seed)
            for action in actions:
                await self.step(action)
            self.check_trace(kept["trace"])
            return
        env = await self._ask(self.make)
        hooks = SnapshotHooks.of(env, label=f"the environment {self.name!r}")
        if hooks.why_not is not None:
            raise NoSnapshotError(hooks.why_not)
        if hooks.restore is None:
            await self._ask(env.reset, seed=seed)
        else:
            await self._ask(hooks.restore, kept["state"])

    def check_trace(self, trace: str) -> None:
        """Check that all that it answered is what it answered before.

        Raises:
            SnapshotError: it is not.
        """
        if self.trace != trace:
            raise SnapshotError(f"the environment {self.name!r} answered otherwise when its actions were replayed")

    async def step(self, action: str) -> EnvStep:
        """Take an action.

        Raises:
            SchedulerError: it raised, was late, or answered something that cannot be understood.
        """
        assert self._open is not None
        answer = EnvStep.of(await self._ask(self._open.step, action), name=self.name)
        outcome = answer._replace(info={}, rewards=dict(sorted(answer.rewards.items())))
        self._answers.update(repr(outcome).encode("utf-8", "replace"))
        return answer

    async def close(self) -> None:
        """Close the environment, if there is one; one that is busy past its deadline is closed when it comes back.

        Raises:
            SchedulerError: it raised or was late.
        """
        with self._lock:
            self._is_over = True
            env = None if self._num_busy else self._taken()
        if env is not None:
            await self._ask(env.close)
        until = asyncio.get_running_loop().time() + GRACE_S
        while (self._num_busy or self._open is not None) and asyncio.get_running_loop().time() < until:  # noqa: ASYNC110 (a thread ends it)
            await asyncio.sleep(0.01)

    def make(self) -> Env:
        """Make the environment, in a thread; one that comes when the episode is over is closed there."""
        with self._lock:
            self._num_busy += 1
        try:
            env = self._make(**self._config)
            with self._lock:
                self._open = env
        finally:
            with self._lock:
                self._num_busy -= 1
            self._close_if_over()
        return env

    def _taken(self) -> Env | None:
        """Return the environment to the one caller that is to close it."""
        env, self._open = self._open, None
        return env

    def _close_if_over(self) -> None:
        with self._lock:
            env = self._taken() if self._is_over and not self._num_busy else None
        if env is not None and inspect.isawaitable(closing := env.close()):
            asyncio.run(_finish(closing))

    async def _ask(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        of = f"the environment {self.name!r}:"
        # `make` counts itself as busy, and behind the end only `close` is called, which nothing has to close behind.
        if inspect.iscoroutinefunction(method) or method == self.make or self._is_over:
            return await self._call(method, *args, of=of, **kwargs)

        @functools.wraps(method)
        def busy(*args: Any, **kwargs: Any) -> Any:
            with self._lock:
                self._num_busy += 1
            try:
                return method(*args, **kwargs)
            finally:
                with self._lock:
                    self._num_busy -= 1
                self._close_if_over()

        return await self._call(busy, *args, of=of, **kwargs)


async def _finish(awaitable: Awaitable[Any]) -> None:
    await awaitable
