"""Rewards: from a finished trajectory to one number, and the named scores it was made of."""
