"""EnvSession: one environment for the length of one episode, closed exactly once.

Separate from the scheduler that drives it because an environment is foreign code that may raise, hang or be late. A plain
method runs in a thread, and the methods of one environment never run at the same time. A late method may still run after the
episode has ended; its thread then closes the environment as soon as the method returns.

After a restart, `restore` receives the value that `snapshot` returned. With `replays = True` (the same seed and actions
always give the same answers) the environment is reset and repeats its actions. The `trace`, a digest of all answers, shows
whether it reached the same state.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import inspect
import threading
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

from polyturn.core.errors import NoSnapshotError, SnapshotError, errors_at
from polyturn.core.snapshots import SnapshotHooks
from polyturn.rollout.env import Env, EnvStep, first_observation

GRACE_S = 1.0
"""Seconds that the end of an episode waits for a busy environment, whose thread closes it when its method returns."""


class EnvSession:
    """Makes, calls and closes one environment."""

    def __init__(
        self,
        name: str,
        make: Callable[..., Env],
        config: Mapping[str, Any],
        *,
        call: Callable[..., Awaitable[Any]],
        replays: bool = False,
    ) -> None:
        """Store the arguments; `reset` and `restore` make the environment.

        Args:
            name: The environment's name, for messages.
            make: Its class, or a function that makes it.
            config: The keyword arguments of `make`.
            call: Calls foreign code with a deadline: `Episode.call`.
            replays: Whether the same seed and the same actions always give the same answers.
        """
        self.name = name
        self._make = make
        self._config = config
        self._call = call
        self._lock = threading.Lock()
        """Guards the fields below; never held while foreign code runs."""
        self._open: Env | None = None
        """The environment, until it is closed."""
        self._num_busy = 0
        """Number of its plain methods that are running in a thread: 0 or 1."""
        self._is_over = False
        self._replays = replays
        self._answers = hashlib.blake2b(digest_size=8)

    @property
    def replays(self) -> bool:
        """Whether a reset with the same seed, followed by the same actions, leads to the same state."""
        return self._replays or inspect.getattr_static(self._open, "replays", False) is True

    @property
    def trace(self) -> str:
        """A digest of all answers so far."""
        return self._answers.hexdigest()

    async def reset(self, *, seed: int) -> Any:
        """Make the environment and return its first observation.

        Raises:
            SchedulerError: the environment raised or was late.
        """
        env = await self._ask(self.make)
        answer = first_observation(await self._ask(env.reset, seed=seed))
        self._answers.update(repr(answer).encode("utf-8", "replace"))
        return answer

    async def snapshot(self) -> Mapping[str, Any]:
        """Return the environment's own snapshot, or else its trace if it can be replayed.

        Raises:
            NoSnapshotError: the environment offers neither.
            SchedulerError: it raised or was late.
        """
        hooks = SnapshotHooks.of(self._open, label=f"the environment {self.name!r}")
        if hooks.why_not is None:
            return {"state": None if hooks.snapshot is None else await self._ask(hooks.snapshot)}
        if not self.replays:
            raise NoSnapshotError(hooks.why_not)
        return {"trace": self.trace}

    async def restore(self, kept: Mapping[str, Any], *, seed: int, actions: Iterable[str]) -> None:
        """Make the environment again and restore the result of `snapshot`; a stateless environment is only reset.

        Args:
            kept: The result of `snapshot`.
            seed: The seed of the original reset.
            actions: All actions so far, for an environment that is replayed.

        Raises:
            SnapshotError: the environment no longer offers snapshots, or its answers differ from the first time.
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
        """Check that the answers so far have the digest `trace`.

        Raises:
            SnapshotError: the digests differ.
        """
        if self.trace != trace:
            raise SnapshotError(f"the environment {self.name!r} answered differently when its actions were replayed")

    async def step(self, action: str) -> EnvStep:
        """Take an action.

        Raises:
            SchedulerError: the environment raised, was late, or returned an invalid answer.
        """
        assert self._open is not None
        step = self._open.step
        returned = await self._ask(step, action)
        with errors_at(step):
            answer = EnvStep.of(returned, name=self.name)
        outcome = answer._replace(info={}, rewards=dict(sorted(answer.rewards.items())))
        self._answers.update(repr(outcome).encode("utf-8", "replace"))
        return answer

    async def close(self) -> None:
        """Close the environment, if it exists; if a late method is still running, its thread closes it afterwards.

        Raises:
            SchedulerError: the environment raised or was late.
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
        """Make the environment, in a thread; if the episode has ended meanwhile, close the environment there."""
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
        """Return the environment once, to be closed; later calls return None."""
        env, self._open = self._open, None
        return env

    def _close_if_over(self) -> None:
        with self._lock:
            env = self._taken() if self._is_over and not self._num_busy else None
        if env is not None and inspect.isawaitable(closing := env.close()):
            asyncio.run(_finish(closing))

    async def _ask(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        of = f"the environment {self.name!r}:"
        # `make` counts itself as busy. After the end, only `close` is called, which does not need to be followed by a close.
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
