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

from polyturn.core.continuation import continued, joined
from polyturn.core.generation import Completion, FinishReason, GenerateRequest
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
    parts: list[Completion] = []
    while True:
        request_left = continued(
            request, parts
        )  # under the request's own id, by which an abort reaches whichever piece is sampled
        sampling = dataclasses.replace(request_left.sampling, max_tokens=min(PIECE, request_left.sampling.max_tokens))
        piece = await engine.generate(dataclasses.replace(request_left, sampling=sampling))
        parts.append(piece)
        whole = joined(parts)
        stop_match = find_stop(whole.token_ids.tolist(), stops, codec)
        if stop_match is not None:
            kept, stop = stop_match
            return Stopped(whole.head(kept, FinishReason.STOP), stop, len(whole.token_ids) - kept)
        if (
            piece.finish_reason is not FinishReason.LENGTH
            or len(whole.token_ids) >= request.sampling.max_tokens
            or not len(piece.token_ids)
        ):
            return Stopped(whole, None, 0)


def find_stop(ids: Sequence[int], stops: Sequence[str], codec: Codec) -> tuple[int, str] | None:
    """Return the number of ids up to the end of the first complete stop string, and the string; None without one."""
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
