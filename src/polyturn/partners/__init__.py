"""Models that speak beside the one that is trained, at an endpoint or as further policies of the run."""
