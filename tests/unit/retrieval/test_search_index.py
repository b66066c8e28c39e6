"""A search index finds passages by their words or vectors, is read back as it was written, and refuses damaged files."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polyturn.core.errors import ConfigError, DataError
from polyturn.retrieval.bm25 import words
from polyturn.retrieval.index import Mode, SearchIndex, build_index
from polyturn.retrieval.passages import Passage, cut, read_passages
from support.refusals import refuses

TEXTS = (
    "Oslo\nOslo is the capital of Norway.",
    "Rome\nRome is the capital of Italy. The capital has many fountains.",
    "Fjord\nA fjord is a narrow inlet of the sea; Norway has many.",
    "東京\n東京は日本の首都です。",
)
PASSAGES = [Passage(id=str(number), contents=text) for number, text in enumerate(TEXTS)]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> SearchIndex:
    folder = tmp_path_factory.mktemp("indexes") / "small"
    build_index(PASSAGES, folder)
    return SearchIndex.open(folder)


def found(index: SearchIndex, query: str, topk: int = 3) -> list[str]:
    return [hit.passage.title for hit in index.search(query, topk=topk)]


def test_passage_that_shares_most_words_comes_first(built: SearchIndex):
    assert found(built, "What is the capital of Norway?")[0] == "Oslo"
    assert found(built, "FJORD") == ["Fjord"]
    assert found(built, "東京の首都") == ["東京"]
    assert found(built, "zebra") == found(built, "") == found(built, "?!") == []


def test_scores_are_those_of_bm25s(built: SearchIndex):
    import bm25s

    reference = bm25s.BM25(method="lucene", k1=1.2, b=0.75)
    reference.index([words(text) for text in TEXTS], show_progress=False)
    for query in ("capital of norway", "many fountains", "the sea the sea"):
        expected = reference.get_scores(words(query))
        hits = built.search(query, topk=4)
        assert {hit.passage.id for hit in hits} == {str(i) for i in np.flatnonzero(expected)}
        for hit in hits:
            assert hit.score == pytest.approx(expected[int(hit.passage.id)], rel=1e-5)


def test_topk_keeps_the_earlier_of_equals(tmp_path: Path):
    same = [Passage(id=str(number), contents="t\nthe same words") for number in range(50)]
    build_index(same, tmp_path / "same")
    index = SearchIndex.open(tmp_path / "same")
    assert [hit.passage.id for hit in index.search("same", topk=7)] == [str(number) for number in range(7)]
    assert len(index.search("same", topk=1000)) == 50


def test_index_is_reproducible_and_holds_no_pickle(tmp_path: Path):
    for name in "ab":
        build_index(PASSAGES, tmp_path / name)
    files = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert {path.rpartition(".")[2] for path in files} == {"json", "jsonl", "npy"}
    for name in files:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


def test_dense_and_hybrid_search_rank_by_vectors(tmp_path: Path):
    vectors = np.array([[1, 0.1], [0.1, 1], [0.9, 0.2], [-1, -1]], np.float32)
    build_index(PASSAGES, tmp_path / "dense", vectors=vectors, embedder="toy")
    index = SearchIndex.open(tmp_path / "dense")
    query = np.array([0, 3], np.float32)
    dense = index.search("zebra", topk=4, vector=query, mode=Mode.DENSE)
    assert dense[0].passage.title == "Rome"
    assert dense[0].score == pytest.approx(1 / np.hypot(0.1, 1))
    both = index.search("Norway", topk=4, vector=query, mode=Mode.HYBRID)
    ranks = {"Rome": (None, 1), "Fjord": (2, 2), "Oslo": (1, 3), "東京": (None, 4)}
    expected = {title: sum(1 / (60 + rank) for rank in found if rank) for title, found in ranks.items()}
    assert {hit.passage.title: pytest.approx(hit.score) for hit in both} == expected
    assert both[0].passage.title == max(expected, key=lambda title: expected[title])


def test_passages_have_contents_or_title_and_text(tmp_path: Path):
    lines = [{"id": 4, "contents": "Oslo\nis"}, {"title": "Rome", "text": "was"}, {"id": "x", "text": "no title"}]
    text = "\n\n".join(json.dumps(line) for line in lines)
    (tmp_path / "p.jsonl").write_text(text)
    (tmp_path / "p.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    expected = [("4", "Oslo\nis"), ("2", "Rome\nwas"), ("x", "\nno title")]
    for name in ("p.jsonl", "p.jsonl.gz"):
        assert [(p.id, p.contents) for p in read_passages(tmp_path / name)] == expected


def test_texts_are_cut_at_paragraphs_with_their_headings():
    text = "Intro words.\n\n# Oslo\n\nOne two.\n\nThree four five.\n\n# Rome\nSix.\n\n" + "word " * 25
    pieces = list(cut(text, name="a.md", max_words=10))
    assert [(p.title, len(p.text.split())) for p in pieces] == [
        ("a.md", 2), ("a.md: Oslo", 5), ("a.md: Rome", 1), ("a.md: Rome", 10), ("a.md: Rome", 10), ("a.md: Rome", 5),
    ]  # fmt: skip
    assert len({p.id for p in pieces}) == len(pieces)


def test_byte_order_mark_does_not_hide_a_heading(tmp_path: Path):
    (tmp_path / "a.md").write_text("# Oslo\n\nA city.", encoding="utf-8-sig")
    assert [p.title for p in read_passages(tmp_path / "a.md")] == ["a.md: Oslo"]


def test_folder_of_texts_is_read_file_by_file(tmp_path: Path):
    (tmp_path / "b.txt").write_text("second")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "one.md").write_text("first")
    (tmp_path / "c.bin").write_bytes(b"\xff")
    assert [p.contents for p in read_passages(tmp_path)] == ["a/one.md\nfirst", "b.txt\nsecond"]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "line 2: this is not JSON"),
        ("[1]", "line 2: a passage must be an object"),
        ('{"id": 1}', r"line 2: a passage needs `contents`.* this one has \['id'\]"),
        ('{"contents": "  "}', "line 2: a passage needs `contents`"),
        ('{"contents": "x", "id": [1]}', "line 2: the id of a passage"),
    ],
)
def test_line_that_is_not_a_passage_is_named(tmp_path: Path, line: str, said: str):
    (tmp_path / "p.jsonl").write_text('{"contents": "fine"}\n' + line + "\n")
    with pytest.raises(DataError, match=said):
        build_index(read_passages(tmp_path / "p.jsonl"), tmp_path / "index")
    assert [path.name for path in tmp_path.iterdir()] == ["p.jsonl"]


@pytest.mark.parametrize(
    "damage", [lambda whole: whole[:-20], lambda whole: b"no gzip", lambda whole: whole[:40] + b"x" * 40]
)
def test_damaged_archive_is_a_data_error(tmp_path: Path, damage: Callable[[bytes], bytes]):
    whole = gzip.compress(b"".join(b'{"contents": "passage %d"}\n' % number for number in range(2000)))
    (tmp_path / "p.jsonl.gz").write_bytes(damage(whole))
    refuses(lambda: list(read_passages(tmp_path / "p.jsonl.gz")), DataError, "p.jsonl.gz cannot be read after line")


VECTORS = np.array([[1.0], [1], [0], [1]], np.float32)


@pytest.mark.parametrize(
    ("passages", "folder", "vectors", "error", "message"),
    [
        ([], "none", None, DataError, "there are no passages"),
        ([Passage(id="1", contents="?!")], "none", None, ConfigError, "passages contain no words"),
        (PASSAGES, "", None, ConfigError, "exists already"),
        (PASSAGES, "none", VECTORS[:1], DataError, "1 vectors for 4 passages"),
        (PASSAGES, "none", VECTORS, DataError, "vector 2 is zero"),
    ],
)
def test_passages_that_cannot_be_indexed_are_refused(
    passages: list[Passage], folder: str, vectors: Any, error: type[Exception], message: str, tmp_path: Path
):
    refuses(lambda: build_index(passages, tmp_path / folder, vectors=vectors), error, message)
    for source in (tmp_path / "no.jsonl", tmp_path):
        with pytest.raises(DataError):
            list(read_passages(source))


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("index.json", b'{"kind": "recipe"}', "does not describe a search index"),
        ("index.json", b"version", "version 9"),
        ("data.csc.index.npy", b"\x93NUMPY", "is damaged"),
        ("vocab.index.json", b"[", "is damaged"),
        ("params.index.json", b"[]", "is damaged"),
        ("params.index.json", b'{"backend": "pickle", "x": 1}', "is damaged"),
        ("passages.jsonl", b"{}\n", "is damaged"),
        ("starts.npy", b"", "is damaged"),
    ],
)
def test_damaged_index_is_a_config_error(file: str, content: bytes, message: str, tmp_path: Path):
    build_index(PASSAGES, tmp_path / "index")
    whole = (tmp_path / "index" / file).read_bytes()
    if b"version" in content:
        content = whole.replace(b'"version": 2', b'"version": 9')
        assert content != whole
    (tmp_path / "index" / file).write_bytes(content)
    refuses(lambda: SearchIndex.open(tmp_path / "index"), ConfigError, message)
    (tmp_path / "index" / file).write_bytes(whole)
    assert len(SearchIndex.open(tmp_path / "index")) == 4


def test_missing_index_is_a_config_error(tmp_path: Path):
    refuses(lambda: SearchIndex.open(tmp_path / "index"), ConfigError, "polyturn data index")
    refuses(lambda: SearchIndex.open(tmp_path), ConfigError, "there is no index at")
