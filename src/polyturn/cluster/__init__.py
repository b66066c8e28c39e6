"""A run on a Ray cluster: trainer ranks, engine replicas and rollout workers, each placed where its resources are."""
