"""Rewards: compute the reward of a finished trajectory, and the named scores that it was made of."""
