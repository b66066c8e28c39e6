"""What several engines can all do, which is what a pool of them can."""

from __future__ import annotations

from collections.abc import Sequence

from polyturn.core.protocols import EngineCapabilities


def common_capabilities(each: Sequence[EngineCapabilities]) -> EngineCapabilities:
    """Return what all can do; nothing where there are none."""
    if not each:
        return EngineCapabilities()
    contexts = [one.max_context for one in each if one.max_context is not None]
    return EngineCapabilities(
        seeded=all(one.seeded for one in each),
        logprobs=all(one.logprobs for one in each),
        media=all(one.media for one in each),
        pause_modes=tuple(mode for mode in each[0].pause_modes if all(mode in one.pause_modes for one in each)),
        max_context=min(contexts, default=None),
        priorities=all(one.priorities for one in each),
        shares_weights=all(one.shares_weights for one in each),
        routes=all(one.routes for one in each),
        shares_loop=any(one.shares_loop for one in each),
    )
