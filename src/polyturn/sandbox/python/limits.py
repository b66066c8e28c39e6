"""The limits of code in a sandbox, and the result of a run.

SandboxLimits(timeout_s=10, memory_mb=512)  ->  RunResult(status="timeout", stdout="1\\n", exit_code=None, ...)
"""

from __future__ import annotations

import resource
from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from polyturn.core.errors import ConfigError

OUTPUT_OF_PROGRAMS = 4 << 20
"""Maximum kept output of a whole program in bytes; it is large, because the output is compared and not shown to a model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxLimits:
    """The limits of one sandbox."""

    timeout_s: float = 10.0
    """Wall time of one run, in seconds."""
    cpu_s: float = 120.0
    """CPU time of each process over the whole life of the sandbox, in seconds."""
    memory_mb: int = 512
    """Address space of each process in MB; with control groups, also the memory of all processes and files in /tmp."""
    processes: int = 32
    """Maximum number of processes and threads at a time."""
    output_bytes: int = 65_536
    """Maximum number of bytes kept of stdout, and of stderr; the rest is read and discarded."""
    flood_bytes: int = 16 << 20
    """Output of one run in bytes after which the sandbox is killed."""
    disk_mb: int = 64
    """Maximum size of /tmp, and of one file, in MB."""

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
                raise ConfigError(f"the sandbox's {item.name} is {value!r}; set a positive number")

    @property
    def of_a_process(self) -> list[tuple[int, int]]:
        """The resource limits of each process, as (resource number, value)."""
        return [
            (resource.RLIMIT_AS, self.memory_mb << 20),
            (resource.RLIMIT_NPROC, self.processes),
            (resource.RLIMIT_FSIZE, self.disk_mb << 20),
            (resource.RLIMIT_CPU, max(1, int(self.cpu_s))),
            (resource.RLIMIT_NOFILE, 256),
            (resource.RLIMIT_CORE, 0),
            (resource.RLIMIT_SIGPENDING, 256),
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """The result of a run."""

    status: str
    """ok, error (an exception), exit (the code exited), timeout, output (too much output), killed (a limit or a signal ended
    the process) or sandbox_error (the sandbox did not start)."""
    stdout: str = ""
    stderr: str = ""
    exit_code: int | None = None
    """0, 1 after an exception, or the code's exit code; negative for a signal; None if it was stopped from outside."""
    duration_s: float = 0.0
    is_truncated: bool = False
    """Whether output is missing."""
    is_alive: bool = True
    """Whether the sandbox and its variables are still there."""
    files: Mapping[str, str] = field(default_factory=dict)
    """File name -> content in base64, for the requested files."""
