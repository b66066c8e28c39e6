"""Records the trajectories of a run without loss, and reads them back."""
