"""ms-swift's training arguments, as flags or as a YAML file, translated to a native configuration."""
