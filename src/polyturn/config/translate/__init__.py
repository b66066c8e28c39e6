"""Translation of configurations with another trainer's keys: a table of keys, converters, and the fate of each key."""
