"""What the framework relies on in a plug-in, as suites that its author runs: one module for each kind."""
