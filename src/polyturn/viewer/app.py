"""The viewer's HTTP side: pages that are three static files, and the data they show. It only reads.

    GET /                          the page
    GET /api/runs                  the runs
    GET /api/runs/0/trajectories   a page of the table: ?min_reward=1&split=train&sort=reward&offset=100
    GET /api/runs/0/trajectory     one: ?id=g5/2&step=12&split=train

What is asked for a page itself, its files and its rules are those of all pages (`viewer/pages.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response

from polyturn.serving.rules import ServerRules
from polyturn.viewer.pages import page_app
from polyturn.viewer.run_view import RunView

MAX_BODY_BYTES = 1 << 20
_PAGING = ("sort", "desc", "offset", "limit")
MAX_LIMIT = 1000


def create_app(runs: Sequence[RunView], *, rules: ServerRules | None = None) -> FastAPI:
    """Return the application.

    Args:
        runs: What is shown, in this order.
        rules: What is demanded of every request; the token may come as `?token=` once and is kept in a cookie then.
    """
    app = page_app(
        "polyturn viewer",
        page="index.html",
        files=("app.js", "charts.js", "pages.js", "style.css"),
        cookie="polyturn_viewer",
        rules=rules or ServerRules(max_body_bytes=MAX_BODY_BYTES),
    )

    def view(number: int) -> RunView:
        if not 0 <= number < len(runs):
            raise HTTPException(404, f"there is no run {number}; there are {len(runs)}")
        return runs[number]

    @app.get("/api/runs")
    def all_runs() -> list[dict[str, Any]]:
        return [{"index": i, **run.summary()} for i, run in enumerate(runs)]

    @app.get("/api/runs/{number}/metrics")
    def metrics(number: int, since: int = 0) -> dict[str, Any]:
        return view(number).metrics(max(0, since))

    @app.get("/api/runs/{number}/config")
    def config(number: int) -> Response:
        return PlainTextResponse(view(number).config())

    @app.get("/api/runs/{number}/trajectories")
    def trajectories(number: int, request: Request) -> Response:
        given = dict(request.query_params)
        found = view(number).page(
            {k: v for k, v in given.items() if k not in _PAGING},
            sort=given.get("sort", ""),
            descending=given.get("desc") == "1",
            offset=_whole(given, "offset", 0),
            limit=min(_whole(given, "limit", 100), MAX_LIMIT),
        )
        return JSONResponse(found)

    @app.get("/api/runs/{number}/groups")
    def groups(number: int, request: Request) -> Response:
        given = dict(request.query_params)
        wanted = {k: v for k, v in given.items() if k not in _PAGING}
        limit = min(_whole(given, "limit", 100), MAX_LIMIT)
        return JSONResponse(view(number).groups(wanted, offset=_whole(given, "offset", 0), limit=limit))

    @app.get("/api/runs/{number}/timeline")
    def timeline(number: int, step: int, split: str = "train") -> Response:
        return JSONResponse(view(number).timeline(step=step, split=split))

    @app.get("/api/runs/{number}/trajectory")
    def trajectory(number: int, id: str, step: int | None = None, split: str | None = None) -> Response:
        return JSONResponse(view(number).trajectory(id, step=step, split=split))

    return app


def _whole(given: dict[str, str], name: str, default: int) -> int:
    value = given.get(name, str(default))
    if not value.isdecimal():
        raise HTTPException(422, f"{name} is {value!r}; it must be a whole number of at least 0")
    return int(value)
