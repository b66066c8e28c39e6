"""`python -m polyturn.compat.swift rlhf …`: what the program `swift` does. The command line stands above this package, so it
is looked up by its name."""

from __future__ import annotations

import importlib

if __name__ == "__main__":
    importlib.import_module("polyturn.cli.swift").main()
