"""SearchTool asks a retrieval server in Search-R1's protocol; what goes wrong there is told apart."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from polyturn.core.errors import ConfigError
from polyturn.tools.executor import ToolBox
from polyturn.tools.search import SearchTool
from support.services import serve


def passages(asked: dict[str, Any], number: int) -> Any:
    return {
        "result": [[{"document": {"contents": f"{q}\nis known."}, "score": 0.5}] * asked["topk"] for q in asked["queries"]]
    }


async def ask(tool: SearchTool, parameters: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    instance_id, _ = await tool.create()
    try:
        response, reward, metrics = await tool.execute(instance_id, parameters)
        assert reward == 0.0
        return json.loads(str(response.text))["result"], metrics
    finally:
        await tool.release(instance_id)
        assert instance_id not in tool._instance_dict


async def test_every_query_is_answered_and_titles_are_shown() -> None:
    async with serve(passages) as server:
        tool = SearchTool({"retrieval_service_url": server.url, "topk": 2})
        text, metrics = await ask(tool, {"query_list": ["rome", "oslo"]})
    assert text == (
        "Doc 1 (Title: rome)\nis known.\n\nDoc 2 (Title: rome)\nis known.\n---\n"
        "Doc 1 (Title: oslo)\nis known.\n\nDoc 2 (Title: oslo)\nis known."
    )
    assert server.asked == [{"queries": ["rome", "oslo"], "topk": 2, "return_scores": True}]
    assert (metrics["query_count"], metrics["total_results"], metrics["status"], metrics["failed"]) == (2, 4, "success", 0.0)


async def test_an_answer_without_end_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polyturn.core.answers.MAX_ANSWER_BYTES", 1000)
    async with serve(lambda asked, number: {"result": ["x" * 100_000]}) as server:
        text, metrics = await ask(SearchTool({"retrieval_service_url": server.url}), {"query_list": ["rome"]})
    assert (text, metrics["status"]) == ("Search error: HTTP 200: the answer is larger than 1000 bytes", "api_error")
    assert len(server.asked) == 1


@pytest.mark.parametrize(
    ("reply", "status", "cause", "text"),
    [
        ({"result": []}, "no_results", None, "No search results found."),
        ({"result": [[]]}, "no_results", None, "No search results found."),
        ((400, "no such index"), "api_error", "refused", "Search error: HTTP 400: no such index"),
        ((500, "down"), "api_error", "server_error", "Search error: HTTP 500: down"),
        ("<html>", "api_error", "bad_reply", "Search error: the reply is no JSON: <html>"),
        ({"result": [[{"text": "?"}]]}, "processing_error", "bad_reply", "Search error: the service's reply cannot be read"),
    ],
)
async def test_failures_are_told_apart(reply: Any, status: str, cause: str | None, text: str) -> None:
    async with serve(lambda asked, number: reply) as server:
        tool = SearchTool({"retrieval_service_url": server.url, "max_retries": 2, "retry_delay": 0.01})
        said, metrics = await ask(tool, {"query_list": ["rome"]})
    assert said.startswith(text)
    assert (metrics["status"], metrics.get("cause")) == (status, cause)
    kinds = {None: None, "refused": "tool_error", "server_error": "exception", "bad_reply": "exception"}
    assert metrics.get("failure") == kinds[cause]
    assert len(server.asked) == (2 if cause == "server_error" else 1)


async def test_a_server_that_comes_back_is_asked_again() -> None:
    async with serve(lambda asked, number: (503, "") if number < 3 else passages(asked, number)) as server:
        tool = SearchTool({"retrieval_service_url": server.url, "retry_delay": 0.01})
        _, metrics = await ask(tool, {"query_list": ["rome"]})
    assert (metrics["status"], metrics["num_tries"]) == ("success", 3)


async def test_a_server_that_is_not_there_is_unreachable() -> None:
    async with serve(passages) as server:
        url = server.url
    said, metrics = await ask(SearchTool({"retrieval_service_url": url, "max_retries": 1}), {"query_list": ["rome"]})
    assert said.startswith("Search error: ClientConnectorError")
    assert (metrics["cause"], metrics["failure"]) == ("unreachable", "connection")


async def test_the_timeout_covers_the_whole_call_with_its_retries() -> None:
    async def late(asked: dict[str, Any], number: int) -> Any:
        await asyncio.sleep(3600)

    async with serve(late) as server:
        said, metrics = await ask(
            SearchTool({"retrieval_service_url": server.url, "timeout": 0.2}), {"query_list": ["rome"]}
        )
    assert (said, metrics["status"]) == ("Search error: no answer within 0.2 s", "timeout")
    async with serve(lambda asked, number: (503, "busy")) as server:
        said, metrics = await ask(
            SearchTool({"retrieval_service_url": server.url, "timeout": 0.2, "retry_delay": 0.05}), {"query_list": ["rome"]}
        )
    assert "no answer within 0.2 s; the last try ended with: HTTP 503: busy" in said


@pytest.mark.parametrize("parameters", [{}, {"query_list": []}, {"query_list": "rome"}])
async def test_parameters_that_do_not_fit_are_the_models_to_mend(parameters: dict[str, Any]) -> None:
    text, _ = await ask(SearchTool({"retrieval_service_url": "http://127.0.0.1:9/"}), parameters)
    assert text == "Error: 'query_list' is missing, empty, or not a list in parameters."


async def test_each_tool_has_a_limit_of_its_own() -> None:
    async def slow(asked: dict[str, Any], number: int) -> Any:
        await asyncio.sleep(0.02)
        return passages(asked, number)

    async with serve(slow) as narrow, serve(slow) as wide:
        tools = [
            SearchTool({"retrieval_service_url": narrow.url, "rate_limit": 2, "num_workers": 50}),
            SearchTool({"retrieval_service_url": wide.url, "rate_limit": 2, "enable_global_rate_limit": False}),
        ]
        async with asyncio.TaskGroup() as group:
            for tool in tools:
                for _ in range(8):
                    group.create_task(ask(tool, {"query_list": ["rome"]}))
    assert narrow.most_at_once == 2
    assert wide.most_at_once > 2


def test_a_tool_serves_one_event_loop_after_another() -> None:
    async def main(tool: SearchTool | None) -> SearchTool:
        async with serve(passages) as server:
            tool = SearchTool({"retrieval_service_url": server.url}) if tool is None else tool
            tool._source.service.url = server.url
            assert (await ask(tool, {"query_list": ["rome"]}))[1]["status"] == "success"
            return tool

    tool = asyncio.run(main(None))
    asyncio.run(main(tool))


def test_a_config_that_cannot_work_is_refused() -> None:
    with pytest.raises(ConfigError, match="Configuration must include 'retrieval_service_url'"):
        SearchTool({})
    with pytest.raises(ConfigError, match="must start with http"):
        SearchTool({"retrieval_service_url": "localhost:8000"})
    with pytest.raises(ConfigError, match="each must be positive"):
        SearchTool({"retrieval_service_url": "http://a/", "timeout": 0})


def test_the_schema_keeps_every_keyword() -> None:
    (shown,) = ToolBox([SearchTool({"retrieval_service_url": "http://a/"})]).schemas.values()
    assert shown["function"]["parameters"]["properties"]["query_list"]["items"] == {"type": "string"}
    assert shown["function"]["parameters"]["properties"]["query_list"]["minItems"] == 1
