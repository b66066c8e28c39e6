"""A sandbox server in SandboxFusion's protocol, for SandboxFusionTool and for rewards that run programs.

    POST /run_code  {"code": "print(input())", "language": "python", "stdin": "4", "run_timeout": 5}
    ->  {"status": "Success", "run_result": {"status": "Finished", "return_code": 0, "stdout": "4\\n", …}, …}

Each program gets a fresh sandbox, which is killed when the program ends or its client disconnects. A failing program is a
normal answer, not an HTTP error. The number of running programs and the length of the queue are limited.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from fastapi import FastAPI, HTTPException, Request

from polyturn.core.errors import one_line
from polyturn.infra.threads import DaemonThreads
from polyturn.serving.auth import ServerRules, guarded
from polyturn.serving.body import json_object
from polyturn.tools.python_sandbox.fusion import reply_of
from polyturn.tools.python_sandbox.interpreter import Interpreter, SandboxStartError
from polyturn.tools.python_sandbox.limits import RunResult, SandboxLimits
from polyturn.tools.python_sandbox.pool import WarmPool

MAX_BODY_BYTES = 8 << 20
MAX_FETCHED = 256
"""Largest number of files that one request may fetch."""
LANGUAGES = ("python",)
CHECK_CLIENT_S = 0.5
"""Seconds between two checks that the client is still connected."""
T = TypeVar("T")


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
        """Start the warm sandboxes."""
        self._pool.open()

    def close(self) -> None:
        """Close the warm sandboxes."""
        self._pool.close()
        self._pool.let_go()

    async def run(self, request: dict[str, Any]) -> RunResult | None:
        """Run one program; return None if the queue is full. Cancelling the call ends the program."""
        if self._num_pending >= self._max_pending:
            return None
        self._num_pending += 1
        program = _Program()
        try:
            result: RunResult = await self._threads.run(self._run, request, program)
            return result
        except asyncio.CancelledError:
            program.stop()
            raise
        finally:
            self._num_pending -= 1

    def _run(self, request: dict[str, Any], program: _Program) -> RunResult:
        try:
            sandbox = self._pool.take()
        except SandboxStartError as problem:
            return RunResult(status="sandbox_error", stderr=one_line(problem), is_alive=False)
        program.start(sandbox)
        try:
            return sandbox.run_program(
                request["code"],
                stdin=request.get("stdin") or "",
                files=request.get("files") or {},
                fetch=request.get("fetch_files") or [],
                timeout_s=request.get("run_timeout"),
                memory_mb=_memory(request),
            )
        finally:
            sandbox.close()


class _Program:
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


async def _while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`; cancel it if the client disconnects.

    Raises:
        HTTPException: the client disconnected.
    """
    task = asyncio.create_task(work)
    try:
        while not task.done():
            await asyncio.wait([task], timeout=CHECK_CLIENT_S)
            if not task.done() and await request.is_disconnected():
                raise HTTPException(499, "the client closed its connection")
        return task.result()
    finally:
        task.cancel()


def create_app(service: SandboxService, *, rules: ServerRules | None = None) -> FastAPI:
    """Return the FastAPI application of a sandbox server.

    Args:
        service: Runs the programs.
        rules: Access rules of every request.
    """

    @asynccontextmanager
    async def while_up(app: FastAPI) -> AsyncIterator[None]:
        service.open()
        yield
        await asyncio.to_thread(service.close)

    app = FastAPI(title="polyturn sandbox", docs_url=None, redoc_url=None, openapi_url=None, lifespan=while_up)

    guarded(app, rules or ServerRules(max_body_bytes=MAX_BODY_BYTES))

    @app.get("/v1/ping")
    async def ping() -> str:
        return "pong"

    @app.post("/run_code")
    async def run_code(request: Request) -> dict[str, Any]:
        payload = _check(await json_object(request))
        result = await _while_connected(request, service.run(payload))
        if result is None:
            raise HTTPException(503, "too many programs are waiting; try again later")
        return reply_of(result)

    return app


def _memory(request: dict[str, Any]) -> float | None:
    """Return the request's memory limit in MB; the protocol writes -1 for none."""
    limit = request.get("memory_limit_MB")
    return limit if limit is not None and limit > 0 else None


def _check(request: dict[str, Any]) -> dict[str, Any]:
    if not isinstance(request.get("code"), str):
        raise HTTPException(422, "the body must be an object with `code`, a text")
    language = request.get("language", "python")
    if language not in LANGUAGES:
        raise HTTPException(422, f"language is {language!r:.50}; this server runs {', '.join(LANGUAGES)}")
    if not isinstance(request.get("stdin") or "", str):
        raise HTTPException(422, "stdin must be a text or null")
    memory = request.get("memory_limit_MB")
    if memory is not None and (isinstance(memory, bool) or not isinstance(memory, int | float)):
        raise HTTPException(422, f"memory_limit_MB is {memory!r:.50}; use a number, or null")
    limit = request.get("run_timeout")
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int | float) or not limit > 0):
        raise HTTPException(422, f"run_timeout is {limit!r:.50}; use a positive number of seconds, or null")
    files, fetched = request.get("files") or {}, request.get("fetch_files") or []
    if not isinstance(files, dict) or not all(isinstance(content, str) for content in files.values()):
        raise HTTPException(422, "files must be an object: name -> content in base64")
    if not isinstance(fetched, list) or not all(isinstance(name, str) for name in fetched):
        raise HTTPException(422, "fetch_files must be a list of names")
    if len(fetched) > MAX_FETCHED:
        raise HTTPException(422, f"fetch_files has {len(fetched)} names; at most {MAX_FETCHED} are allowed")
    return request
