"""SglangInProcess: SGLang without HTTP, as `sglang.Engine` inside this process, for an environment that has both.

    our loop --- call --->  a thread with SGLang's own loop: its tokenizer manager  ---->  its scheduler, a process

It is the client of an SGLang server with another link: what a server's routes do, this link asks of the same objects. They
live on a loop of their own in a thread of their own, so that neither side's work holds the other's up. SGLang's own shutdown
ends every child of this process, which may be tools or ranks; here only the processes that it started are ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any

from polyturn.core.errors import EngineError, EngineLostError, one_line
from polyturn.engines.link import Link
from polyturn.engines.serve_commands import SERVER_SIDE
from polyturn.engines.sglang import SglangEngine

_STOP_S = 10.0


class SglangInProcess(SglangEngine):
    """SGLang in this process; `core.protocols.Engine`."""

    name = "sglang"

    def __init__(self, arguments: Mapping[str, Any], *, env: Mapping[str, str] | None = None, **options: Any) -> None:
        """Make it; SGLang starts with the first request.

        Args:
            arguments: Of `sglang.Engine`: model_path, context_length, device, …
            env: Set in this process before SGLang is imported.
            options: See `SglangEngine`.
        """
        super().__init__("in-process", **options)
        self._link = InProcessLink(arguments, env=env or {})


class InProcessLink(Link):
    """What `Link` is to a server."""

    def __init__(self, arguments: Mapping[str, Any], *, env: Mapping[str, str]) -> None:
        """Take the arguments of `sglang.Engine`, and what to set in this process's environment."""
        super().__init__("in-process")
        self._arguments = {"skip_tokenizer_init": True, "log_level": "warning", **arguments}
        self._env = env
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._engine: Any = None
        self._children: list[Any] = []
        self._problem: BaseException | None = None
        self._is_starting = asyncio.Lock()

    async def post(self, path: str, body: Mapping[str, Any] | None = None, *, timeout_s: float | None = None) -> Any:
        """Do what SGLang's route does with `body`.

        Raises:
            EngineLostError: SGLang has ended, or took too long.
            EngineError: it refused.
        """
        return await self._ask(path, dict(body or {}), timeout_s)

    async def get(self, path: str, *, timeout_s: float | None = None) -> Any:
        """Do what SGLang's route does."""
        return await self._ask(path, {}, timeout_s)

    async def close(self) -> None:
        """End SGLang's processes, and no others."""
        if self._thread is None or self._loop is None:
            return
        await asyncio.to_thread(self._stop)
        self._loop.call_soon_threadsafe(self._loop.stop)
        await asyncio.to_thread(self._thread.join, _STOP_S)
        self._thread = self._loop = self._engine = None

    async def _ask(self, path: str, body: dict[str, Any], timeout_s: float | None) -> Any:
        async with self._is_starting:
            if self._thread is None:
                await self._start()
        if any(not child.is_running() for child in self._children):
            raise EngineLostError("a process of SGLang has ended")
        assert self._loop is not None
        future = asyncio.run_coroutine_threadsafe(self._do(path.partition("?")[0], body), self._loop)
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.wrap_future(future)
        except TimeoutError as problem:
            raise EngineLostError(f"SGLang did not do {path} within {timeout_s:.0f} s") from problem
        except (ValueError, TypeError, AssertionError) as problem:
            raise EngineError(f"SGLang refused {path}: {one_line(problem)}") from problem

    async def _start(self) -> None:
        ready = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(ready,), name="polyturn-sglang", daemon=True)
        self._thread.start()
        await asyncio.to_thread(ready.wait)
        if self._problem is not None:
            self._thread = None
            raise EngineError(f"SGLang could not be started in this process: {one_line(self._problem)}") from self._problem

    def _run(self, ready: threading.Event) -> None:
        import atexit
        import os

        import psutil

        os.environ.update(self._env)
        if str(SERVER_SIDE) not in sys.path:
            sys.path.append(str(SERVER_SIDE))  # its processes start with this one's, and find our plug-in there
        self._loop = asyncio.new_event_loop()
        asyncio.set_event_loop(self._loop)
        try:
            import sglang

            before = {child.pid for child in psutil.Process().children(recursive=True)}
            self._engine = sglang.Engine(**self._arguments)
            atexit.unregister(self._engine.shutdown)
            atexit.register(self._stop)
            self._children = [child for child in psutil.Process().children(recursive=True) if child.pid not in before]
        except BaseException as problem:
            self._problem = problem
            return
        finally:
            ready.set()
        self._loop.run_forever()

    def _stop(self) -> None:
        import psutil

        if self._engine is None:
            return
        watchdog = self._engine.tokenizer_manager._subprocess_watchdog
        if watchdog is not None:
            watchdog.stop()
        for child in self._children:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.terminate()
        _, left = psutil.wait_procs(self._children, timeout=_STOP_S)
        for child in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        self._children = []

    async def _do(self, path: str, body: dict[str, Any]) -> Any:
        """Run on SGLang's loop."""
        from sglang.srt.managers import io_struct as asked

        manager = self._engine.tokenizer_manager
        takes: Mapping[str, tuple[Any, Callable[[Any], Any]]] = {
            "/pause_generation": (asked.PauseGenerationReqInput, manager.pause_generation),
            "/continue_generation": (asked.ContinueGenerationReqInput, manager.continue_generation),
            "/update_weights_from_disk": (asked.UpdateWeightFromDiskReqInput, manager.update_weights_from_disk),
            "/update_weight_version": (asked.UpdateWeightVersionReqInput, manager.update_weight_version),
        }
        if path == "/generate":
            body["input_ids"] = [int(token) for token in body["input_ids"]]
            async for answer in manager.generate_request(asked.GenerateReqInput(**body), None):
                return answer
        if path == "/abort_request":
            return manager.abort_request(rid=body["rid"])
        if path == "/server_info":
            import sglang

            return {**manager.server_args.resolved_dict(), "version": sglang.__version__}
        if path == "/flush_cache":
            if not (await manager.flush_cache(timeout_s=30.0)).success:
                raise EngineError("SGLang keeps the prefixes that it computed before")
            return None
        if path == "/weights_checker":
            success, message, ranks, _ = await manager.check_weights(asked.CheckWeightsReqInput(**body), None)
            if not success:
                raise EngineError(f"SGLang gives no checksums: {message}")
            return {"ranks": ranks}
        if path == "/health_generate":
            return await manager.get_internal_state()  # answered by the scheduler between two steps
        if path not in takes:
            raise EngineError(f"SGLang in this process has no {path}; leave engine.weights at auto, shared_memory or disk")
        kind, do = takes[path]
        answer = await do(kind(**body))
        return None if answer is None else {"success": answer[0], "message": answer[1]}
