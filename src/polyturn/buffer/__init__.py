"""Groups between rollout and training."""
