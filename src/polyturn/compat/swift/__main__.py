"""`python -m polyturn.compat.swift rlhf …`: what the program `swift` does; `megatron rlhf …` is that of `megatron`."""

from __future__ import annotations

from polyturn.compat.swift.command import main

if __name__ == "__main__":
    main()
