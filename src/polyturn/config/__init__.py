"""Configuration: typed models, and the loader from YAML and the command line."""
