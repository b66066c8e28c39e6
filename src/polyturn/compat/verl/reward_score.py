"""verl.utils.reward_score: the name that its scorer of all data sources had before the multi-turn releases."""

from __future__ import annotations

from polyturn.rewards.default import default_compute_score as _default_compute_score

__all__ = ["_default_compute_score"]
