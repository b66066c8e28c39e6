"""The contracts of plug-ins, as suites that their authors run: one module for each kind."""
