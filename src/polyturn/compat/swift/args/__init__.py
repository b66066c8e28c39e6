"""Translates ms-swift's training arguments, from flags or a YAML file, to a native configuration."""
