"""Contract suites that authors of plug-ins run: one module per kind of plug-in."""
