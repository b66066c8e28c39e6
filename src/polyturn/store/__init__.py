"""The trajectories of a run, recorded so that nothing is lost and each can be looked at again."""
