"""`python -m polyturn.compat.swift rlhf …` runs as the program `swift`; `megatron rlhf …` as the program `megatron`."""

from __future__ import annotations

from polyturn.compat.swift.command import main

if __name__ == "__main__":
    main()
