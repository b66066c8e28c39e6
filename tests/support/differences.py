"""The first difference between the ids of an episode and a full render of its messages."""

from __future__ import annotations

from collections.abc import Sequence

from polyturn.core.arrays import Ids
from polyturn.tokens.codec import Codec
from polyturn.tokens.sanity import Difference, differences


def check(
    incremental_ids: Sequence[int] | Ids, full_ids: Sequence[int] | Ids, codec: Codec, mode: str = "strict"
) -> Difference | None:
    """Return the first of `differences` whose kind is not "end_token", else the first, else None."""
    every = differences(incremental_ids, full_ids, codec, mode)
    return next((d for d in every if d.kind != "end_token"), every[0] if every else None)
