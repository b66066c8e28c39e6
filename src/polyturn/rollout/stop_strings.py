"""Stop strings: end a completion when the model has written one of several texts.

    stops ["Observation:"]   sampled  [Think][ing\\nObs][ervation][:][ 4 …     kept  [Think][ing\\nObs][ervation][:]

Engines only support stop *tokens*. A string may end inside a token, so `generate_until` searches the text: it requests the
completion in pieces and ends it with the token that completes the string. Tokens are kept or dropped as a whole, so the
text may go on after the string to the end of the last token. Later tokens do not affect earlier ones, so the kept ids are
still a sample of the policy.
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
"""Number of tokens per piece; at most this many are sampled after a stop string and dropped."""


class Stopped(NamedTuple):
    """A completion and the stop string that ended it."""

    completion: Completion
    stop: str | None
    """The stop string; None if the completion ended for another reason."""
    num_dropped: int
    """Number of dropped tokens that were sampled after the stop string."""


async def generate_until(engine: Engine, request: GenerateRequest, *, stops: Sequence[str], codec: Codec) -> Stopped:
    """Sample one completion that ends when the model has written one of `stops`.

    Raises:
        EngineError: the engine is lost or refuses the request.
    """
    parts: list[Completion] = []
    while True:
        # All pieces have the id of `request`, so an abort reaches the piece that is running.
        rest = continued(request, parts)
        sampling = dataclasses.replace(rest.sampling, max_tokens=min(PIECE, rest.sampling.max_tokens))
        piece = await engine.generate(dataclasses.replace(rest, sampling=sampling))
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
    # Bisection works because text only grows with more ids: a complete string stays complete.
    low, high = 1, len(ids)  # finds the smallest number of ids whose text contains a stop string
    while low < high:
        middle = (low + high) // 2
        written = codec.decode(ids[:middle])
        if any(stop in written for stop in stops):
            high = middle
        else:
            low = middle + 1
    written = codec.decode(ids[:low])
    present = [stop for stop in stops if stop in written] or [stop for stop in stops if stop in text]
    return low, min(present, key=written.find)
