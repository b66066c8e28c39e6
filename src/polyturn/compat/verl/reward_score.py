"""verl.utils.reward_score: the scorer of all data sources, under its name before the multi-turn releases."""

from __future__ import annotations

from polyturn.rewards.default import default_compute_score as _default_compute_score

__all__ = ["_default_compute_score"]
