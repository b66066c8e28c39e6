"""A search server in the protocol of Search-R1's retrieval server, for SearchTool.

    POST /retrieve  {"queries": ["capital of norway"], "topk": 3, "return_scores": true}
    ->  {"result": [[{"document": {"id": "7", "contents": "Oslo\\nOslo is …"}, "score": 4.2}, …]]}      one list per query

Without `return_scores` a list holds the bare documents. Without `topk` the server's own default applies. A query without a
match gets an empty list.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, HTTPException, Request

from polyturn.retrieval.embedders import EmbeddingError
from polyturn.retrieval.searcher import Searcher, documents
from polyturn.serving.auth import ServerRules, guarded
from polyturn.serving.body import json_object

MAX_BODY_BYTES = 1 << 20
MAX_QUERIES = 256
MAX_QUERY_CHARS = 4096
MAX_TOPK = 1000


def create_app(searcher: Searcher, *, topk: int = 3, deadline_s: float = 30.0, rules: ServerRules | None = None) -> FastAPI:
    """Return the FastAPI application of a search server.

    Args:
        searcher: Answers the queries.
        topk: Passages per query if the request does not name a number.
        deadline_s: Seconds that a request may take.
        rules: Access rules of every request.
    """

    @asynccontextmanager
    async def while_up(app: FastAPI) -> AsyncIterator[None]:
        searcher.open()
        yield
        await searcher.close()

    app = FastAPI(title="polyturn search", docs_url=None, redoc_url=None, openapi_url=None, lifespan=while_up)
    guarded(app, rules or ServerRules(max_body_bytes=MAX_BODY_BYTES))

    @app.get("/health")
    async def health() -> dict[str, Any]:
        return {"status": "ok", "passages": len(searcher.index), "mode": searcher.mode.value}

    @app.post("/retrieve")
    async def retrieve(request: Request) -> dict[str, Any]:
        payload = await json_object(request)
        queries = read_queries(payload)
        limit, with_scores = _read_topk(payload, topk), payload.get("return_scores") or False
        if not isinstance(with_scores, bool):
            raise HTTPException(422, f"return_scores is {with_scores!r:.50}; use true or false")
        try:
            async with asyncio.timeout(deadline_s):
                results = await searcher.search(queries, topk=limit)
        except TimeoutError:
            raise HTTPException(503, f"the search took longer than {deadline_s:g} s; send fewer queries at once") from None
        except EmbeddingError as problem:
            raise HTTPException(502, str(problem)) from problem
        return {"result": [documents(hits, with_scores=with_scores) for hits in results]}

    return app


def read_queries(request: dict[str, Any]) -> list[str]:
    """Return the queries of a request.

    Raises:
        HTTPException: the queries are not texts, too many or too long.
    """
    queries = request.get("queries")
    if not isinstance(queries, list) or not queries or not all(isinstance(query, str) for query in queries):
        raise HTTPException(422, "queries must be a non-empty list of texts")
    if len(queries) > MAX_QUERIES:
        raise HTTPException(422, f"the request has {len(queries)} queries; at most {MAX_QUERIES} are allowed")
    longest = max(map(len, queries))
    if longest > MAX_QUERY_CHARS:
        raise HTTPException(422, f"a query has {longest} characters; at most {MAX_QUERY_CHARS} are allowed")
    return queries


def _read_topk(request: dict[str, Any], default: int) -> int:
    topk = request.get("topk")
    if topk is None:
        return default
    if isinstance(topk, bool) or not isinstance(topk, int) or not 1 <= topk <= MAX_TOPK:
        raise HTTPException(422, f"topk is {topk!r:.50}; use a whole number from 1 to {MAX_TOPK}")
    return topk
