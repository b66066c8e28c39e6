"""The HTTP side of all pages: the data of runs, and the desk where people answer conversations.

    GET /                          the page
    GET /api/runs                  the runs
    GET /api/runs/0/overview       a run's results in tables
    GET /api/runs/0/curves         metrics over steps: ?name=reward/mean&axis=time&smooth=0.9
    GET /api/runs/0/trajectories   a page of the table: ?min_reward=1&split=train&sort=reward&offset=100
    GET /api/runs/0/trajectory     one trajectory: ?id=g5/2&step=12&split=train
    GET /api/runs/0/advantage      how its advantage was computed: ?id=g5/2&step=12&split=train
    GET /api/runs/0/export         the rows of the table as a file: ?format=parquet&min_reward=1
    POST /api/runs/0/label         {"id": "g5/2", "step": 12, "split": "train", "label": "hack", "note": ""}
    GET /api/waiting               the conversations that wait at the desk, oldest first
    POST /api/answer               {"ticket": "3f…", "text": "And for four?", "is_end": false, "score": null}

The viewer only reads runs, and writes only their labels. Text of models and environments never becomes markup.
`viewer/pages.py` serves the page and its static files.
"""

from __future__ import annotations

import asyncio
import logging
import math
import tempfile
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import anyio
import anyio.to_thread
from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import FileResponse, Response, StreamingResponse
from starlette.background import BackgroundTask

from polyturn.core.errors import one_line
from polyturn.interactions.person import HumanQueue, HumanReply
from polyturn.serving.auth import ServerRules
from polyturn.serving.body import json_object
from polyturn.store.parquet_store import write_rows
from polyturn.store.stored_run import StoredRun
from polyturn.viewer.curves import Window
from polyturn.viewer.filters import as_jsonl
from polyturn.viewer.highlights import NUM_HIGHLIGHTS
from polyturn.viewer.pages import JSONResponse, page_app
from polyturn.viewer.run_view import RunView
from polyturn.viewer.trajectory_page import plain

logger = logging.getLogger(__name__)
T = TypeVar("T")

MAX_BODY_BYTES = 1 << 20
_PAGING = ("sort", "desc", "offset", "limit", "format")
MAX_LIMIT = 1000
MAX_QUERIES = 2
"""Largest number of concurrent SQL conditions, searches and exports; each may need a gigabyte."""
WATCH_S = 0.2
"""Seconds between two checks that the client of a query is still connected."""


def create_app(
    runs: Sequence[RunView],
    *,
    appeared: Callable[[], Iterable[RunView]] = tuple,
    desk: HumanQueue | None = None,
    rules: ServerRules | None = None,
) -> FastAPI:
    """Return the FastAPI application of the viewer.

    Args:
        runs: The runs to show, in this order.
        appeared: Returns the runs that began since its last call; they are shown after the others.
        desk: The desk with conversations that wait for a person; None if there is none.
        rules: Access rules of every request; a token in `?token=` is moved into a cookie.
    """
    app = page_app(
        "polyturn viewer",
        cookie="polyturn_viewer" if runs else "polyturn_desk",
        rules=rules or ServerRules(max_body_bytes=MAX_BODY_BYTES),
    )

    runs, lock = list(runs), threading.Lock()

    def view(number: int) -> RunView:
        if not 0 <= number < len(runs):
            raise HTTPException(404, f"there is no run {number}; there are {len(runs)}")
        return runs[number]

    @app.get("/api/runs")
    def all_runs() -> list[dict[str, Any]]:
        with lock:
            runs.extend(appeared())
        return [{"index": i, **_summary(run)} for i, run in enumerate(runs)]

    _show_runs(app, view)
    _show_trajectories(app, view)
    _let_people_answer(app, desk)
    return app


def _show_runs(app: FastAPI, view: Callable[[int], RunView]) -> None:
    """Add the paths of a run's charts and configuration."""

    @app.get("/api/runs/{number}/metrics")
    def metrics(number: int) -> dict[str, Any]:
        return view(number).metrics()

    @app.get("/api/runs/{number}/curves")
    def curves(number: int, request: Request) -> Response:
        params = request.query_params
        low, high = _real(params, "low", -math.inf), _real(params, "high", math.inf)
        window = Window(params.get("axis", "step"), low, high, _real(params, "smooth", 0.0))
        return JSONResponse(view(number).curves(params.getlist("name"), window))

    @app.get("/api/runs/{number}/overview")
    def overview(number: int) -> Response:
        return JSONResponse(view(number).overview())

    @app.get("/api/runs/{number}/distributions")
    def distributions(number: int, split: str = "train") -> Response:
        return JSONResponse(view(number).distributions(split))

    @app.get("/api/runs/{number}/highlights")
    def highlights(number: int) -> Response:
        return JSONResponse(view(number).highlights(NUM_HIGHLIGHTS))

    @app.get("/api/runs/{number}/config")
    def config(number: int) -> Response:
        return JSONResponse(view(number).config())


def _let_people_answer(app: FastAPI, desk: HumanQueue | None) -> None:
    """Add the paths of the desk; without a desk, only the path that reports whether there is one."""

    @app.get("/api/desk")
    def has_desk() -> bool:
        return desk is not None

    if desk is None:
        return

    @app.get("/api/waiting")
    def waiting() -> Response:
        return JSONResponse(plain(desk.waiting()))

    @app.post("/api/answer")
    async def answer(request: Request) -> Response:
        body = await json_object(request)
        desk.answer(str(body.get("ticket", "")), HumanReply.of(body))
        return JSONResponse({})


def _show_trajectories(app: FastAPI, view: Callable[[int], RunView]) -> None:
    """Add the paths for the table, groups, timeline and pages of trajectories."""
    queries = anyio.CapacityLimiter(MAX_QUERIES)

    @app.get("/api/runs/{number}/trajectories")
    async def trajectories(number: int, request: Request) -> Response:
        params = dict(request.query_params)
        run, offset, limit = view(number), _whole(params, "offset", 0), min(_whole(params, "limit", 100), MAX_LIMIT)

        def page(stop: threading.Event) -> dict[str, Any]:
            return run.page(
                {k: v for k, v in params.items() if k not in _PAGING},
                sort=params.get("sort", ""),
                descending=params.get("desc") == "1",
                offset=offset,
                limit=limit,
                stop=stop,
            )

        return JSONResponse(
            await _while_waited_for(request, page, queries if params.get("where") or params.get("text") else None)
        )

    @app.get("/api/runs/{number}/export")
    async def export(number: int, request: Request) -> Response:
        params = dict(request.query_params)
        run, kind = view(number), params.get("format", "jsonl")
        if kind not in _EXPORTS:
            raise HTTPException(422, f"the format is {kind!r}; it must be one of {', '.join(_EXPORTS)}")
        wanted = {k: v for k, v in params.items() if k not in _PAGING}
        return await _while_waited_for(request, lambda stop: _file_of(run.export(wanted, stop=stop), kind), queries)

    @app.post("/api/runs/{number}/label")
    async def label(number: int, request: Request) -> Response:
        params = await json_object(request)
        return JSONResponse(await anyio.to_thread.run_sync(view(number).label, params))

    @app.get("/api/runs/{number}/groups")
    def groups(number: int, request: Request) -> Response:
        params = dict(request.query_params)
        wanted = {k: v for k, v in params.items() if k not in _PAGING}
        limit = min(_whole(params, "limit", 100), MAX_LIMIT)
        return JSONResponse(view(number).groups(wanted, offset=_whole(params, "offset", 0), limit=limit))

    @app.get("/api/runs/{number}/timeline")
    def timeline(number: int, step: int | None = None, split: str = "train") -> Response:
        return JSONResponse(view(number).timeline(step=step, split=split))

    @app.get("/api/runs/{number}/trajectory")
    def trajectory(number: int, id: str, request: Request, step: int | None = None, split: str | None = None) -> Response:
        params = dict(request.query_params)
        segment, start = _whole(params, "segment", 0), _whole(params, "start", 0)
        return JSONResponse(view(number).trajectory(id, step=step, split=split, segment=segment, start=start))

    @app.get("/api/runs/{number}/advantage")
    def advantage(number: int, id: str, step: int | None = None, split: str | None = None) -> Response:
        return JSONResponse(view(number).advantage(id, step=step, split=split))


_EXPORTS = {"jsonl": "application/jsonl", "parquet": "application/vnd.apache.parquet"}


def _file_of(chosen: StoredRun, kind: str) -> Response:
    """Return trajectories as a file download."""
    headers = {"Content-Disposition": f'attachment; filename="trajectories.{kind}"'}
    if kind == "jsonl":
        return StreamingResponse(as_jsonl(chosen), media_type=_EXPORTS[kind], headers=headers)
    folder = tempfile.TemporaryDirectory()
    path = Path(folder.name) / "trajectories.parquet"
    write_rows(path, chosen.records())
    return FileResponse(path, media_type=_EXPORTS[kind], headers=headers, background=BackgroundTask(folder.cleanup))


def _summary(run: RunView) -> dict[str, Any]:
    """Return a run's row in the list; an error in one run does not affect the others."""
    try:
        return run.summary()
    except Exception as problem:
        logger.exception("the run in %s cannot be shown", run.folder)
        return run.unreadable(one_line(problem))


async def _while_waited_for(
    request: Request, work: Callable[[threading.Event], T], limiter: anyio.CapacityLimiter | None
) -> T:
    """Run `work` in a thread and return its result; its event is set when the client disconnects."""
    stop = threading.Event()

    async def watch() -> None:
        while not await request.is_disconnected():  # noqa: ASYNC110  the server has no event for this
            await asyncio.sleep(WATCH_S)
        stop.set()

    watcher = asyncio.create_task(watch())
    try:
        return await anyio.to_thread.run_sync(work, stop, limiter=limiter)
    finally:
        stop.set()
        watcher.cancel()


def _real(params: Mapping[str, str], name: str, default: float) -> float:
    try:
        value = float(params.get(name, default))
    except ValueError:
        value = math.nan
    if math.isnan(value):
        raise HTTPException(422, f"{name} is {params[name]!r}; use a number")
    return value


def _whole(params: dict[str, str], name: str, default: int) -> int:
    value = params.get(name, str(default))
    if not value.isdecimal() or len(value) > 15:
        raise HTTPException(422, f"{name} is {value[:40]!r}; use a whole number of at least 0 with at most 15 digits")
    return int(value)
