"""Stop strings: a completion that ends where the model has written one of some texts.

    stops ["Observation:"]   sampled  [Think][ing\\nObs][ervation][:][ 4 …     kept  [Think][ing\\nObs][ervation][:]

Engines know stop *tokens*. A string may end inside a token, so it is looked for in the text: the completion is asked for in
pieces, and ends with the token that completes the string. Ids are never cut inside a token, and what stands behind that
token was never part of the completion, so what is kept is a sample of the same policy. The caller cuts the text.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from polyturn.core.generation import Completion, FinishReason, GenerateRequest, joined_routes
from polyturn.core.protocols import Engine
from polyturn.tokens.codec import Codec

PIECE = 64
"""Tokens that are asked for at once: at most so many are sampled behind a stop string and forgotten."""


class Stopped(NamedTuple):
    """A completion, and what ended it."""

    completion: Completion
    stop: str | None
    """The string that ended it; None where something else did."""
    num_dropped: int
    """Tokens that were sampled behind it."""


async def generate_until(engine: Engine, request: GenerateRequest, *, stops: Sequence[str], codec: Codec) -> Stopped:
    """Sample one completion that ends where the model has written one of `stops`.

    Raises:
        EngineError: the engine is lost or refuses the request.
    """
    whole: Completion | None = None
    limit, seed = request.sampling.max_tokens, request.sampling.seed
    while True:
        held = 0 if whole is None else len(whole.token_ids)
        size = min(PIECE, limit - held)
        # A seed of its own for each piece: with the same one a piece would draw the numbers of the piece before again.
        sampling = dataclasses.replace(request.sampling, max_tokens=size, seed=None if seed is None else seed + held)
        prompt = request.prompt_ids if whole is None else np.concatenate([request.prompt_ids, whole.token_ids])
        routes = None if whole is None else whole.routed_experts
        known = request.routed_from + (0 if routes is None else len(routes))
        # Under the request's own id, by which an abort reaches whichever piece is being sampled.
        asked = dataclasses.replace(request, prompt_ids=prompt, sampling=sampling, routed_from=known)
        piece = await engine.generate(asked)
        whole = piece if whole is None else _joined(whole, piece)
        found = find_stop(whole.token_ids.tolist(), stops, codec)
        if found is not None:
            kept, stop = found
            return Stopped(whole.head(kept, FinishReason.STOP), stop, len(whole.token_ids) - kept)
        if piece.finish_reason is not FinishReason.LENGTH or len(whole.token_ids) >= limit or not len(piece.token_ids):
            return Stopped(whole, None, 0)


def find_stop(ids: Sequence[int], stops: Sequence[str], codec: Codec) -> tuple[int, str] | None:
    """Return how many ids it takes to write the stop string that is complete first, and the string; None without one."""
    text = codec.decode(ids)
    if not any(stop in text for stop in stops):
        return None
    # Bisected, because a text only grows with its ids: a string that is complete stays so.
    low, high = 1, len(ids)  # the fewest ids whose text holds a stop string
    while low < high:
        middle = (low + high) // 2
        written = codec.decode(ids[:middle])
        if any(stop in written for stop in stops):
            high = middle
        else:
            low = middle + 1
    written = codec.decode(ids[:low])
    there = [stop for stop in stops if stop in written] or [stop for stop in stops if stop in text]
    return low, min(there, key=written.find)


def _joined(first: Completion, second: Completion) -> Completion:
    shift = len(first.token_ids)
    last = first.policy_versions[-1][1]
    versions = [(start + shift, version) for start, version in second.policy_versions]
    # Pieces of one policy version are one run of it, and one without tokens is no run.
    if versions[0][1] == last or not len(second.token_ids):
        versions = versions[1:]
    logprobs = None
    if first.logprobs is not None and second.logprobs is not None:
        logprobs = np.concatenate([first.logprobs, second.logprobs])
    return Completion(
        token_ids=np.concatenate([first.token_ids, second.token_ids]),
        logprobs=logprobs,
        finish_reason=second.finish_reason,
        policy_versions=(*first.policy_versions, *versions),
        routed_experts=joined_routes([first, second]),
        info=first.info,
    )
