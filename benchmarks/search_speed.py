"""Measures the time to build a search index and to answer a query, on random passages with real word frequencies.

    python benchmarks/search_speed.py [--passages 200000]

Passages have sixty words, drawn from the words of Python's documentation with their frequencies; queries have eight. Prints
one JSON line: seconds to build, milliseconds to open, milliseconds per query (median and 99th percentile) in the process and
through `POST /retrieve` with 16 clients, megabytes on disk.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import numpy as np
import uvicorn

from polyturn.infra.plugins import import_attr
from polyturn.retrieval.index import SearchIndex, build_index
from polyturn.retrieval.passages import Passage
from polyturn.retrieval.searcher import Searcher
from polyturn.serving.auth import ServerRules
from polyturn.serving.listen import bind, http_config
from polyturn.serving.search import create_app

DATA_SCRIPTS = Path(__file__).parents[1] / "examples" / "data"
NUM_CLIENTS = 16


def random_passages(count: int, vocabulary: list[str]) -> Iterator[Passage]:
    rng = random.Random("passages")
    for number in range(count):
        yield Passage(id=str(number), contents=f"passage {number}\n{' '.join(rng.choices(vocabulary, k=60))}")


async def over_http(index: SearchIndex, queries: list[str]) -> list[float]:
    rules = ServerRules()
    bound = bind("127.0.0.1", 0)
    server = uvicorn.Server(http_config(create_app(Searcher(index), rules=rules), rules, lifespan="on"))
    running = asyncio.create_task(server.serve(sockets=[bound]))
    while not server.started:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    times: list[float] = []
    left = iter(queries)
    url = f"http://127.0.0.1:{bound.getsockname()[1]}/retrieve"

    async def client(session: aiohttp.ClientSession) -> None:
        for query in left:
            began = time.perf_counter()
            async with session.post(url, json={"queries": [query], "topk": 3, "return_scores": True}) as response:
                assert response.status == 200
                await response.read()
            times.append(time.perf_counter() - began)

    async with aiohttp.ClientSession() as session, asyncio.TaskGroup() as group:
        for _ in range(NUM_CLIENTS):
            group.create_task(client(session))
    server.should_exit = True
    await running
    return times


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--passages", type=int, default=200_000)
    parser.add_argument("--queries", type=int, default=500)
    options = parser.parse_args()
    python_documentation = import_attr("python_docs.py:python_documentation", base=DATA_SCRIPTS)
    vocabulary = [word for passage in python_documentation() for word in passage.contents.split()]
    rng = random.Random("queries")
    queries = [" ".join(rng.choices(vocabulary, k=8)) for _ in range(options.queries)]
    with tempfile.TemporaryDirectory() as base:
        folder = Path(base) / "index"
        began = time.perf_counter()
        build_index(random_passages(options.passages, vocabulary), folder)
        build_s = time.perf_counter() - began
        began = time.perf_counter()
        index = SearchIndex.open(folder)
        open_s = time.perf_counter() - began
        here = []
        for query in queries:
            began = time.perf_counter()
            index.search(query, topk=3)
            here.append(time.perf_counter() - began)
        began = time.perf_counter()
        there = asyncio.run(over_http(index, queries))
        per_s = len(queries) / (time.perf_counter() - began)
        size = sum(path.stat().st_size for path in folder.iterdir())
    figures = {
        "benchmark": "search_speed",
        "passages": options.passages,
        "build_s": round(build_s, 2),
        "open_ms": round(open_s * 1e3, 1),
        "query_ms_p50": round(float(np.median(here)) * 1e3, 3),
        "query_ms_p99": round(float(np.quantile(here, 0.99)) * 1e3, 3),
        "http_ms_p50": round(float(np.median(there)) * 1e3, 2),
        "http_queries_per_s": round(per_s, 1),
        "megabytes": round(size / 2**20, 1),
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
