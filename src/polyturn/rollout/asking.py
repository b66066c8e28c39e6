"""Asking: what an episode and its forks ask the engine, and how they take it back.

    next_request  what is asked next, within the limits
    ask           one completion, ended by a stop string where there are any
    abort         the engine ends what it is sampling; returns once every completion is there
    end_sessions  the engine drops what it keeps of the histories

Separate from the episode, which decides when it asks: here it is known what the engine is answering at the moment.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Sequence

import numpy as np

from polyturn.core.errors import EngineError, SchedulerError, one_line
from polyturn.core.generation import Completion, GenerateRequest, SamplingParams
from polyturn.core.lifecycle import StopReason
from polyturn.core.seeds import derive_seed
from polyturn.rollout import limits as limit_rules
from polyturn.rollout.context import RolloutContext
from polyturn.rollout.conversation import EpisodeHistory
from polyturn.rollout.stop_strings import Stopped, generate_until

logger = logging.getLogger(__name__)

END_SESSION_S = 30.0
"""How long an engine may take to drop what it keeps of a conversation."""
ABORT_S = 30.0
"""How long an engine may take to hear that a completion is to end."""


class Asking:
    """One episode's requests."""

    __slots__ = ("_answered", "_context")

    def __init__(self, context: RolloutContext) -> None:
        """Begin with nothing asked."""
        self._context = context
        self._answered: dict[str, asyncio.Event] = {}
        """The requests that the engine is answering; set once it has."""

    async def ask(self, request: GenerateRequest, *, stops: Sequence[str] = ()) -> Stopped:
        """Let the engine sample one completion, which ends where the model has written one of `stops`.

        Raises:
            EngineError: the engine is lost or refuses the request.
        """
        engine = self._context.engine
        answered = self._answered[request.request_id] = asyncio.Event()
        try:
            if stops:
                return await generate_until(engine, request, stops=stops, codec=self._context.codec)
            return Stopped(await engine.generate(request), None, 0)
        finally:
            answered.set()
            del self._answered[request.request_id]

    async def abort(self) -> None:
        """Let the engine end what it is sampling, and wait until it has."""
        for request_id, answered in list(self._answered.items()):
            try:
                async with asyncio.timeout(ABORT_S):
                    await self._context.engine.abort(request_id)
            except TimeoutError:
                logger.warning("%s: the engine did not take an abort within %g s; it samples on", request_id, ABORT_S)
            await answered.wait()

    async def end_sessions(self, ids: Sequence[str]) -> list[str]:
        """Let the engine drop what it keeps of these histories; return what went wrong."""
        problems = []
        for session_id in ids:
            try:
                async with asyncio.timeout(END_SESSION_S):
                    await self._context.engine.end_session(session_id)
            except (EngineError, TimeoutError) as problem:
                problems.append(f"{session_id}: the engine did not end the session: {one_line(problem)}")
        return problems


def refuse_banned(completion: Completion, sampling: SamplingParams) -> None:
    """Refuse a completion with tokens that the engine was told not to sample.

    Raises:
        EngineError: it has some.
    """
    if sampling.banned_token_ids and np.isin(completion.token_ids, sampling.banned_token_ids).any():
        raise EngineError(
            f"the engine sampled a token that it was told not to (one of {sampling.banned_token_ids}, which stand for "
            "media); use an engine that heeds SamplingParams.banned_token_ids"
        )


def next_request(
    context: RolloutContext,
    conversation: EpisodeHistory,
    *,
    limits: limit_rules.Limits,
    sampling: SamplingParams,
    id: str,
    seed: int,
    elapsed_s: float,
) -> tuple[GenerateRequest, StopReason]:
    """Return what the engine is asked next in a conversation, and the limit that gives it its budget.

    Args:
        context: What the episodes of a run share.
        conversation: Stands where its next turn begins.
        limits: How far it may go.
        sampling: How the turn is sampled, within the limits.
        id: The episode's.
        seed: The turn's follows from it, unless `sampling` has one.
        elapsed_s: How long the episode has taken.

    Raises:
        SchedulerError: a limit forbids another turn, as `prepare` would have said.
    """
    number = len(conversation.turns)
    at = conversation.progress(elapsed_s=elapsed_s)
    budget = limit_rules.budget(limits, at, ceiling=sampling.max_tokens)
    if budget.tokens < 1 or (limits.max_turns is not None and number >= limits.max_turns):
        raise SchedulerError(
            f"episode {id!r}: another turn was asked for at {number} turns and {at.context_tokens} tokens, where a "
            "limit ends the episode; await `prepare` before each `generate` and end where it returns a reason"
        )
    asked = dataclasses.replace(
        sampling,
        max_tokens=budget.tokens,
        seed=derive_seed(seed, number) if sampling.seed is None else sampling.seed,
        stop_token_ids=sampling.stop_token_ids or context.codec.stop_token_ids,
        banned_token_ids=sampling.banned_token_ids or context.media_token_ids,
    )
    transcript = conversation.transcript
    request = GenerateRequest(
        request_id=f"{id}/{number}",
        session_id=id,
        prompt_ids=transcript.context,
        sampling=asked,
        media=transcript.builder.media,
    )
    return request, budget.cut_by
