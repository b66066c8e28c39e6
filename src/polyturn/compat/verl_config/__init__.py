"""Configurations written in verl's keys: composed as Hydra does, translated by one table (`keys.yaml`), run natively."""
