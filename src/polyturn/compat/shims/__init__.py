"""Folders for PYTHONPATH: a package here carries the name of the library that polyturn stands in for."""
