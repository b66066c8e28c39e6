"""Evaluation: runs training's kind of episode with sampling settings of its own, and reports the results."""
