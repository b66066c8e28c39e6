"""PythonSandbox: runs the model's Python in a sandbox on this machine; variables persist between the calls of an episode.

    execute({"code": "x = 6"})   ->  "The code ran and printed nothing."
    execute({"code": "x * 7"})   ->  "42\\n"

A sandbox belongs to one episode and is killed with all its processes at the end. If it dies earlier (a limit, a crash), the
next call replaces it, and the model is informed that its variables are gone. If a sandbox cannot be started, which is never
caused by the model's code, the trajectory fails, so that the model neither sees this failure nor is scored with it.
"""

from __future__ import annotations

import dataclasses
import logging
from typing import Annotated, Any
from uuid import uuid4

from pydantic import Field

from polyturn.core.errors import ToolError, ToolUnavailableError
from polyturn.infra.settings import AtLeastOne, Seconds, Settings, Text
from polyturn.infra.threads import DaemonThreads
from polyturn.sandbox.python.interpreter import Interpreter, SandboxStartError
from polyturn.sandbox.python.isolation import bare_python, interpreter_folders, require_isolation
from polyturn.sandbox.python.limits import RunResult, SandboxLimits
from polyturn.sandbox.python.pool import WarmPool
from polyturn.tools.base import BaseTool
from polyturn.tools.schema import OpenAIFunctionToolSchema, ToolResponse

logger = logging.getLogger(__name__)

_SHARE = 0.75


class PythonSandboxSettings(Settings):
    """The limits of a sandbox, and how many there are."""

    type: str = "native"
    timeout: Seconds = 10.0
    """Maximum number of seconds that the code of one call runs."""
    cpu_time: Seconds = 120.0
    """CPU seconds of each process over a whole episode."""
    memory_limit_mb: AtLeastOne = 512
    max_processes: AtLeastOne = 32
    max_output_bytes: AtLeastOne = 65_536
    """Maximum number of bytes kept of stdout, and of stderr."""
    disk_mb: AtLeastOne = 64
    warm: Annotated[int, Field(ge=0)] = 2
    """Sandboxes that are started in advance."""
    num_workers: AtLeastOne = 16
    """Maximum number of concurrent calls."""
    python: Text | None = None
    """The interpreter that runs the code, which may import its packages. Null is polyturn's own interpreter with only the
    standard library."""
    allow_unsafe: bool = False
    """Whether to run the code with resource limits alone if bubblewrap is missing or does not work."""


class PythonSandbox(BaseTool):
    """Runs Python code and keeps its variables between calls. Config: `PythonSandboxSettings`."""

    checks_own_arguments = True

    def __init__(self, config: dict[str, Any], tool_schema: Any = None) -> None:
        super().__init__(config, tool_schema)
        settings = PythonSandboxSettings.read(config, who="the Python sandbox")
        self.limits = SandboxLimits(
            timeout_s=settings.timeout,
            cpu_s=settings.cpu_time,
            memory_mb=settings.memory_limit_mb,
            processes=settings.max_processes,
            output_bytes=settings.max_output_bytes,
            disk_mb=settings.disk_mb,
        )
        python = settings.python or bare_python()
        interpreter_folders(python)
        isolation = require_isolation(allow_unsafe=settings.allow_unsafe)
        self._pool = WarmPool(lambda: Interpreter(self.limits, isolation=isolation, python=python), size=settings.warm)
        self._num_workers = settings.num_workers
        self._threads = DaemonThreads(name="sandbox", max_threads=settings.num_workers)
        self._instance_dict: dict[str, _Session] = {}

    @property
    def max_concurrency(self) -> int:
        """Maximum number of concurrent calls; others wait for a slot, which does not count for their deadline."""
        return self._num_workers

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        """Return the default schema, for a tool file without one."""
        code = {
            "type": "string",
            "description": "Python code; print what you want to see. Variables are kept between calls.",
        }
        return OpenAIFunctionToolSchema.of("python", "Run Python code and return its output.", {"code": code})

    def fit_deadline(self, timeout_s: float) -> None:
        """Limit a program to three quarters of a call's deadline; the rest is for starting a sandbox."""
        if self.limits.timeout_s > _SHARE * timeout_s:
            logger.warning(
                "tool %r: its timeout of %g s is more than three quarters of the deadline of a call, %g s: a program has "
                "%g s; set a shorter timeout, or a longer deadline",
                self.name,
                self.limits.timeout_s,
                timeout_s,
                _SHARE * timeout_s,
            )
            self.limits = dataclasses.replace(self.limits, timeout_s=_SHARE * timeout_s)

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse]:
        """Start an instance for one episode; the first call takes a sandbox."""
        instance_id = str(uuid4()) if instance_id is None else instance_id
        self._pool.open()
        self._instance_dict[instance_id] = _Session(self._pool)
        return instance_id, ToolResponse()

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, None, dict[str, Any]]:
        """Run `code`.

        Raises:
            ToolError: the argument `code` is missing.
            ToolUnavailableError: no sandbox can be started.
        """
        if "code" not in parameters:
            raise ToolError(f"the argument 'code' is missing; there are {sorted(parameters)}")
        code = parameters["code"]
        session = self._instance_dict[instance_id]
        result: RunResult = await self._threads.run(session.run, code if isinstance(code, str) else str(code))
        metrics: dict[str, Any] = {"status": result.status, "duration_s": result.duration_s}
        return ToolResponse(text=describe(result, self.limits)), None, metrics

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> None:
        """Return None: running code does not affect the reward."""

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """Kill the episode's sandbox with all its processes; raise KeyError for an id that was never created."""
        session = self._instance_dict.pop(instance_id)
        session.stop()
        await self._threads.run(session.close, is_owed=True)


class _Session:
    """The sandbox of one episode, taken on first use."""

    def __init__(self, pool: WarmPool) -> None:
        self._pool = pool
        self._interpreter: Interpreter | None = None
        self._is_over = False

    def run(self, code: str) -> RunResult:
        if self._interpreter is None or not self._interpreter.is_alive:
            self._let_go()
            try:
                self._interpreter = self._pool.take()
            except SandboxStartError as problem:
                raise ToolUnavailableError(str(problem)) from problem
        if self._is_over:  # the episode ended while a sandbox was being taken
            self._let_go()
            return RunResult(status="killed", is_alive=False)
        return self._interpreter.run(code)

    def stop(self) -> None:
        self._is_over = True
        if self._interpreter is not None:
            self._interpreter.stop()

    def close(self) -> None:
        self._let_go()
        self._pool.close()

    def _let_go(self) -> None:
        if self._interpreter is not None:
            self._interpreter.close()
            self._interpreter = None


def describe(result: RunResult, limits: SandboxLimits) -> str:
    """Return the text for the model: the output, then how the program ended if it did not succeed."""
    ends = {
        "ok": "",
        "error": "",
        "exit": f"The code ended with exit code {result.exit_code}." if result.exit_code else "",
        "timeout": f"The code took longer than {limits.timeout_s:g} s and was stopped.",
        "output": "The code printed without end and was stopped.",
        "killed": f"The code was killed (exit code {result.exit_code}), maybe it ran out of memory ({limits.memory_mb} MB).",
    }
    cut = "[The rest of the output is left out.]" if result.is_truncated else ""
    gone = "" if result.is_alive else "Its variables are gone."
    output, end = f"{result.stdout}{result.stderr}", " ".join(filter(None, (cut, ends[result.status], gone)))
    gap = "\n" if output and end and not output.endswith("\n") else ""
    return output + gap + end or "The code ran and printed nothing."
