"""An index finds what its texts hold, is read back as it was written, and says what is wrong with what it is given."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from polyturn.core.errors import ConfigError, DataError
from polyturn.retrieval.bm25 import words
from polyturn.retrieval.index import Mode, SearchIndex, build_index
from polyturn.retrieval.passages import Passage, cut, read_passages

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


def test_the_passage_that_shares_most_words_comes_first(built: SearchIndex):
    assert found(built, "What is the capital of Norway?")[0] == "Oslo"
    assert found(built, "FJORD") == ["Fjord"]
    assert found(built, "東京の首都") == ["東京"]


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


def test_a_query_without_a_known_word_finds_nothing(built: SearchIndex):
    assert found(built, "zebra") == found(built, "") == found(built, "?!") == []


def test_no_more_passages_than_asked_for_and_the_earlier_of_equals_first(tmp_path: Path):
    same = [Passage(id=str(number), contents="t\nthe same words") for number in range(50)]
    build_index(same, tmp_path / "same")
    index = SearchIndex.open(tmp_path / "same")
    assert [hit.passage.id for hit in index.search("same", topk=7)] == [str(number) for number in range(7)]
    assert len(index.search("same", topk=1000)) == 50


def test_an_index_is_the_same_whoever_builds_it_and_holds_no_pickle(tmp_path: Path):
    for name in "ab":
        build_index(PASSAGES, tmp_path / name)
    files = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert {path.rpartition(".")[2] for path in files} == {"json", "jsonl", "npy"}
    for name in files:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


def test_vectors_find_what_shares_no_word_and_hybrid_joins_both_rankings(tmp_path: Path):
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


def test_passages_are_read_with_contents_or_with_title_and_text(tmp_path: Path):
    lines = [{"id": 4, "contents": "Oslo\nis"}, {"title": "Rome", "text": "was"}, {"id": "x", "text": "no title"}]
    text = "\n\n".join(json.dumps(line) for line in lines)
    (tmp_path / "p.jsonl").write_text(text)
    (tmp_path / "p.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    expected = [("4", "Oslo\nis"), ("2", "Rome\nwas"), ("x", "\nno title")]
    for name in ("p.jsonl", "p.jsonl.gz"):
        assert [(p.id, p.contents) for p in read_passages(tmp_path / name)] == expected


def test_texts_are_cut_at_paragraphs_and_carry_their_headings():
    text = "Intro words.\n\n# Oslo\n\nOne two.\n\nThree four five.\n\n# Rome\nSix.\n\n" + "word " * 25
    pieces = list(cut(text, name="a.md", max_words=10))
    assert [(p.title, len(p.text.split())) for p in pieces] == [
        ("a.md", 2), ("a.md: Oslo", 5), ("a.md: Rome", 1), ("a.md: Rome", 10), ("a.md: Rome", 10), ("a.md: Rome", 5),
    ]  # fmt: skip
    assert len({p.id for p in pieces}) == len(pieces)


def test_a_folder_of_texts_is_read_file_by_file(tmp_path: Path):
    (tmp_path / "b.txt").write_text("second")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "one.md").write_text("first")
    (tmp_path / "c.bin").write_bytes(b"\xff")
    assert [p.contents for p in read_passages(tmp_path)] == ["a/one.md\nfirst", "b.txt\nsecond"]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "line 2: this is not JSON"),
        ("[1]", "line 2: a passage is an object"),
        ('{"id": 1}', r"line 2: a passage needs a text `contents` .* this one has \['id'\]"),
        ('{"contents": "  "}', "line 2: a passage needs a text"),
        ('{"contents": "x", "id": [1]}', "line 2: the id of a passage"),
    ],
)
def test_a_line_that_is_no_passage_is_named_and_nothing_is_left(tmp_path: Path, line: str, said: str):
    (tmp_path / "p.jsonl").write_text('{"contents": "fine"}\n' + line + "\n")
    with pytest.raises(DataError, match=said):
        build_index(read_passages(tmp_path / "p.jsonl"), tmp_path / "index")
    assert [path.name for path in tmp_path.iterdir()] == ["p.jsonl"]


@pytest.mark.parametrize(
    "damage", [lambda whole: whole[:-20], lambda whole: b"no gzip", lambda whole: whole[:40] + b"x" * 40]
)
def test_a_damaged_archive_is_said(tmp_path: Path, damage: Callable[[bytes], bytes]):
    whole = gzip.compress(b"".join(b'{"contents": "passage %d"}\n' % number for number in range(2000)))
    (tmp_path / "p.jsonl.gz").write_bytes(damage(whole))
    with pytest.raises(DataError, match=r"p.jsonl.gz cannot be read after line \d+"):
        list(read_passages(tmp_path / "p.jsonl.gz"))


def test_what_cannot_be_indexed_is_said(tmp_path: Path):
    with pytest.raises(DataError, match="there is no passage"):
        build_index([], tmp_path / "none")
    with pytest.raises(ConfigError, match="no passage holds a word"):
        build_index([Passage(id="1", contents="?!")], tmp_path / "none")
    with pytest.raises(ConfigError, match="exists already"):
        build_index(PASSAGES, tmp_path)
    with pytest.raises(DataError, match="there are 1 vectors for 4 passages"):
        build_index(PASSAGES, tmp_path / "none", vectors=np.ones((1, 2), np.float32))
    with pytest.raises(DataError, match="vector 2 is zero"):
        build_index(PASSAGES, tmp_path / "none", vectors=np.array([[1.0], [1], [0], [1]], np.float32))
    for source, said in ((tmp_path / "no.jsonl", "there is no"), (tmp_path, "holds no text")):
        with pytest.raises(DataError, match=said):
            list(read_passages(source))


def test_an_index_that_cannot_be_read_is_said(tmp_path: Path):
    folder = tmp_path / "index"
    with pytest.raises(ConfigError, match=r"there is nothing at .*polyturn data index"):
        SearchIndex.open(folder)
    folder.mkdir()
    with pytest.raises(ConfigError, match="there is no index at"):
        SearchIndex.open(folder)
    folder.rmdir()
    build_index(PASSAGES, folder)
    about = folder / "index.json"
    whole = about.read_text()
    about.write_text(whole.replace('"version": 2', '"version": 9'))
    with pytest.raises(ConfigError, match=r"is of version 9 .*Build it again"):
        SearchIndex.open(folder)
    about.write_text('{"kind": "recipe"}')
    with pytest.raises(ConfigError, match="does not describe a search index"):
        SearchIndex.open(folder)
    about.write_text(whole)
    for name, left in (
        ("data.csc.index.npy", b"\x93NUMPY"),
        ("vocab.index.json", b"["),
        ("params.index.json", b"[]"),
        ("passages.jsonl", b"{}\n"),
        ("starts.npy", b""),
        ("params.index.json", b'{"backend": "pickle", "x": 1}'),
    ):
        held = (folder / name).read_bytes()
        (folder / name).write_bytes(left)
        with pytest.raises(ConfigError, match=r"is damaged .*build it again"):
            SearchIndex.open(folder)
        (folder / name).write_bytes(held)
    assert len(SearchIndex.open(folder)) == 4
