"""Sandboxes for episodes: bubblewrap, podman, docker, apptainer and E2B, with one interface.

SandboxSpec  ->  open_sandbox  ->  BaseSandbox: exec, read, write, upload, download, snapshot, close
"""

from polyturn.sandbox.base import (
    BaseSandbox,
    ExecResult,
    SandboxError,
    SandboxFileError,
    SandboxGoneError,
    SandboxSetupError,
    SandboxSpec,
)
from polyturn.sandbox.episodes import EpisodeSandboxes, check_spec, open_sandbox, read_spec, try_sandbox

__all__ = [
    "BaseSandbox", "EpisodeSandboxes", "ExecResult", "SandboxError", "SandboxFileError", "SandboxGoneError",
    "SandboxSetupError", "SandboxSpec", "check_spec", "open_sandbox", "read_spec", "try_sandbox",
]  # fmt: skip
