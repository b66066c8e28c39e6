"""What we send to a service goes to nobody else: redirects are not followed, and credentials stay at their origin."""

from __future__ import annotations

import ast
import asyncio
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

import polyturn
from polyturn.tools.a2a_client import _http_client
from polyturn.tools.search import SearchTool

PRIVATE = "what another service of this machine says"
TOKEN = "s3cr3t-t0ken"


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_the_search_tool_follows_no_redirect_and_quotes_nobody_else(status: int) -> None:
    asked: list[str] = []

    async def private(request: web.Request) -> web.Response:
        asked.append(request.headers.get("Authorization", ""))
        return web.Response(text=PRIVATE)

    async def run() -> str:
        other = web.Application()
        other.router.add_route("*", "/{rest:.*}", private)
        async with TestServer(other) as inner:

            async def away(request: web.Request) -> web.Response:
                return web.Response(status=status, headers={"Location": str(inner.make_url("/admin"))})

            service = web.Application()
            service.router.add_post("/retrieve", away)
            async with TestServer(service) as outer:
                tool = SearchTool(
                    {"retrieval_service_url": str(outer.make_url("/retrieve")), "token": TOKEN, "max_retries": 3}
                )
                instance, _ = await tool.create()
                answer, _, _ = await tool.execute(instance, {"query_list": ["a"]})
                await tool.release(instance)
        return str(answer.text)

    said = asyncio.run(run())
    assert "redirects, which is not followed" in said and PRIVATE not in said and not asked


def test_no_request_of_the_library_follows_redirects() -> None:
    """aiohttp follows them unless it is told not to; httpx does not unless it is told to."""
    root = Path(polyturn.__file__).parent
    follows = []
    for path in sorted(root.rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        assert "follow_redirects=True" not in source, path
        if "aiohttp" not in source:
            continue
        for node in ast.walk(ast.parse(source)):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            of = ast.unparse(node.func.value)
            is_request = node.func.attr in ("get", "post", "put", "request", "delete") and (
                of in ("session", "self._session", "self._http", "self._connect()")
            )
            if is_request and not any(k.arg == "allow_redirects" for k in node.keywords):
                follows.append(f"{path.relative_to(root)}:{node.lineno}")
    assert not follows


def test_an_agent_s_credentials_stay_at_its_origin() -> None:
    """Its card may name any address for its messages."""
    pytest.importorskip("httpx")
    heard: dict[str, str | None] = {}

    async def run() -> None:
        async def hear(request: web.Request) -> web.Response:
            heard[request.path] = request.headers.get("Authorization")
            return web.json_response({})

        servers = []
        for _ in range(2):
            app = web.Application()
            app.router.add_get("/{rest:.*}", hear)
            servers.append(TestServer(app))
        async with servers[0] as own, servers[1] as other:
            client = _http_client(str(own.make_url("/")), {"Authorization": f"Bearer {TOKEN}"})
            async with client as http:
                await http.get(str(own.make_url("/own")))
                await http.get(str(own.make_url("/alias")).replace("127.0.0.1", "localhost"))
                await http.get(str(other.make_url("/other")))

    asyncio.run(run())
    assert heard == {"/own": f"Bearer {TOKEN}", "/alias": f"Bearer {TOKEN}", "/other": None}
