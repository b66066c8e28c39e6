"""Create search questions from any text without a model: each is a sentence whose rarest word is missing.

    python cloze.py notes/ --out data                                                       from your own texts
    python python_docs.py docs.jsonl && python cloze.py docs.jsonl --out data               from Python's documentation

    passage   math.acos: Return the arc cosine (measured in radians) of x. The result is between 0 and pi.
    question  Which word is missing? "Return the arc ____ (measured in radians) of x."        answer  cosine

`data` then has train.parquet and test.parquet, the passages, and the index for the tool `search`. Every question can be
answered: a search for its words returns the passage among the first three results. Sentences that fit several words are
left out. One passage in ten is for the test set, so the sets never share a passage.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from polyturn.core.errors import ConfigError, DataError, PolyturnError
from polyturn.data.prepare import search_row
from polyturn.retrieval.bm25 import words
from polyturn.retrieval.index import SearchIndex, build_index
from polyturn.retrieval.passages import Passage, read_passages

BLANK = "____"
TEST_EVERY = 10
"""One passage in this many belongs to the test set."""
FOUND_WITHIN = 3
"""A search for a question must return its passage within this many results."""

_SENTENCE_ENDS = re.compile(r"(?<=[.!?])\s+(?=[A-Z\"'(])")
_ANSWER = re.compile(r"[^\W\d_]{4,}|\d{2,}")
_MIN_WORDS, _MAX_WORDS = 7, 40


class Cloze(NamedTuple):
    """A question."""

    passage: int
    """Index of the passage that answers the question."""
    sentence: str
    """The sentence, with `BLANK` instead of the answer."""
    answer: str


def prepare_cloze(passages: Iterable[Passage], *, out: Path, max_questions: int = 5000) -> list[Path]:
    """Write questions about passages as `train.parquet` and `test.parquet`, with `passages.jsonl` and an `index`.

    Args:
        passages: The texts.
        out: The folder to write to; it is created if missing, and must not have an index yet.
        max_questions: The largest number of questions; passages are left out evenly.

    Returns:
        The written files.

    Raises:
        ConfigError: `out` already has an index, or bm25s is not installed.
        DataError: the texts give too few questions for a training and a test set.
    """
    texts = list(passages)
    if (out / "index").exists():
        raise ConfigError(f"{out / 'index'} exists already; name a new folder, or remove this one")
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out, prefix=".making-") as making:
        folder = Path(making) / "index"
        build_index(texts, folder)
        index = SearchIndex.open(folder)
        questions = answerable(make_questions(texts), texts, index)
        questions = _spread(questions, max_questions)
        rows = _rows(questions)
        if not all(rows.values()):
            raise DataError(
                f"{len(texts)} passages give {len(questions)} questions, and a training and a test set need {TEST_EVERY} at "
                "least; give more text"
            )
        folder.rename(out / "index")
    lines = (json.dumps({"id": p.id, "contents": p.contents}, ensure_ascii=False) + "\n" for p in texts)
    (out / "passages.jsonl").write_text("".join(lines), encoding="utf-8")
    for split, items in rows.items():
        pq.write_table(pa.Table.from_pylist(items), out / f"{split}.parquet")
    return [out / "train.parquet", out / "test.parquet", out / "passages.jsonl", out / "index"]


def make_questions(passages: Sequence[Passage]) -> list[Cloze]:
    """Return at most one question per passage: the sentence with the rarest words, without its rarest word."""
    num_with: Counter[str] = Counter()
    for passage in passages:
        num_with.update(set(words(passage.contents)))
    best = []
    for number, passage in enumerate(passages):
        questions = [q for sentence in _sentences(passage.text) if (q := _ask(sentence, number, num_with)) is not None]
        if questions:
            best.append(min(questions, key=lambda q: sum(num_with[w] for w in words(q.sentence)) / len(words(q.sentence))))
    return _without_doubt(best)


def answerable(questions: Iterable[Cloze], passages: Sequence[Passage], index: SearchIndex) -> list[Cloze]:
    """Return the questions for which a search returns their passage."""
    return [
        question
        for question in questions
        if any(hit.passage.id == passages[question.passage].id for hit in index.search(question.sentence, topk=FOUND_WITHIN))
    ]


def _sentences(text: str) -> list[str]:
    pieces = _SENTENCE_ENDS.split(" ".join(text.split()))
    return [piece for piece in pieces if _MIN_WORDS <= len(piece.split()) <= _MAX_WORDS and BLANK not in piece]


def _ask(sentence: str, passage: int, num_with: Mapping[str, int]) -> Cloze | None:
    """Return the sentence without its rarest word; None if no word occurs exactly once."""
    counts = Counter(words(sentence))
    able = [
        match
        for match in _ANSWER.finditer(sentence)
        if match.start() > 0 and counts[match[0].casefold()] == 1 and _is_alone(sentence, match)
    ]
    if not able:
        return None
    best = min(able, key=lambda match: (num_with[match[0].casefold()], -len(match[0]), match.start()))
    return Cloze(passage, f"{sentence[: best.start()]}{BLANK}{sentence[best.end() :]}", best[0])


def _is_alone(sentence: str, match: re.Match[str]) -> bool:
    """Return whether a word stands alone, not as part of a name such as os.path or a number such as 3.14."""
    before, after = sentence[match.start() - 1], sentence[match.end() : match.end() + 2]
    return (before.isspace() or before in "\"'(") and (not after or after[0] in " ,;:)\"'!?" or after in (".", ". "))


def _without_doubt(questions: Iterable[Cloze]) -> list[Cloze]:
    """Return the questions without repetitions and without sentences that fit several words."""
    answers: defaultdict[tuple[str, ...], set[str]] = defaultdict(set)
    candidates = list(questions)
    for question in candidates:
        answers[tuple(words(question.sentence))].add(question.answer.casefold())
    once: set[tuple[str, ...]] = set()
    clear = []
    for question in candidates:
        key = tuple(words(question.sentence))
        if len(answers[key]) == 1 and key not in once:
            once.add(key)
            clear.append(question)
    return clear


def _spread(questions: list[Cloze], limit: int) -> list[Cloze]:
    step = max(1.0, len(questions) / limit)
    return [questions[int(i * step)] for i in range(min(limit, len(questions)))]


def _rows(questions: Sequence[Cloze]) -> dict[str, list[dict[str, Any]]]:
    rows: dict[str, list[dict[str, Any]]] = {"train": [], "test": []}
    for number, question in enumerate(questions):
        split = "test" if number % TEST_EVERY == TEST_EVERY - 1 else "train"
        row = {
            "question": f'Which word is missing? "{question.sentence}"',
            "golden_answers": [question.answer],
            "data_source": "cloze",
        }
        rows[split].append(search_row(row, index=len(rows[split]), split=split, where=f"question {number}"))
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the questions and print the written paths."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", type=Path, nargs="+", help="a text file, a folder of them, or passages as .jsonl")
    parser.add_argument("-o", "--out", type=Path, required=True, help="the folder to write to")
    parser.add_argument("--questions", type=int, default=5000, help="questions at most")
    chosen = parser.parse_args(arguments)
    if chosen.questions < 1:
        parser.error(f"--questions is {chosen.questions}; give at least 1")
    try:
        passages = [passage for path in chosen.texts for passage in read_passages(path)]
        for path in prepare_cloze(passages, out=chosen.out, max_questions=chosen.questions):
            print(path)
    except PolyturnError as problem:
        parser.error(str(problem))


if __name__ == "__main__":
    main()
