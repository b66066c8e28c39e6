"""The parts of the viewer's application without data: static files, headers, access rules and error messages.

    GET /                the page           GET /static/{name}    its scripts and styles
    PolyturnError        422 {"detail": "there is no trajectory 'g9/9'; …"}

Text from environments is never inserted as HTML, and the content security policy allows only the pages' own scripts. Access
is decided by the rules that all servers share (`serving/auth.py`): on a loopback address, programs on this machine have
access; on other addresses, clients with the token, which is part of the link printed at the start.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import starlette.responses
from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, Response
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from polyturn.core.errors import PolyturnError
from polyturn.serving.auth import ServerRules, guarded

STATIC = Path(__file__).parent / "static"
_TYPES = {".js": "text/javascript", ".css": "text/css"}
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


def page_app(title: str, *, cookie: str, rules: ServerRules) -> FastAPI:
    """Return an application that serves a page and its static files, without data.

    Args:
        title: The application's title.
        cookie: The name of the cookie for the token, which may be passed as `?token=` once.
        rules: Access rules of every request.
    """
    app = FastAPI(default_response_class=JSONResponse, title=title, docs_url=None, redoc_url=None, openapi_url=None)
    files = {file.name for file in STATIC.iterdir() if file.suffix in _TYPES}
    guarded(app, dataclasses.replace(rules, for_browsers=True, cookie=cookie))

    app.add_middleware(_WithHeaders)

    @app.exception_handler(PolyturnError)
    async def refused(request: Request, problem: PolyturnError) -> Response:
        return JSONResponse({"detail": " ".join(str(problem).split())}, 422)

    @app.exception_handler(RequestValidationError)
    async def misunderstood(request: Request, problem: RequestValidationError) -> Response:
        message = "; ".join(f"{'.'.join(map(str, one['loc'][1:]))}: {one['msg']}" for one in problem.errors())
        return JSONResponse({"detail": f"the request is invalid ({message})"}, 422)

    @app.get("/")
    def index() -> Response:
        return FileResponse(STATIC / "index.html", media_type="text/html")

    @app.get("/static/{name}")
    def static(name: str) -> Response:
        if name not in files:
            raise HTTPException(404, "there is no such file")
        return FileResponse(STATIC / name, media_type=_TYPES[Path(name).suffix])

    return app


class JSONResponse(starlette.responses.JSONResponse):
    """JSON in ASCII, which can carry lone surrogates; invalid bytes from an environment are recorded as such."""

    def render(self, content: Any) -> bytes:
        return json.dumps(content, allow_nan=False, separators=(",", ":")).encode()


class _WithHeaders:
    """Adds the headers to every answer."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(_HEADERS)
            await send(message)

        await self._app(scope, receive, with_headers)
