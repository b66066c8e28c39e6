"""Interactions: partners that answer the model's turns, such as a grader, a simulated user or an environment."""
