"""A search server in the protocol of Search-R1's retrieval server, for SearchTool.

    POST /retrieve  {"queries": ["capital of norway"], "topk": 3, "return_scores": true}
    ->  {"result": [[{"document": {"id": "7", "contents": "Oslo\\nOslo is …"}, "score": 4.2}, …]]}      one list per query

Without `return_scores`, a list has the documents only. Without `topk`, the server's own default applies. A query without a
match gets an empty list.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated, Any

from pydantic import Field
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request

from polyturn.retrieval.embedders import EmbeddingError
from polyturn.retrieval.searcher import Searcher, documents
from polyturn.serving.auth import ServerRules, json_app
from polyturn.serving.body import Body, read_body

MAX_BODY_BYTES = 1 << 20


class Queries(Body):
    """A request to `/retrieve`."""

    queries: list[Annotated[str, Field(max_length=4096)]] = Field(min_length=1, max_length=256, description="texts")
    topk: Annotated[int, Field(ge=1, le=1000)] | None = None
    return_scores: bool | None = None


def create_app(
    searcher: Searcher, *, topk: int = 3, deadline_s: float = 30.0, rules: ServerRules | None = None
) -> Starlette:
    """Return the application of a search server.

    Args:
        searcher: Answers the queries.
        topk: Passages per query if the request does not name a number.
        deadline_s: Seconds that a request may take.
        rules: Access rules of every request.
    """

    @asynccontextmanager
    async def while_up(app: Starlette) -> AsyncIterator[None]:
        searcher.open()
        yield
        await searcher.close()

    async def health(request: Request) -> dict[str, Any]:
        return {"status": "ok", "passages": len(searcher.index), "mode": searcher.mode.value}

    async def retrieve(request: Request) -> dict[str, Any]:
        body = await read_body(request, Queries)
        try:
            async with asyncio.timeout(deadline_s):
                results = await searcher.search(body.queries, topk=topk if body.topk is None else body.topk)
        except TimeoutError:
            raise HTTPException(503, f"the search took longer than {deadline_s:g} s; send fewer queries at once") from None
        except EmbeddingError as problem:
            raise HTTPException(502, str(problem)) from problem
        return {"result": [documents(hits, with_scores=bool(body.return_scores)) for hits in results]}

    handlers = {"GET /health": health, "POST /retrieve": retrieve}
    return json_app(handlers, rules or ServerRules(max_body_bytes=MAX_BODY_BYTES), lifespan=while_up)
