"""A small real HTTP server, for tests of tools that ask a service: it answers with a function of the posted JSON.

async with serve(lambda asked, number: {"result": []}) as server:
    tool = SearchTool({"retrieval_service_url": server.url})
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import AsyncIterator, Callable
from typing import Any

from aiohttp import web


class LocalService:
    """Where a server is, what it was asked, and how many requests it had at once."""

    def __init__(self) -> None:
        self.url = ""
        self.asked: list[dict[str, Any]] = []
        self.busy = 0
        self.most_at_once = 0


@contextlib.asynccontextmanager
async def serve(answer: Callable[[dict[str, Any], int], Any]) -> AsyncIterator[LocalService]:
    """Serve POST, under any path, with `answer(json, number of the request)`: a reply, or (HTTP status, reply)."""
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

    app = web.Application()
    app.router.add_post("/{path:.*}", handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    served.url = f"http://127.0.0.1:{runner.addresses[0][1]}/"
    try:
        yield served
    finally:
        await runner.cleanup()
