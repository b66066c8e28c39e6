"""The isolation of this machine's sandboxes, for tests that need it; where there is none they are skipped and say why."""

from __future__ import annotations

from typing import Any

import pytest

from polyturn.sandbox.python.interpreter import Interpreter
from polyturn.sandbox.python.isolation import Isolation, bare_python, find_isolation
from polyturn.sandbox.python.limits import SandboxLimits


def need_isolation() -> Isolation:
    """Return the isolation, or skip the test."""
    isolation, why = find_isolation()
    if isolation is Isolation.NONE:
        pytest.skip(f"bubblewrap cannot isolate code here: {why}")
    return isolation


def start_sandbox(**limits: Any) -> Interpreter:
    """Start an isolated sandbox, or skip the test."""
    return Interpreter(SandboxLimits(**limits), isolation=need_isolation(), python=bare_python())
