"""Interactions answer the model's turns, for example as a grader, a simulated user or an environment."""
