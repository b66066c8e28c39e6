"""A proxy in front of a real server that behaves like a bad network or gateway: it fails for a while, or answers slowly."""

from __future__ import annotations

import asyncio
from typing import Self

import aiohttp
from aiohttp import web


class FaultyProxy:
    """Passes every request on to `target`, unless told otherwise."""

    def __init__(self, target: str) -> None:
        self.target = target
        self.fails_with: int | None = None
        """Answer with this status, without asking the server."""
        self.bytes_per_s: float | None = None
        """The rate at which answers pass."""
        self.num_failed = 0
        self.last: tuple[str, bytes] = ("", b"")
        """The path and body of the last request."""
        self.url = ""

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession()
        app = web.Application(client_max_size=2**30)
        app.router.add_route("*", "/{path:.*}", self._pass_on)
        self._runner = web.AppRunner(app, shutdown_timeout=0.5)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *problem: object) -> None:
        await self._runner.cleanup()
        await self._session.close()

    async def _pass_on(self, request: web.Request) -> web.StreamResponse:
        self.last = (request.path_qs, await request.read())
        if self.fails_with is not None:
            self.num_failed += 1
            return web.Response(status=self.fails_with, text="the proxy was told to fail")
        headers = {"content-type": "application/json"}
        sent = self._session.request(
            request.method, self.target + request.path_qs, data=await request.read(), headers=headers
        )
        async with sent as reply:
            body = await reply.read()
            kind = reply.content_type
            status = reply.status
        if self.bytes_per_s is None:
            return web.Response(status=status, body=body, content_type=kind)
        slow = web.StreamResponse(status=status, headers={"content-type": kind})
        await slow.prepare(request)
        for at in range(0, len(body), 20):
            await slow.write(body[at : at + 20])
            await asyncio.sleep(20 / self.bytes_per_s)
        await slow.write_eof()
        return slow
