"""The program of a lost client is ended, so that its slot is free for the next one."""

import asyncio
import threading
from typing import Any

import httpx
import pytest

from polyturn.sandbox.python.limits import RunResult, SandboxLimits
from polyturn.serving.sandbox import Program, SandboxService, create_app

WITHIN_S = 60


class Endless:
    """A sandbox whose programs run until it is stopped; one named `quick` ends at once."""

    def __init__(self) -> None:
        self.is_alive = True
        self.started = threading.Event()
        self.stopped = threading.Event()

    def run_program(self, code: str, **_: Any) -> RunResult:
        self.started.set()
        if code != "quick":
            self.stopped.wait()
        return RunResult(status="killed" if self.stopped.is_set() else "exit", exit_code=0)

    def stop(self) -> None:
        self.stopped.set()

    def close(self) -> None:
        self.is_alive = False


@pytest.fixture
def sandboxes() -> list[Endless]:
    return []


@pytest.fixture
def service(sandboxes: list[Endless]) -> SandboxService:
    def start() -> Any:
        sandboxes.append(Endless())
        return sandboxes[-1]

    return SandboxService(start, limits=SandboxLimits(), max_concurrent=1, max_waiting=4, warm=0)


async def is_running(sandboxes: list[Endless]) -> None:
    async with asyncio.timeout(WITHIN_S):
        while not any(sandbox.started.is_set() for sandbox in sandboxes):  # noqa: ASYNC110  # a thread starts it
            await asyncio.sleep(0.01)


async def test_cancelled_program_is_stopped_and_frees_its_slot(service: SandboxService, sandboxes: list[Endless]) -> None:
    running = asyncio.create_task(service.run(Program(code="endless")))
    await is_running(sandboxes)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert sandboxes[0].stopped.is_set()
    async with asyncio.timeout(WITHIN_S):
        result = await service.run(Program(code="quick"))
    assert result is not None
    assert result.status == "exit"


async def test_client_that_leaves_ends_its_program(service: SandboxService, sandboxes: list[Endless]) -> None:
    has_left = asyncio.Event()
    app = create_app(service)

    async def leaving(scope: Any, receive: Any, send: Any) -> None:
        """The application, with a client that disconnects once its body is read."""
        messages = [await receive()]
        while messages[-1].get("more_body"):
            messages.append(await receive())

        async def next_message() -> Any:
            if messages:
                return messages.pop(0)
            await has_left.wait()
            return {"type": "http.disconnect"}

        await app(scope, next_message, send)

    async with httpx.AsyncClient(transport=httpx.ASGITransport(leaving), base_url="http://127.0.0.1") as client:
        asking = asyncio.create_task(client.post("/run_code", json={"code": "endless"}, timeout=WITHIN_S))
        await is_running(sandboxes)
        has_left.set()
        with pytest.raises(AssertionError):  # of httpx: there is no answer
            await asking
    assert sandboxes[0].stopped.is_set()
