"""Runs on several processes or on a Ray cluster: trainer ranks, engine replicas, inference servers and rollout workers."""
