"""SearchTool and SandboxFusionTool ask a service over HTTP; the outcomes of a call are told apart."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from typing import Any

import pytest

from polyturn.core.errors import ConfigError
from polyturn.tools.http_service import HttpService
from polyturn.tools.options import ToolOptions
from polyturn.tools.python_sandbox import PythonSandbox
from polyturn.tools.sandbox import SandboxFusionTool
from polyturn.tools.search import SearchTool
from polyturn.tools.toolbox import Toolbox
from polyturn.tools.zoom import ImageZoomInTool
from support.refusals import refuses
from support.services import serve

TIMEOUT_S = 50


def search_tool(url: str, **config: Any) -> SearchTool:
    return SearchTool({"retrieval_service_url": url, "timeout": TIMEOUT_S, "retry_delay": 0.01, **config})


def sandbox_tool(url: str, **config: Any) -> SandboxFusionTool:
    return SandboxFusionTool({"sandbox_fusion_url": url, "max_retries": 1, **config})


async def ask(tool: Any, **parameters: Any) -> tuple[str, dict[str, Any]]:
    instance_id, _ = await tool.create()
    response, reward, metrics = await tool.execute(instance_id, parameters)
    assert not reward
    assert await tool.calc_reward(instance_id) is None
    await tool.release(instance_id)
    with pytest.raises(KeyError):
        await tool.release(instance_id)
    return str(response.text), metrics


async def search(tool: SearchTool, queries: Any = ("rome",)) -> tuple[str, dict[str, Any]]:
    text, metrics = await ask(tool, query_list=list(queries))
    return json.loads(text)["result"], metrics


# ---- search ---------------------------------------------------------------------------------------------------------


def passages(asked: dict[str, Any], number: int) -> Any:
    return {
        "result": [[{"document": {"contents": f"{q}\nis known."}, "score": 0.5}] * asked["topk"] for q in asked["queries"]]
    }


async def test_every_query_is_answered_with_titled_passages() -> None:
    async with serve(passages) as server:
        text, metrics = await search(search_tool(server.url, topk=2), ["rome", "oslo"])
    assert text == (
        "Doc 1 (Title: rome)\nis known.\n\nDoc 2 (Title: rome)\nis known.\n---\n"
        "Doc 1 (Title: oslo)\nis known.\n\nDoc 2 (Title: oslo)\nis known."
    )
    assert server.asked == [{"queries": ["rome", "oslo"], "topk": 2, "return_scores": True}]
    assert (metrics["query_count"], metrics["total_results"], metrics["status"], metrics["failed"]) == (2, 4, "success", 0.0)


@pytest.mark.parametrize(
    ("reply", "status", "cause", "text"),
    [
        ({"result": []}, "no_results", None, "No search results found."),
        ({"result": [[]]}, "no_results", None, "No search results found."),
        ((302, "see there"), "api_error", "refused", "Search error: HTTP 302: redirects are not followed"),
        ((400, "no such index"), "api_error", "refused", "Search error: HTTP 400: no such index"),
        ((500, "down"), "api_error", "server_error", "Search error: HTTP 500: down"),
        ("<html>", "api_error", "bad_reply", "Search error: the reply is not JSON: <html>"),
        ({"result": ["x" * 2000]}, "api_error", "bad_reply", "Search error: HTTP 200: the answer is larger than 1000 bytes"),
        ({"result": [[{"text": "?"}]]}, "processing_error", "bad_reply", "Search error: the service's reply cannot be read"),
    ],
)
async def test_search_failures_are_told_apart(
    reply: Any, status: str, cause: str | None, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("polyturn.infra.http.MAX_ANSWER_BYTES", 1000)
    async with serve(lambda asked, number: reply) as server:
        said, metrics = await search(search_tool(server.url, max_retries=2))
    assert said.startswith(text)
    assert (metrics["status"], metrics.get("cause")) == (status, cause)
    kinds = {None: None, "refused": "tool_error", "server_error": "exception", "bad_reply": "exception"}
    assert metrics.get("failure") == kinds[cause]
    assert len(server.asked) == (2 if cause == "server_error" else 1)


async def test_service_that_comes_back_is_asked_again() -> None:
    async with serve(lambda asked, number: (503, "") if number < 3 else passages(asked, number)) as server:
        _, metrics = await search(search_tool(server.url))
        url = server.url
    assert (metrics["status"], metrics["num_tries"]) == ("success", 3)
    _, metrics = await search(search_tool(url, max_retries=1))  # the server has gone
    assert (metrics["cause"], metrics["failure"]) == ("unreachable", "connection")


async def test_timeout_covers_a_call_with_its_retries() -> None:
    async def late(asked: dict[str, Any], number: int) -> Any:
        await asyncio.sleep(0 if number == 1 else 3600)
        return 503, "busy"

    async with serve(late) as server:
        service = HttpService(server.url, timeout_s=1.0, max_concurrent=1, retry_delay_s=0.01)
        service.open()
        reply = await service.post({})
        await service.close()
    assert (reply.status, reply.failure) == ("timeout", "timeout")


@pytest.mark.parametrize("parameters", [{}, {"query_list": []}, {"query_list": "rome"}])
async def test_wrong_queries_are_reported_to_the_model(parameters: dict[str, Any]) -> None:
    text, metrics = await ask(search_tool("http://127.0.0.1:9/"), **parameters)
    assert "query_list" in text
    assert metrics["failure"] == "schema"


async def test_rate_limit_bounds_the_calls_at_once() -> None:
    def answering(num: int) -> Any:
        meet = asyncio.Barrier(num)  # no call is answered before so many have come

        async def answer(asked: dict[str, Any], number: int) -> Any:
            await meet.wait()
            return passages(asked, number)

        return answer

    async with serve(answering(2)) as narrow, serve(answering(8)) as wide:
        tools = [
            search_tool(narrow.url, rate_limit=2, num_workers=50),
            search_tool(wide.url, rate_limit=2, enable_global_rate_limit=False),
        ]
        await asyncio.gather(*(search(tool) for tool in tools for _ in range(8)))
    assert (narrow.most_at_once, wide.most_at_once) == (2, 8)


def test_service_serves_one_event_loop_after_another() -> None:
    async def use() -> str:
        async with serve(passages) as server:
            service.url = server.url
            service.open()
            reply = await service.post({"queries": [], "topk": 1})
            await service.close()
            return reply.status

    service = HttpService("http://127.0.0.1/", timeout_s=TIMEOUT_S, max_concurrent=1)
    assert [asyncio.run(use()) for _ in range(2)] == ["ok", "ok"]


def test_schema_keeps_every_keyword() -> None:
    (shown,) = Toolbox([search_tool("http://a/")]).schemas.values()
    assert shown["function"]["parameters"]["properties"]["query_list"]["items"] == {"type": "string"}
    assert shown["function"]["parameters"]["properties"]["query_list"]["minItems"] == 1


@pytest.mark.parametrize(
    ("tool", "config", "message"),
    [
        (SearchTool, {}, "'retrieval_service_url'"),
        (SearchTool, {"retrieval_service_url": "http://a/", "index": "a"}, "not both"),
        (SearchTool, {"retrieval_service_url": "localhost:8000"}, "'localhost:8000'"),
        (SearchTool, {"retrieval_service_url": "http://a/", "timeout": 0}, "timeout is 0"),
        (SearchTool, {"retrieval_service_url": "http://a/", "topk": 0}, "topk is 0"),
        (SearchTool, {"retrieval_service_url": "http://a/", "top_k": 5}, "'topk'"),
        (SearchTool, {"retrieval_service_url": "http://a/", "token": 7}, "token"),
        (SandboxFusionTool, {}, "sandbox_fusion_url"),
        (SandboxFusionTool, {"sandbox_fusion_url": "http://a/", "default_timeuot": 5}, "'default_timeout'"),
        (ImageZoomInTool, {"num_worker": 5}, "'num_workers'"),
        (ImageZoomInTool, {"rate_limit": 0}, "rate_limit is 0"),
    ],
)
def test_config_that_cannot_work_is_refused(tool: Any, config: dict[str, Any], message: str) -> None:
    refuses(lambda: tool(config), ConfigError, message)


@pytest.mark.parametrize("tool", [SearchTool, SandboxFusionTool, ImageZoomInTool])
def test_subclass_may_read_further_keys(tool: Any) -> None:
    url = {SearchTool: "retrieval_service_url", SandboxFusionTool: "sandbox_fusion_url"}.get(tool)
    config = {"rate_limit": 7, "enable_global_rate_limit": True, "type": "native", **({url: "http://a/"} if url else {})}
    assert type("Mine", (tool,), {})({**config, "mine": 1}).config["mine"] == 1
    refuses(lambda: tool({**config, "mine": 1}), ConfigError, "'mine'")


# ---- sandbox --------------------------------------------------------------------------------------------------------


async def run_python(asked: dict[str, Any], number: int) -> Any:
    """Answer as a sandbox does, in the protocol of SandboxFusion."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", asked["code"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        out, err = await asyncio.wait_for(process.communicate(), asked["run_timeout"])
        status = "Finished"
    except TimeoutError:
        process.kill()
        await process.wait()
        out, err, status = b"", b"", "TimeLimitExceeded"
    run = {"status": status, "return_code": process.returncode, "stdout": out.decode(), "stderr": err.decode()}
    return {"status": "Success" if process.returncode == 0 else "Failed", "compile_result": None, "run_result": run}


@pytest.mark.parametrize(
    ("config", "code", "status", "text"),
    [
        ({}, "print(6 * 7)", "finished", "42\n"),
        ({"enable_global_rate_limit": False}, "print(6 * 7)", "finished", "42\n"),
        ({}, "print(1); 1 / 0", "code_error", "ZeroDivisionError"),
        ({"default_timeout": 0.3}, "while True: pass", "code_timeout", "0.3 s"),
    ],
)
async def test_code_runs_in_the_service(config: dict[str, Any], code: str, status: str, text: str) -> None:
    async with serve(run_python) as server:
        said, metrics = await ask(sandbox_tool(server.url, **config), code=code, timeout=99, language="python")
    assert (metrics["status"], metrics["failed"]) == (status, float(status == "code_timeout"))
    assert "failure" not in metrics or metrics["failure"] is None, "the service has not failed"
    assert text in said
    (asked,) = server.asked
    assert asked["language"] == "python"
    assert asked["run_timeout"] == config.get("default_timeout", 30), "what the model asks for does not exceed the default"
    assert asked["memory_limit_MB"] == 1024


@pytest.mark.parametrize(
    ("reply", "status", "text"),
    [
        ({"status": "SandboxError", "message": "no worker"}, "sandbox_error", "no worker"),
        (
            {"status": "Failed", "compile_result": {"status": "Error", "stderr": "line 1: ;"}, "run_result": None},
            "compile_error",
            "line 1: ;",
        ),
        (
            {"status": "Success", "run_result": {"status": "Finished", "return_code": 0, "stdout": ""}},
            "finished",
            "The code ran and printed nothing.",
        ),
        ((500, "gone"), "server_error", "HTTP 500: gone"),
        ((401, "who?"), "refused", "HTTP 401: who?"),
    ],
)
async def test_ends_of_a_run_are_told_apart(reply: Any, status: str, text: str) -> None:
    async with serve(lambda asked, number: reply) as server:
        said, metrics = await ask(sandbox_tool(server.url), code="x")
    assert metrics["status"] == status
    assert text in said


async def test_calls_wait_for_their_turn_outside_their_deadline() -> None:
    """Otherwise endless programs of some episodes would time out the calls of others, and open the tool's breaker."""

    async def answer(asked: dict[str, Any], number: int) -> Any:
        await asyncio.sleep(0.2)
        return {}

    async with serve(answer) as served:
        service = HttpService(served.url, timeout_s=TIMEOUT_S, max_concurrent=1)
        service.open()
        replies = await asyncio.gather(*(service.post({}) for _ in range(3)))
        await service.close()
    assert [reply.status for reply in replies] == ["ok"] * 3
    assert served.most_at_once == 1
    tools: list[Any] = [sandbox_tool("http://a/", num_workers=2)]
    tools.append(PythonSandbox({"num_workers": 2, "warm": 0, "allow_unsafe": True}))
    for tool in tools:
        assert tool.max_concurrency == 2
        assert Toolbox([tool]).concurrency.has_limit(tool.name), "so that the wait is the box's, and in no deadline"


def test_program_ends_before_the_tools_deadline() -> None:
    service, local = sandbox_tool("http://a/", default_timeout=60), PythonSandbox({"allow_unsafe": True, "timeout": 3600})
    Toolbox([service, local], ToolOptions(timeout_s=60))
    assert (2 * service.default_timeout, local.limits.timeout_s) == (45, 45), "a quarter is left to start a sandbox"


@pytest.mark.parametrize(("config", "num_warnings"), [({}, 0), ({"default_timeout": 30}, 1), ({"default_timeout": 10}, 0)])
def test_only_a_limit_of_the_config_is_warned_of(
    config: dict[str, Any], num_warnings: int, caplog: pytest.LogCaptureFixture
) -> None:
    sandbox_tool("http://a/", **config).fit_deadline(60)
    assert len(caplog.messages) == num_warnings
    assert all("default_timeout" in m and "rollout.tools.timeout_s" in m for m in caplog.messages)


# ---- credentials ----------------------------------------------------------------------------------------------------
