"""SearchTool: finds passages in a local index, or through a server with the protocol of Search-R1.

    config: {index: wiki.index, topk: 3}                        an index that `polyturn data index` made, searched in process
    config: {retrieval_service_url: http://…/retrieve, topk: 3}

    POST {"queries": ["…"], "topk": 3, "return_scores": true}
    <-   {"result": [[{"document": {"contents": "title\\ntext"}, "score": 0.7}, …]]}        one list per query

Both return {"result": "Doc 1 (Title: title)\\ntext\\n\\nDoc 2 …"} to the model, with a line of dashes between queries. The
metric `status` is the outcome of the call, `cause` the reason for a failure of the service, and `failed` is 1.0 for a failed
call, else 0.0.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self
from uuid import uuid4

from pydantic import model_validator

from polyturn.infra.settings import AtLeastOne, Seconds
from polyturn.retrieval.embedders import EmbeddingError
from polyturn.retrieval.searcher import Searcher, documents
from polyturn.tools.base import BaseTool
from polyturn.tools.failures import ToolFailure
from polyturn.tools.http_service import HttpService, ServiceReply, ServiceSettings
from polyturn.tools.results import FAILURE
from polyturn.tools.schema import OpenAIFunctionToolSchema, ToolResponse

BAD_QUERIES = "Error: 'query_list' is missing, empty, or not a list in parameters."
NO_RESULTS = "No search results found."


class SearchSettings(ServiceSettings):
    """The index or the server, and the limits of a call."""

    index: str | None = None
    """The folder of an index, relative to the tool file."""
    embed: Any = None
    mode: str | None = None
    """How the index ranks passages: bm25, dense or hybrid; see `retrieval/searcher.py`."""
    base_folder: str = "."
    retrieval_service_url: str | None = None
    topk: AtLeastOne = 3
    timeout: Seconds = 30.0
    """Seconds of a whole call, retries included."""
    num_workers: AtLeastOne = 120
    rate_limit: AtLeastOne = 120
    max_retries: AtLeastOne = 10

    @model_validator(mode="after")
    def _has_one_source(self) -> Self:
        if bool(self.retrieval_service_url) == bool(self.index):
            raise ValueError(
                "Configuration must include 'retrieval_service_url', where the retrieval service is, or 'index', the folder "
                "of an index on this machine, and not both"
            )
        return self


class SearchTool(BaseTool):
    """Searches with a list of queries. Config: `SearchSettings`; a subclass may read further keys."""

    checks_own_arguments = True
    stateless = True
    """True, because no answer depends on the state of the episode."""
    base_key: ClassVar[str | None] = "base_folder"

    def __init__(self, config: dict[str, Any], tool_schema: Any = None) -> None:
        super().__init__(config, tool_schema)
        settings = SearchSettings.read(config, who="the search tool", ignores_others=type(self) is not SearchTool)
        self.retrieval_service_url = settings.retrieval_service_url
        self.topk = settings.topk
        self.timeout = settings.timeout
        self._source: _Service | _Index
        if url := settings.retrieval_service_url:
            self._source = _Service(settings.service(url, timeout_s=self.timeout))
        else:
            self._source = _Index(Searcher.of_config(config, base=Path(settings.base_folder)), self.timeout)
        self._instance_dict: dict[str, dict[str, Any]] = {}

    @property
    def num_connected(self) -> int:
        """Number of episodes that keep the tool's connections open."""
        return self._source.num_users

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        """Return the default schema, for a tool file without one."""
        queries = {
            "type": "array",
            "items": {"type": "string"},
            "minItems": 1,
            "description": "Whole questions or phrases to look up.",
        }
        return OpenAIFunctionToolSchema.of("search", "Search for passages that answer each query.", {"query_list": queries})

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse]:
        """Start an instance for one episode."""
        instance_id = str(uuid4()) if instance_id is None else instance_id
        self._source.open()
        self._instance_dict[instance_id] = {}
        return instance_id, ToolResponse()

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        """Search for every query of `query_list`."""
        queries = parameters.get("query_list")
        if not isinstance(queries, list) or not queries:
            return _result(BAD_QUERIES), 0.0, {"status": "bad_parameters", "failed": 1.0, FAILURE: ToolFailure.SCHEMA.value}
        metrics: dict[str, Any] = {"query_count": len(queries), "total_results": 0, "api_request_error": None, "failed": 0.0}
        reply = await self._source.ask([str(query) for query in queries], topk=self.topk)
        metrics["num_tries"] = reply.num_tries
        if reply.status != "ok":
            status = "timeout" if reply.status == "timeout" else "api_error"
            metrics.update(status=status, cause=reply.status, api_request_error=reply.error, failed=1.0)
            metrics[FAILURE] = reply.failure
            return _result(f"Search error: {reply.error}"), 0.0, metrics
        try:
            results = result_lists(reply.data)
            text = "\n---\n".join(passages_text(docs) for docs in results) if any(results) else NO_RESULTS
        except (KeyError, TypeError, ValueError) as problem:
            error = f"the service's reply cannot be read: {problem!r:.200}"
            metrics.update(status="processing_error", cause="bad_reply", api_request_error=error, failed=1.0)
            metrics[FAILURE] = ToolFailure.EXCEPTION.value
            return _result(f"Search error: {error}"), 0.0, metrics
        metrics["total_results"] = sum(map(len, results))
        metrics["status"] = "success" if metrics["total_results"] else "no_results"
        return _result(text), 0.0, metrics

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> None:
        """Return None: searching does not affect the reward."""

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """Drop the episode's state; raise KeyError for an id that was never created."""
        del self._instance_dict[instance_id]
        await self._source.close()


class _Service:
    """Searches through a server."""

    def __init__(self, service: HttpService) -> None:
        self.service = service
        self.open, self.close = self.service.open, self.service.close

    @property
    def num_users(self) -> int:
        return self.service.num_users

    async def ask(self, queries: list[str], *, topk: int) -> ServiceReply:
        return await self.service.post({"queries": queries, "topk": topk, "return_scores": True})


class _Index:
    """Searches in this process; all episodes share one index."""

    def __init__(self, searcher: Searcher, timeout_s: float) -> None:
        self._searcher = searcher
        self._timeout_s = timeout_s
        self.num_users = 0

    def open(self) -> None:
        self.num_users += 1
        self._searcher.open()

    async def close(self) -> None:
        self.num_users -= 1
        await self._searcher.close()

    async def ask(self, queries: list[str], *, topk: int) -> ServiceReply:
        try:
            async with asyncio.timeout(self._timeout_s):
                results = await self._searcher.search(queries, topk=topk)
        except TimeoutError:
            return ServiceReply(status="timeout", error=f"no answer within {self._timeout_s:g} s")
        except EmbeddingError as problem:
            return ServiceReply(status="unreachable", error=str(problem))
        return ServiceReply(status="ok", data={"result": [documents(hits) for hits in results]})


def _result(text: str) -> ToolResponse:
    return ToolResponse(text=json.dumps({"result": text}, ensure_ascii=False))


def result_lists(data: Any) -> list[list[Mapping[str, Any]]]:
    """Return the passages of each query in a service's answer.

    Raises:
        KeyError, ValueError: the answer has another format.
    """
    if not isinstance(data, Mapping):
        raise ValueError(f"it must be a mapping with 'result', not {data!r:.100}")
    results = data["result"] or []
    if not isinstance(results, list) or not all(isinstance(docs, list) for docs in results):
        raise ValueError(f"'result' must be a list of lists, not {results!r:.100}")
    return results


def passages_text(docs: Sequence[Mapping[str, Any]]) -> str:
    """Format passages as text; the first line of a passage's contents is its title."""
    out = []
    for number, doc in enumerate(docs, start=1):
        title, _, text = str(doc["document"]["contents"]).partition("\n")
        out.append(f"Doc {number} (Title: {title})\n{text}\n\n")
    return "".join(out).strip()
