"""Recovery: brings a lost server back until it serves the right weights again.

    wait -> revive (restarts a server of this run that died or hangs) -> does it still serve the pool's weights?
         -> yes: only requests were lost                         -> it is live
         -> no, or unknown: push the pool's weights, verify them -> it is live

It is not enough that a server answers: after a restart, it serves the checkpoint that it was started with.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
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
"""Provides the trainer's weights, fixed during the block; raises EngineError unless they are that policy version."""


@runtime_checkable
class Revivable(Protocol):
    """An engine that recovery can check, and that may restart its server."""

    @property
    def num_restarts(self) -> int:
        """Number of restarts of the server."""
        ...

    async def revive(self) -> None:
        """Return once the server answers, and restart it if necessary and possible.

        Raises:
            EngineGoneError: the server is lost for good.
            EngineError: the server does not answer at the moment.
        """
        ...


@runtime_checkable
class Watched(Protocol):
    """An engine that can be started and checked while other processes send requests to its server."""

    async def start(self) -> None:
        """Start the server unless it runs.

        Raises:
            EngineLostError: the server does not answer at the moment.
            EngineError: the server cannot be started, or does not fit the run.
        """
        ...

    async def look(self) -> None:
        """Check that the server works and has the weights that it was sent.

        Raises:
            EngineError: the server does not answer, or has other weights.
        """
        ...


@runtime_checkable
class Sleeper(Protocol):
    """An engine on the trainer's GPUs, which it releases while the trainer computes."""

    async def sleep(self) -> None:
        """Release the GPU memory, and sample nothing until the next weight update.

        Raises:
            EngineError: the server cannot release its memory.
        """
        ...


@dataclass(frozen=True, slots=True, eq=False)
class PoolWeights:
    """The weights that a pool serves. Every push makes a new object, so that two pushes of one version differ."""

    version: int
    weights: Any
    """A store's `ServerWeights`; None before the first push, if the store does not keep weights, or if parameters are
    shared."""


Again = Callable[[PoolWeights], AbstractAsyncContextManager[Any]]
"""Provides a pool's weights for `update_weights` of a recovered server; raises EngineError if they are not available."""


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
    """Bring `replica` back, with as many attempts as necessary.

    Args:
        replica: The server that was lost.
        engine: Its engine.
        served: Returns the weights that the pool serves at the moment.
        again: Provides these weights for a server that came back.
        verify: Returns the check that an engine serves them, or None to skip it.
        on_back: Called once the server has the weights; returns false, which leads to another attempt, if the pool's weights
            have changed since.
        on_failure: Called with the error of a failed attempt, after which another one follows.
        attempt_s: Seconds that pushing and verifying may take.

    Raises:
        EngineGoneError: the server is lost for good.
    """
    pause = FIRST_RETRY_S
    while True:
        await asyncio.sleep(pause)
        try:
            await engine.revive()
            target = served()  # read only now, because a server's start may take as long as several training steps
            async with asyncio.timeout(attempt_s):
                renewed = await _renew(replica, target, again, verify())
        except EngineGoneError:
            raise
        except (EngineError, TimeoutError) as problem:
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise asyncio.CancelledError from problem  # an error in cleaning up has replaced the cancellation
            if isinstance(problem, TimeoutError):
                problem = EngineLostError(f"sending and verifying its weights took longer than {attempt_s:g} s")
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
    """Send `replica` the pool's weights if it does not have them; return whether it needed them."""
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
    except EngineError as problem:  # a restarted server does not have the adapter that the request names
        logger.debug("policy version %d is not served there (%s)", version, one_line(problem))
        return False
    await engine.end_session(name)
    return {tag for _, tag in answer.policy_versions} == {version} and len(answer.token_ids) == 1
