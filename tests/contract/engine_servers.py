"""The real servers of the contract tests: started once for the whole session, from the environments of `make engines`.

`POLYTURN_TEST_ENGINES=0` leaves them out, and so does a missing environment; both are said in the test report.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from polyturn.engines import serve_commands
from polyturn.engines.launcher import LaunchSpec
from polyturn.engines.remote import RemoteEngine
from polyturn.engines.sglang import SglangEngine
from polyturn.engines.vllm import VllmEngine
from polyturn.engines.weights.stream import Transport

ROOT = Path(__file__).parents[2]
CLIENTS: dict[str, type[RemoteEngine]] = {"vllm": VllmEngine, "sglang": SglangEngine}
MAX_CONTEXT = 2048
READY_S = 900
"""How long a start may take: 25 seconds of processor time, on a machine that others use too."""


def on_servers(*, slow: str = "") -> list[Any]:
    """Return the parameters of a test that runs on each real server; `slow` names the one of them that is slow."""
    return [
        pytest.param(kind, marks=[pytest.mark.engines, *([pytest.mark.slow] if kind == slow else [])]) for kind in CLIENTS
    ]


def needs_server(kind: str) -> None:
    """Skip the test where the engine's environment is missing."""
    if (reason := why_not(kind)) is not None:
        pytest.skip(reason)


def why_not(engine: str) -> str | None:
    """Return why `engine` cannot be started here; None if it can."""
    if os.environ.get("POLYTURN_TEST_ENGINES") == "0":
        return "POLYTURN_TEST_ENGINES=0 leaves the real engines out"
    if not interpreter(engine).parent.with_name(".complete").exists():  # the stamp of scripts/venv_cache.py
        return f"there is no environment for {engine}; `make engines` builds it"
    return None


@functools.cache
def interpreter(engine: str) -> Path:
    """Return the interpreter of the engine's environment, whether it is there or not."""
    script = ROOT / "scripts" / "engines" / "build.py"
    shown = subprocess.run([sys.executable, str(script), "--where", engine], check=True, capture_output=True, text=True)
    return Path(shown.stdout.split()[1])


def launch_spec(
    engine: str, model: Path, *, max_context: int = MAX_CONTEXT, sees: bool = False, way: Transport = "gloo"
) -> LaunchSpec:
    """Return the launch of a server of `model` on a CPU, as a run starts it; it also loads weights from a folder."""
    make = getattr(serve_commands, f"{engine}_command")
    spec = make(
        python=str(interpreter(engine)), model=model, max_context=max_context, device="cpu", sees=sees, transport=way
    )
    return dataclasses.replace(spec, ready_timeout_s=READY_S)
