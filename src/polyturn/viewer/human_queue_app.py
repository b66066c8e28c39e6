"""The desk's HTTP side: a page on which people answer the conversations that wait for them.

    GET  /               the page
    GET  /api/waiting    the conversations that wait, the longest first
    POST /api/answer     {"ticket": "3f…", "text": "And for four?", "is_end": false, "score": null}

What models wrote is data, and who may answer is decided as for all pages (`viewer/pages.py`): this machine, or a token.
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request

from polyturn.interactions.human_queue import MAX_ANSWER_CHARS, HumanQueue, HumanReply
from polyturn.serving.guard import json_object
from polyturn.serving.rules import ServerRules
from polyturn.viewer.pages import page_app

MAX_BODY_BYTES = 8 * MAX_ANSWER_CHARS


def create_desk_app(desk: HumanQueue, *, rules: ServerRules | None = None) -> FastAPI:
    """Return the application.

    Args:
        desk: Where conversations wait.
        rules: What is demanded of every request; the token may come as `?token=` once and is kept in a cookie then.
    """
    app = page_app(
        "polyturn desk",
        page="desk.html",
        cookie="polyturn_desk",
        rules=rules or ServerRules(max_body_bytes=MAX_BODY_BYTES),
    )

    @app.get("/api/waiting")
    def waiting() -> list[dict[str, Any]]:
        return desk.waiting()

    @app.post("/api/answer")
    async def answer(request: Request) -> dict[str, Any]:
        given = await json_object(request)
        desk.answer(str(given.get("ticket", "")), HumanReply.read(given))
        return {}

    return app
