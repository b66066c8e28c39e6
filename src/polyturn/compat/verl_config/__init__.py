"""Configurations with verl's keys: composed with Hydra, translated with the table `keys.yaml`, and run natively."""
