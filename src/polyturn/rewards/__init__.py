"""Rewards: compute the reward of a finished trajectory, and the named scores that it consists of."""
