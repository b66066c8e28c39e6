"""Configuration: typed models, and the loader that fills them from YAML and the command line."""
