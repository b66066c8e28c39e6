"""A searcher searches its index from an event loop; an endpoint or a function makes the vectors of queries."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polyturn.cli.main import app
from polyturn.core.errors import ConfigError
from polyturn.retrieval import searcher as searcher_module
from polyturn.retrieval.embedders import EmbeddingError, FunctionEmbedder, read_embedder
from polyturn.retrieval.index import Mode, SearchIndex, build_index
from polyturn.retrieval.passages import Passage
from polyturn.retrieval.searcher import Searcher
from support.refusals import refuses, refuses_later
from support.services import serve

PASSAGES = [Passage(id=t, contents=f"{t}\nabout {t}") for t in ("cats", "dogs", "cars")]


def meaning(texts: Sequence[str]) -> np.ndarray:
    """Return a vector that tells animals from machines."""
    animals = [sum(text.lower().count(word) for word in ("cat", "dog", "pet")) for text in texts]
    machines = [sum(text.lower().count(word) for word in ("car", "engine")) for text in texts]
    return np.array([animals, machines], np.float32).T + 0.01


def embeddings(asked: dict[str, Any], number: int) -> Any:
    rows = meaning(asked["input"]).tolist()
    return {"data": [{"index": i, "embedding": row} for i, row in reversed(list(enumerate(rows)))], "model": asked["model"]}


def index(*words: object) -> None:
    """Call `polyturn data index`, whose errors are raised."""
    app(["data", "index", *map(str, words)], standalone_mode=False)


async def titles(searcher: Searcher, query: str) -> list[str]:
    searcher.open()
    try:
        return [hit.passage.title for hit in (await searcher.search([query], topk=2))[0]]
    finally:
        await searcher.close()


async def test_vectors_come_from_an_endpoint(tmp_path: Path):
    lines = "".join(f'{{"id": "{p.id}", "contents": "{p.id}\\nabout {p.id}"}}\n' for p in PASSAGES)
    (tmp_path / "p.jsonl").write_text(lines)
    async with serve(embeddings) as server:
        words = [tmp_path / "p.jsonl", "-o", tmp_path / "index", "--embed", server.url, "--embed-model", "toy"]
        await asyncio.to_thread(index, *words)
        embed = {"url": server.url, "model": "toy"}
        config = {"index": "index", "embed": embed}
        searcher = Searcher.of_config(config, base=tmp_path)
        assert (len(searcher.index), searcher.mode) == (3, Mode.HYBRID)
        assert (await titles(searcher, "a pet"))[0] in ("cats", "dogs")
        assert await titles(Searcher.of_config({**config, "mode": "dense"}, base=tmp_path), "an engine") == ["cars", "cats"]
        with pytest.raises(ConfigError, match="embedded by 'toy', but queries are by 'other'"):
            Searcher.of_config({"index": "index", "embed": {"url": server.url, "model": "other"}}, base=tmp_path)
    with pytest.raises(EmbeddingError, match="ClientConnectorError"):
        await titles(Searcher.of_config({**config, "embed": {**embed, "timeout": "0.5"}}, base=tmp_path), "a pet")


async def test_vectors_come_from_a_function_of_a_file(tmp_path: Path):
    build_index(PASSAGES, tmp_path / "index", vectors=meaning([p.contents for p in PASSAGES]))
    (tmp_path / "embed_lengths.py").write_text(
        "def two(texts):\n    return [[0.0, 1.0] for t in texts]\n\n"
        "def three(texts):\n    return [[1, 1, 1] for t in texts]\n\n"
        "def zero(texts):\n    return [[0.0, 0.0] for t in texts]\n\n"
        "def broken(texts):\n    raise OSError('no weights')\n"
    )

    def of(function: str) -> Searcher:
        config = {"index": "index", "embed": f"embed_lengths.py:{function}", "mode": "dense"}
        return Searcher.of_config(config, base=tmp_path)

    assert (await titles(of("two"), "x"))[0] == "cars"
    await refuses_later(lambda: titles(of("zero"), "x"), EmbeddingError, "vector 0 is zero or not finite")
    await refuses_later(lambda: titles(of("three"), "x"), EmbeddingError, "returned vectors of size 3; the index has 2")
    await refuses_later(
        lambda: titles(of("broken"), "x"), EmbeddingError, "embed_lengths.py:broken failed: OSError: no weights"
    )


async def test_large_index_is_searched_in_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    build_index(PASSAGES, tmp_path / "index")
    searcher = Searcher(SearchIndex.open(tmp_path / "index"))
    at_once = await searcher.search(["about dogs", "cars"], topk=2)
    monkeypatch.setattr(searcher_module, "INLINE_PASSAGES", 0)
    assert await searcher.search(["about dogs", "cars"], topk=2) == at_once


def test_modes_that_cannot_work_are_refused(tmp_path: Path):
    build_index(PASSAGES, tmp_path / "index")
    build_index(PASSAGES, tmp_path / "dense", vectors=np.ones((3, 2), np.float32))
    refuses(
        lambda: Searcher(SearchIndex.open(tmp_path / "index"), embedder=FunctionEmbedder(meaning, name="toy")),
        ConfigError,
        "hybrid",
    )
    refuses(
        lambda: Searcher.of_config({"index": "index", "mode": "bm26"}, base=tmp_path),
        ConfigError,
        "'bm26'",
        " Did you mean 'bm25'",
    )
    refuses(lambda: Searcher.of_config({"index": "dense", "mode": "dense"}, base=tmp_path), ConfigError, "dense")
    for embed, message in (
        ({"model": "m", "modle": "m"}, "'modle'.* Did you mean 'model'"),
        ({}, "model"),
        ({"model": "m", "timeout": "10 s"}, "timeout is '10 s'"),
    ):
        with pytest.raises(ConfigError, match=message):
            read_embedder({"url": "http://x", **embed})
    for option in (("--embed", "http://127.0.0.1:1/v1/embeddings"), ("--embed-model", "m")):
        with pytest.raises(ConfigError, match="go together"):
            index(tmp_path, "-o", tmp_path / "i", *option)
