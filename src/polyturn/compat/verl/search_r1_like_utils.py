"""verl.tools.utils.search_r1_like_utils: blocking functions that search for several queries in a service."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from polyturn.infra.aio import in_own_loop
from polyturn.tools.http_service import HttpService
from polyturn.tools.search import NO_RESULTS, passages_text, result_lists

DEFAULT_TIMEOUT = 30
MAX_RETRIES = 10
INITIAL_RETRY_DELAY = 1


def call_search_api(
    retrieval_service_url: str,
    query_list: Sequence[str],
    topk: int = 3,
    return_scores: bool = True,
    timeout: float = DEFAULT_TIMEOUT,
) -> tuple[Any, str | None]:
    """Return (answer, None), or (None, reason) if the service did not answer."""

    async def ask() -> Any:
        service = HttpService(
            retrieval_service_url,
            timeout_s=timeout,
            max_concurrent=1,
            max_tries=MAX_RETRIES,
            retry_delay_s=INITIAL_RETRY_DELAY,
        )
        service.open()
        try:
            return await service.post({"queries": list(query_list), "topk": topk, "return_scores": return_scores})
        finally:
            await service.close()

    reply = in_own_loop(ask)
    return (reply.data, None) if reply.status == "ok" else (None, f"API Call Failed: {reply.error}")


def perform_single_search_batch(
    retrieval_service_url: str,
    query_list: Sequence[str],
    topk: int = 3,
    concurrent_semaphore: AbstractContextManager[Any] | None = None,
    timeout: float = DEFAULT_TIMEOUT,
) -> tuple[str, dict[str, Any]]:
    """Return the passages of all queries as text for the model, and metadata of the search."""
    with contextlib.nullcontext() if concurrent_semaphore is None else concurrent_semaphore:
        answer, problem = call_search_api(retrieval_service_url, query_list, topk, True, timeout)
    known = {
        "query_count": len(query_list),
        "queries": list(query_list),
        "api_request_error": problem,
        "api_response": answer,
        "status": "api_error",
        "total_results": 0,
        "formatted_result": None,
    }
    if problem is not None:
        return _as_json(f"Search error: {problem}"), known
    try:
        results = result_lists(answer)
        text = "\n---\n".join(map(passages_text, results))
    except (KeyError, TypeError, ValueError) as wrong:
        return _as_json(f"Error processing search results: {wrong!r:.200}"), {**known, "status": "processing_error"}
    if not results:
        return _as_json(NO_RESULTS), {**known, "status": "no_results"}
    total = sum(map(len, results))
    return _as_json(text), {**known, "status": "success", "total_results": total, "formatted_result": text}


def _passages2string(retrieval_result: Sequence[Mapping[str, Any]]) -> str:
    return passages_text(retrieval_result)


def _as_json(text: str) -> str:
    return json.dumps({"result": text}, ensure_ascii=False)
