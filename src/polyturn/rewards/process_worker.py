"""Calls a reward function in the main thread of a process, for the process that started it.

A message in is a dict of keyword arguments; a message out is (True, the result) or (False, the error as text).
`rewards.processes` runs this module as `python -m polyturn.rewards.process_worker`. The process may be killed at any moment,
and ends when its input ends. Imports resolve as in the calling process: the module search path and the stand-ins for other
libraries are the same.
"""

from __future__ import annotations

import sys
from multiprocessing.connection import Connection

from polyturn.core.errors import one_line
from polyturn.infra.plugins import import_attr, install_namespace


def main() -> None:
    """Answer calls until the input ends."""
    connection = Connection(int(sys.argv[1]))
    path, stand_ins, name, base = connection.recv()
    sys.path[:] = path
    for root in stand_ins:
        install_namespace(root)
    reward = import_attr(name, base=base)
    function = reward() if isinstance(reward, type) else reward
    connection.send("ready")
    while True:
        try:
            arguments = connection.recv()
        except EOFError:
            return
        try:
            answer = True, function(**arguments)
        except Exception as problem:
            answer = False, one_line(problem)
        try:
            connection.send(answer)
        except Exception as problem:
            connection.send((False, f"its result cannot be sent from its process: {one_line(problem)}"))


if __name__ == "__main__":
    main()
