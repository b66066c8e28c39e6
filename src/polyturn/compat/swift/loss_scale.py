"""swift.loss_scale: strategies that plug-ins define, which say what of a reply is trained.

    class Last(LossScale):
        def get_loss_scale(self, context, **kwargs): return [context], [1.0 if "####" in context else 0.0]
    loss_scale_map["mine"] = Last

In reinforcement learning a strategy only masks: everything above 0 is trained.
"""

from __future__ import annotations

from typing import Any

from polyturn.compat.swift.registry import PluginDict


class LossScale:
    """A strategy: cuts a reply into pieces and weighs each."""

    is_binary: bool | None = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def get_loss_scale(self, context: str, **kwargs: Any) -> tuple[list[str], list[float]]:
        """Return the pieces of a reply, which join to it, and the weight of each."""
        return [context], [1.0]


class LastRoundLossScale(LossScale):
    """Trains the last reply; which one that is, the run says."""


loss_scale_map = PluginDict("loss_scale_map", {"default": LossScale, "last_round": LastRoundLossScale})
