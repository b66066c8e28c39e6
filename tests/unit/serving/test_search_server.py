"""The search server speaks Search-R1's protocol over a real socket, and answers as an index in process does."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from polyturn.cli.listening import ServeOptions
from polyturn.cli.serve_services import serve_search
from polyturn.core.errors import ConfigError
from polyturn.retrieval.index import SearchIndex, build_index
from polyturn.retrieval.passages import Passage
from polyturn.retrieval.searcher import Searcher
from polyturn.serving.auth import ServerRules
from polyturn.serving.listen import bind, serving
from polyturn.serving.search import create_app
from polyturn.tools.registry import initialize_tools_from_config
from support.refusals import refuses

PASSAGES = [Passage(id=name, contents=f"{name}\n{name} is a city in {land}.") for name, land in
            (("Oslo", "Norway"), ("Rome", "Italy"), ("Bergen", "Norway"))]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("served") / "index"
    build_index(PASSAGES, path)
    return path


@contextlib.asynccontextmanager
async def served(folder: Path, **rules: Any) -> AsyncIterator[str]:
    given = ServerRules(**{"max_body_bytes": 4096, **rules})
    bound = bind("127.0.0.1", 0)
    async with serving(create_app(Searcher(SearchIndex.open(folder)), topk=1, rules=given), given, bound, lifespan="on"):
        yield f"http://127.0.0.1:{bound.getsockname()[1]}"


async def post(url: str, body: Any, **headers: str) -> tuple[int, Any]:
    async with aiohttp.ClientSession() as session:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with session.post(f"{url}/retrieve", data=data, headers=headers) as response:
            return response.status, await response.json(content_type=None)


async def test_each_query_has_its_documents_and_scores(folder: Path):
    async with served(folder) as url:
        status, reply = await post(url, {"queries": ["cities in Norway", "zebra"], "topk": 2, "return_scores": True})
        assert status == 200
        first, nothing = reply["result"]
        assert nothing == []
        assert [sorted(hit) for hit in first] == [["document", "score"]] * 2
        assert {hit["document"]["id"] for hit in first} == {"Oslo", "Bergen"}
        assert first[0]["document"]["contents"].startswith(("Oslo\n", "Bergen\n"))
        status, reply = await post(url, {"queries": ["Rome"]})
        assert (status, reply) == (200, {"result": [[{"id": "Rome", "contents": "Rome\nRome is a city in Italy."}]]})


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "queries"),
        ({"queries": []}, "queries"),
        ({"queries": "rome"}, "queries"),
        ({"queries": [1]}, "queries"),
        ({"queries": ["x"] * 257}, "256 or fewer"),
        ({"queries": ["x"], "topk": 0}, "topk is 0"),
        ({"queries": ["x"], "topk": True}, "topk is True"),
        ({"queries": ["x"], "topk": 10**9}, "topk is 1000000000"),
        ({"queries": ["x"], "return_scores": "yes"}, "return_scores is 'yes'"),
    ],
)
async def test_wrong_request_is_refused_by_name(folder: Path, body: Any, message: str):
    async with served(folder) as url:
        status, reply = await post(url, body)
        assert (status, message in json.dumps(reply)) == (422, True)
        assert (await post(url, {"queries": ["Rome"]}))[0] == 200


async def test_tool_reads_the_same_in_process_and_from_the_server(folder: Path):
    here = make_tool({"index": folder.name, "topk": 2}, base=folder.parent)
    async with served(folder, token="a-token-nobody-guesses") as url:
        address = {"retrieval_service_url": f"{url}/retrieve", "token": "a-token-nobody-guesses"}
        there = make_tool({**address, "topk": 2})
        for queries in (["cities in Norway", "Rome"], ["zebra"], ["zebra", "Oslo"], [7], "Rome", []):
            assert await call(here, queries) == await call(there, queries)
    text, metrics = await call(here, ["Rome"])
    assert json.loads(text)["result"].startswith("Doc 1 (Title: Rome)\nRome is a city in Italy.")
    assert metrics["total_results"] == 1 and metrics["failed"] == 0.0


async def test_one_index_serves_every_episode(folder: Path):
    tool = make_tool({"index": str(folder)})
    ids = [(await tool.create())[0] for _ in range(50)]
    replies = await asyncio.gather(*(tool.execute(i, {"query_list": [f"{PASSAGES[n % 3].id}"]}) for n, i in enumerate(ids)))
    assert all(PASSAGES[n % 3].id in str(reply[0].text) for n, reply in enumerate(replies))
    assert tool.num_connected == 50
    for instance_id in ids:
        await tool.release(instance_id)
    assert tool.num_connected == 0


def test_command_refuses_an_open_address_and_a_missing_index(tmp_path: Path, folder: Path):
    refuses(lambda: serve_search(ServeOptions(host="0.0.0.0"), folder), ConfigError, "without a token")
    refuses(lambda: serve_search(ServeOptions(), tmp_path / "missing"), ConfigError, "there is nothing at")


def make_tool(config: dict[str, Any], *, base: Path | None = None) -> Any:
    file = {"tools": [{"class_name": "polyturn.tools.search.SearchTool", "config": config}]}
    return initialize_tools_from_config(file, base=base)[0]


async def call(tool: Any, queries: Any) -> tuple[str, dict[str, Any]]:
    instance_id, _ = await tool.create()
    try:
        response, _, metrics = await tool.execute(instance_id, {"query_list": queries})
        return str(response.text), metrics
    finally:
        await tool.release(instance_id)
