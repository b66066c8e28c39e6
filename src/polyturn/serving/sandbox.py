"""A sandbox server in SandboxFusion's protocol, for SandboxFusionTool and for rewards that run programs.

    POST /run_code  {"code": "print(input())", "language": "python", "stdin": "4", "run_timeout": 5}
    ->  {"status": "Success", "run_result": {"status": "Finished", "return_code": 0, "stdout": "4\\n", …}, …}

Each program gets a fresh sandbox, which is killed when the program ends or its client disconnects. A failing program is a
normal answer, not an HTTP error. The number of running programs and the length of the queue are limited.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Annotated, Any, Literal

from pydantic import Field
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request

from polyturn.core.errors import one_line
from polyturn.infra.threads import DaemonThreads
from polyturn.sandbox.python.fusion import reply_of
from polyturn.sandbox.python.interpreter import Interpreter, SandboxStartError
from polyturn.sandbox.python.limits import RunResult, SandboxLimits
from polyturn.sandbox.python.pool import WarmPool
from polyturn.serving.auth import ServerRules, json_app
from polyturn.serving.body import Body, read_body, while_wanted

MAX_BODY_BYTES = 8 << 20


class Program(Body):
    """A request to `/run_code`."""

    code: str = Field(description="the program")
    language: Literal["python"] = "python"
    stdin: str | None = None
    files: dict[str, str] | None = Field(None, description="name -> content in base64")
    fetch_files: Annotated[list[str], Field(max_length=256)] | None = Field(None, description="names of files to return")
    run_timeout: Annotated[float, Field(gt=0)] | None = Field(None, description="seconds")
    memory_limit_MB: float | None = Field(None, description="-1 sets no limit")


class SandboxService:
    """Runs programs, each in a fresh sandbox."""

    def __init__(
        self, start: Callable[[], Interpreter], *, limits: SandboxLimits, max_concurrent: int, max_waiting: int, warm: int
    ) -> None:
        self.limits = limits
        self._pool = WarmPool(start, size=warm)
        self._threads = DaemonThreads(name="sandbox-server", max_threads=max_concurrent)
        self._max_pending = max_concurrent + max_waiting
        self._num_pending = 0

    def open(self) -> None:
        self._pool.open()

    def close(self) -> None:
        self._pool.close()
        self._pool.let_go()

    async def run(self, request: Program) -> RunResult | None:
        """Run one program; return None if the queue is full. Cancelling the call ends the program."""
        if self._num_pending >= self._max_pending:
            return None
        self._num_pending += 1
        program = _Running()
        try:
            result: RunResult = await self._threads.run(self._run, request, program)
            return result
        except asyncio.CancelledError:
            program.stop()
            raise
        finally:
            self._num_pending -= 1

    def _run(self, request: Program, program: _Running) -> RunResult:
        try:
            sandbox = self._pool.take()
        except SandboxStartError as problem:
            return RunResult(status="sandbox_error", stderr=one_line(problem), is_alive=False)
        program.start(sandbox)
        try:
            return sandbox.run_program(
                request.code,
                stdin=request.stdin or "",
                files=request.files or {},
                fetch=request.fetch_files or [],
                timeout_s=request.run_timeout,
                memory_mb=request.memory_limit_MB if (request.memory_limit_MB or 0) > 0 else None,
            )
        finally:
            sandbox.close()


class _Running:
    """A program that runs in a thread and that the event loop can stop at any moment."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sandbox: Interpreter | None = None
        self._is_stopped = False

    def start(self, sandbox: Interpreter) -> None:
        with self._lock:
            self._sandbox = sandbox
            if self._is_stopped:
                sandbox.stop()

    def stop(self) -> None:
        with self._lock:
            self._is_stopped = True
            if self._sandbox is not None:
                self._sandbox.stop()


def create_app(service: SandboxService, *, rules: ServerRules | None = None) -> Starlette:
    """Return the application of a sandbox server.

    Args:
        service: Runs the programs.
        rules: Access rules of every request.
    """

    @asynccontextmanager
    async def while_up(app: Starlette) -> AsyncIterator[None]:
        service.open()
        yield
        await asyncio.to_thread(service.close)

    async def ping(request: Request) -> str:
        return "pong"

    async def run_code(request: Request) -> dict[str, Any]:
        result = await while_wanted(request, service.run(await read_body(request, Program)))
        if result is None:
            raise HTTPException(503, "too many programs are waiting; try again later")
        return reply_of(result)

    handlers = {"GET /v1/ping": ping, "POST /run_code": run_code}
    return json_app(handlers, rules or ServerRules(max_body_bytes=MAX_BODY_BYTES), lifespan=while_up)
