"""Folders for PYTHONPATH: each package here has the name of a library that polyturn replaces."""
