"""The limits of code in a sandbox, and the result of a run.

Limits(timeout_s=10, memory_mb=512)  ->  RunResult(status="timeout", stdout="1\\n", exit_code=None, ...)
"""

from __future__ import annotations

import resource
from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from polyturn.core.errors import ConfigError

OUTPUT_OF_PROGRAMS = 4 << 20
"""Bytes of a whole program's output that are kept: it is compared with what it should be, and not read by a model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxLimits:
    """The limits of one sandbox."""

    timeout_s: float = 10.0
    """Wall time of one run."""
    cpu_s: float = 120.0
    """CPU time of each process over the whole life of the sandbox."""
    memory_mb: int = 512
    """Address space of each process; with control groups the memory of all processes together (and files in /tmp) too."""
    processes: int = 32
    """Processes and threads at once."""
    output_bytes: int = 65_536
    """The bytes of stdout, and of stderr, that are kept; the rest is read and thrown away."""
    flood_bytes: int = 16 << 20
    """Output of one run after which the sandbox is killed."""
    disk_mb: int = 64
    """Size of /tmp, and of one file."""

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
                raise ConfigError(f"the sandbox's {item.name} is {value!r}; it is a positive number")

    @property
    def of_a_process(self) -> list[tuple[int, int]]:
        """The resource limits of each process, by their numbers."""
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
    """ok, error (an exception), exit (it ended itself), timeout, output (it printed without end), killed (a limit or a
    signal ended the process) or sandbox_error (the sandbox did not start)."""
    stdout: str = ""
    stderr: str = ""
    exit_code: int | None = None
    """0, 1 after an exception, or what the code said; a signal is negative; None where it was stopped from outside."""
    duration_s: float = 0.0
    is_truncated: bool = False
    """Whether output is missing."""
    is_alive: bool = True
    """Whether the sandbox and its variables are still there."""
    files: Mapping[str, str] = field(default_factory=dict)
    """The files that were asked for, in base64."""
