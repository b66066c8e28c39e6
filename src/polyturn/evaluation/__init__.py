"""Evaluation: the same episodes as in training, with their own sampling, and a report of what they show."""
