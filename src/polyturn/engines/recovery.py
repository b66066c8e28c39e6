"""Recovery: from a server that was lost to one that serves the right weights again.

    wait -> revive (start it again if it is ours and dead) -> does it still serve what it was given?
         -> yes: nothing was lost but requests       -> it serves
         -> no, or unknown: push the pool's weights, verify them -> it serves

A server that answers is not enough: one that was restarted answers from the checkpoint it was started with.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np

from polyturn.core.errors import EngineError, EngineGoneError, EngineLostError, one_line
from polyturn.core.generation import GenerateRequest, SamplingParams
from polyturn.core.protocols import Engine
from polyturn.engines.replica import FIRST_RETRY_S, LAST_RETRY_S, Replica

logger = logging.getLogger(__name__)

Verify = Callable[[Engine, int], Awaitable[None]]
"""Raises EngineError unless the engine serves that policy version."""
CurrentWeights = Callable[[int], AbstractAsyncContextManager[Mapping[str, Any]]]
"""Gives the trainer's weights, which stay as they are inside; raises EngineError unless they are that policy version."""


@runtime_checkable
class Revivable(Protocol):
    """An engine that can be asked how it is, and perhaps be started again."""

    @property
    def num_restarts(self) -> int:
        """Number of times that it was started again."""
        ...

    async def revive(self) -> None:
        """Return once it answers.

        Raises:
            EngineGoneError: it never will.
            EngineError: it does not, for now.
        """
        ...


@runtime_checkable
class Watched(Protocol):
    """An engine that can be looked at while other processes ask its server."""

    async def look(self) -> None:
        """Return if the server is at work with the weights that it was given.

        Raises:
            EngineError: it is not.
        """
        ...


@runtime_checkable
class Sleeper(Protocol):
    """An engine on the trainer's GPUs, which it leaves to the trainer while that computes."""

    async def sleep(self) -> None:
        """Give its memory back, and sample nothing, until it is given weights.

        Raises:
            EngineError: it cannot.
        """
        ...


class PooledServer(Protocol):
    """One server of a pool."""

    @property
    def name(self) -> str:
        """The replica's name in logs and errors."""
        ...

    @property
    def engine(self) -> Engine:
        """The engine of this one server, not of the pool."""
        ...

    @property
    def is_live(self) -> bool:
        """Whether it serves the pool's weights, as far as is known."""
        ...


@runtime_checkable
class ServerPool(Protocol):
    """An engine of several servers, each of which is looked at by itself: `engines.pool.EnginePool`, here or elsewhere."""

    verify: Verify | None
    """Proves that a server that was brought back serves the pool's weights."""

    @property
    def replicas(self) -> Sequence[PooledServer]:
        """The servers, those that are down included."""
        ...

    def exclude(self, replica: Any, problem: EngineError) -> None:
        """Send a server no requests until it has the pool's weights again."""
        ...


@runtime_checkable
class Refilled(Protocol):
    """A pool that asks the trainer for weights that it does not keep."""

    current: CurrentWeights | None
    """Gives a server that was brought back the trainer's weights; None before there are any."""


@dataclass(frozen=True, slots=True, eq=False)
class PoolWeights:
    """The weights that a pool serves; a new object for every push, so that two of one version differ."""

    version: int
    weights: Any
    """A store's `ServerWeights`; None where it keeps none, before the first push, and where parameters are shared."""


Again = Callable[[PoolWeights], AbstractAsyncContextManager[Any]]
"""Gives what a pool serves, for the `update_weights` of a server that came back; raises EngineError where it is gone."""


async def recover(
    replica: Replica,
    engine: Revivable,
    *,
    served: Callable[[], PoolWeights],
    again: Again,
    verify: Callable[[], Verify | None],
    on_back: Callable[[PoolWeights], bool],
    on_failure: Callable[[Exception], object],
    attempt_s: float,
) -> None:
    """Bring `replica` back, however long that takes.

    Args:
        replica: The server that was lost.
        engine: Its engine.
        served: What the pool serves at the moment.
        again: Gives it to a server that came back.
        verify: Proves that an engine serves that; None where nothing can.
        on_back: Told once it serves again; false where the pool's weights changed meanwhile, so that it goes on.
        on_failure: Told why an attempt failed, of which there is another.
        attempt_s: The deadline of pushing and verifying.

    Raises:
        EngineGoneError: it is lost for good.
    """
    pause = FIRST_RETRY_S
    while True:
        await asyncio.sleep(pause)
        try:
            await engine.revive()
            target = served()  # not before: a start may take as long as several steps
            async with asyncio.timeout(attempt_s):
                renewed = await _renew(replica, target, again, verify())
        except EngineGoneError:
            raise
        except (EngineError, TimeoutError) as problem:
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise asyncio.CancelledError from problem  # its cleanup failed, as where the server cannot be resumed
            logger.debug("%s is not back yet (%s)", replica.name, one_line(problem))
            on_failure(problem)
            pause = min(2 * pause, LAST_RETRY_S)
            continue
        if on_back(target):
            how = f"with the weights of policy version {target.version} sent anew and verified" if renewed else "unharmed"
            logger.info("%s is back, %s", replica.name, how)
            return
        pause = FIRST_RETRY_S


async def _renew(replica: Replica, target: PoolWeights, again: Again, verify: Verify | None) -> bool:
    """Give `replica` the weights that it should have; return whether it needed them."""
    if not replica.is_stale and await _serves(replica.engine, target.version):
        return False
    replica.is_stale = True
    async with again(target) as weights:
        await replica.engine.update_weights(target.version, weights=weights)
    if verify is not None:
        await verify(replica.engine, target.version)
    elif not await _serves(replica.engine, target.version):
        raise EngineError(f"{replica.name} took the weights of policy version {target.version} and serves others")
    return True


async def _serves(engine: Engine, version: int) -> bool:
    """Return whether one sampled token comes from `version`."""
    name = f"is-it-{version}"
    request = GenerateRequest(
        request_id=name, session_id=name, prompt_ids=np.zeros(1, np.int32), sampling=SamplingParams(max_tokens=1)
    )
    try:
        answer = await engine.generate(request)
    except EngineLostError:
        raise
    except EngineError as problem:  # a server that was started again does not know the adapter that the request names
        logger.debug("policy version %d is not served there (%s)", version, one_line(problem))
        return False
    await engine.end_session(name)
    return {tag for _, tag in answer.policy_versions} == {version} and len(answer.token_ids) == 1
