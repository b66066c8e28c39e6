"""What the tests of sandboxes share: the mark of those that need bubblewrap, and a program that stands in for an engine."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from polyturn.sandbox.python.isolation import Isolation, find_isolation

ISOLATION, WHY_NOT = find_isolation()
needs_bubblewrap = pytest.mark.skipif(ISOLATION is Isolation.NONE, reason=WHY_NOT)
needs_root = pytest.mark.skipif(ISOLATION is not Isolation.ROOT, reason="images and limits of bubblewrap need root")

_PROGRAM = """#!/bin/sh
# An engine that records its arguments, one call a line, and runs what `exec` names on this machine.
python3 -c 'import json, os, sys; os.write(1, (json.dumps(sys.argv[1:]) + chr(10)).encode())' "$@" >> "$STAND_IN/calls"
case $1 in
  image) [ -e "$STAND_IN/built" ] ;;
  build) [ ! -e "$STAND_IN/no-build" ] || { echo "no space left" >&2; exit 1; }; : > "$STAND_IN/built" ;;
  run) [ ! -e "$STAND_IN/no-run" ] || { echo "Error: no such image" >&2; exit 125; } ;;
  ps) cat "$STAND_IN/running" 2> /dev/null || true ;;
  rm) rm -f "$STAND_IN/running" ;;
  inspect)
    [ -e "$STAND_IN/dead" ] && echo false || echo true
    [ ! -e "$STAND_IN/dying" ] || : > "$STAND_IN/dead" ;;
  instance)
    case $2 in
      start) [ ! -e "$STAND_IN/no-run" ] || { echo "FATAL: no such image" >&2; exit 255; } ;;
      list)
        [ -e "$STAND_IN/dead" ] && echo '{"instances": []}' ||
          printf '{"instances": [{"instance": "%s", "pid": %s}]}' "$4" $$ ;;
    esac ;;
  exec)
    [ ! -e "$STAND_IN/dead" ] || exit 255
    while name=${1#instance://}; [ "${name#polyturn-}" = "$name" ]; do shift; done
    shift
    "$@" ;;
esac
"""

_RUN = """
import asyncio, sys
from polyturn.sandbox import SandboxSpec, open_sandbox

async def main():
    await open_sandbox(SandboxSpec(backend=sys.argv[1], image="i", workdir=sys.argv[2]))
    print("ready", flush=True)
    await asyncio.sleep(1000)

asyncio.run(main())
"""


class StandIn:
    """A folder on PATH with a program that records how it is called."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name = folder, name
        program = folder / name
        program.write_text(_PROGRAM)
        program.chmod(0o755)

    def set(self, flag: str) -> None:
        """Let it behave as `flag` says: no-build, no-run, dead, dying (dead behind the next look at it)."""
        (self.folder / flag).touch()

    def calls(self, command: str) -> list[list[str]]:
        """Return the arguments of each call of one of its commands."""
        lines = (self.folder / "calls").read_text().splitlines()
        return [call for call in map(json.loads, lines) if call[0] == command]

    @contextlib.contextmanager
    def killed_run(self) -> Iterator[None]:
        """Open a sandbox in a process, and kill that process when the block ends."""
        command = [sys.executable, "-c", _RUN, self.name, str(self.folder / "work")]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as run:
            assert run.stdout is not None and run.stdout.readline() == "ready\n"
            try:
                yield
            finally:
                run.kill()


def stand_in(monkeypatch: pytest.MonkeyPatch, folder: Path, name: str) -> StandIn:
    """Put a stand-in for the engine `name` on PATH."""
    monkeypatch.setenv("STAND_IN", str(folder))
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return StandIn(folder, name)


def wait_until(is_so: Callable[[], bool]) -> None:
    """Wait until something is so, for as long as the test may take."""
    while not is_so():
        time.sleep(0.01)


def processes_with(word: str) -> list[int]:
    """Return the processes of this machine whose command line holds a word."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                line = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            found += [int(entry.name)] if word.encode() in line and int(entry.name) != os.getpid() else []
    return found
