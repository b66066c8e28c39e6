"""Commands that are gone: each says which one does its work now."""

from __future__ import annotations

from collections.abc import Callable

from polyturn.core.errors import ConfigError

RETIRED = {
    "simulate": "its predictions were not exact enough to choose servers by; run a few steps on one server and read "
    "engine/queue and engine/kv_use of its metrics",
    "runs": "`polyturn show FOLDER` lists the runs of a folder",
    "plot": "`polyturn report RUN... --metric NAME -o curve.png` draws metrics",
    "answer": "`polyturn view --desk DESK` shows the conversations that wait, and answers them here with --terminal",
}
"""Command -> what to do instead."""


def retired(name: str) -> Callable[[], None]:
    """Return a command that refuses to run and names its successor."""

    def refuse() -> None:
        raise ConfigError(f"polyturn {name} is no longer a command: {RETIRED[name]}")

    return refuse
