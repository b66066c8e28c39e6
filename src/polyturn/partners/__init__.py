"""Models besides the trained one: at an endpoint, or as further policies of the run."""
