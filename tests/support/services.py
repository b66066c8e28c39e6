"""Small real HTTP servers: of an aiohttp handler, of a function of the posted JSON, and of an application in a thread.

async with serving(handler) as url:
    client = HttpClient(url)

async with serve(lambda asked, number: {"result": []}) as server:
    tool = SearchTool({"retrieval_service_url": server.url})

with served_app(create_app(runs)) as address:
    page.goto(address)
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

from aiohttp import web

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@contextlib.asynccontextmanager
async def serving(handler: Handler) -> AsyncIterator[str]:
    """Serve every method and path with one handler; gives the address, without a slash at its end."""
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handler)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


class LocalService:
    """Where a server is, what it was asked, and how many requests it had at once."""

    def __init__(self) -> None:
        self.url = ""
        self.asked: list[dict[str, Any]] = []
        self.busy = 0
        self.most_at_once = 0


@contextlib.asynccontextmanager
async def serve(answer: Callable[[dict[str, Any], int], Any]) -> AsyncIterator[LocalService]:
    """Serve JSON under any path, with `answer(json, number of the request)`: a reply, or (HTTP status, reply)."""
    served = LocalService()

    async def handle(request: web.Request) -> web.Response:
        served.busy += 1
        served.most_at_once = max(served.most_at_once, served.busy)
        try:
            asked = await request.json()
            served.asked.append(asked)
            given = answer(asked, len(served.asked))
            if inspect.isawaitable(given):
                given = await given
            status, body = given if isinstance(given, tuple) else (200, given)
            return (
                web.Response(text=body, status=status) if isinstance(body, str) else web.json_response(body, status=status)
            )
        finally:
            served.busy -= 1

    async with serving(handle) as url:
        served.url = f"{url}/"
        yield served


@contextlib.contextmanager
def served_app(app: Any) -> Iterator[str]:
    """Serve an ASGI application in a thread; gives its address, ending with a slash, once it answers."""
    from polyturn.serving.auth import ServerRules
    from polyturn.serving.listen import bind, serving

    bound, is_up = bind("127.0.0.1", 0), threading.Event()
    loop, is_over = asyncio.new_event_loop(), asyncio.Event()

    async def run() -> None:
        async with serving(app, ServerRules(), bound):
            is_up.set()
            await is_over.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(run()), daemon=True)
    thread.start()
    assert is_up.wait(60)
    try:
        yield f"http://127.0.0.1:{bound.getsockname()[1]}/"
    finally:
        loop.call_soon_threadsafe(is_over.set)
        thread.join(30)
        loop.close()
