"""Evaluation: runs the same episodes as training with separate sampling settings, and reports the results."""
