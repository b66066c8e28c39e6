"""Questions over texts have one answer, which a search for the question finds; training and test share no passage."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from polyturn.cli.main import app
from polyturn.core.errors import ConfigError, DataError
from polyturn.data.dataset import TaskDataset
from polyturn.infra.plugins import import_attr
from polyturn.retrieval.index import SearchIndex
from polyturn.retrieval.passages import Passage
from polyturn.rewards import search_r1
from support.refusals import refuses

FOLDER = Path(__file__).parents[3] / "examples" / "data"
BLANK, FOUND_WITHIN, make_questions, prepare_cloze, main = (
    import_attr(f"cloze.py:{name}", base=FOLDER)
    for name in ("BLANK", "FOUND_WITHIN", "make_questions", "prepare_cloze", "main")
)
RIVERS = ("Amazon", "Danube", "Ganges", "Indus", "Jordan", "Loire", "Mekong", "Niger", "Oder", "Rhine", "Seine", "Volga")


def river(number: int, name: str) -> Passage:
    text = f"The {name} is a long river of this world and reaches the sea near {name.lower()}stadt."
    return Passage(id=str(number), contents=f"{name}\n{text}")


PASSAGES = [river(number, name) for number, name in enumerate(RIVERS)]


def test_rarest_word_of_a_sentence_is_missing():
    passages = [Passage(id="1", contents="t\nThe quick brown animal jumps over the lazy animal every Wednesday."), *PASSAGES]
    first = make_questions(passages)[0]
    assert first.sentence.count(BLANK) == 1
    assert first.sentence.replace(BLANK, first.answer) == passages[0].text
    assert first.answer in ("quick", "brown", "jumps", "over", "lazy", "every", "Wednesday")


def test_sentence_of_several_answers_is_left_out():
    same = [Passage(id=n, contents=f"t\nThe capital of the country that we mean is {n}.") for n in ("Oslo", "Rome")]
    assert make_questions(same) == []


def test_part_of_a_name_or_number_is_never_missing():
    text = "Call os.path.join with 3.1415 or __init__ to a b c d."
    (question,) = make_questions([Passage(id="1", contents=f"t\n{text}")])
    assert question.answer == "with"


def test_index_answers_each_question(tmp_path: Path):
    written = prepare_cloze(PASSAGES, out=tmp_path / "data")
    assert [path.name for path in written] == ["train.parquet", "test.parquet", "passages.jsonl", "index"]
    assert sorted(path.name for path in (tmp_path / "data").iterdir()) == sorted(path.name for path in written)
    train, test = (pq.read_table(path).to_pylist() for path in written[:2])
    assert (len(train), len(test)) == (11, 1)
    assert len(TaskDataset.open(written[0], split="train")) == 11
    index = SearchIndex.open(written[3])
    texts = [json.loads(line)["contents"] for line in written[2].read_text().splitlines()]
    asked = set()
    for row in (*train, *test):
        question, (answer,) = row["prompt"][1]["content"], row["reward_model"]["ground_truth"]["target"]
        sentence = re.search(r'"(.*)"$', question).group(1)  # type: ignore[union-attr]
        (holder,) = [text for text in texts if sentence.replace(BLANK, answer) in text]
        assert holder in [hit.passage.contents for hit in index.search(sentence, topk=FOUND_WITHIN)]
        assert search_r1.compute_score(f"<answer>{answer}</answer>", row["reward_model"]["ground_truth"]) == 1.0
        assert row["data_source"] == "searchR1_cloze" and "search" in row["extra_info"]["tools_kwargs"]
        asked.add(holder)
    assert len(asked) == 12


def test_too_little_text_and_a_taken_folder_are_refused(tmp_path: Path):
    with pytest.raises(DataError, match="2 passages give 2 questions, and a training and a test set need 10"):
        prepare_cloze(PASSAGES[:2], out=tmp_path)
    assert list(tmp_path.iterdir()) == []
    prepare_cloze(PASSAGES, out=tmp_path, max_questions=10)
    assert pq.read_table(tmp_path / "train.parquet").num_rows == 9
    refuses(lambda: prepare_cloze(PASSAGES, out=tmp_path), ConfigError, "exists already")


def test_python_documents_itself():
    passages = {passage.title: passage.text for passage in import_attr("python_docs.py:python_documentation", base=FOLDER)()}
    assert len(passages) > 1500
    assert "linear" in passages["statistics.linear_regression"]
    assert passages["str.casefold"].startswith("Return a version of the string")
    assert len(set(passages.values())) == len(passages)


def test_script_makes_questions_over_texts(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "rivers").mkdir()
    for passage in PASSAGES:
        (tmp_path / "rivers" / f"{passage.id}.txt").write_text(passage.text)
    main([str(tmp_path / "rivers"), "--out", str(tmp_path / "out")])
    assert str(tmp_path / "out" / "index") in capsys.readouterr().out
    assert pq.read_table(tmp_path / "out" / "train.parquet").num_rows == 11


@pytest.mark.parametrize("option", [["--texts", "notes"], ["--python-docs"], ["--questions", "9"]])
def test_retired_option_names_the_script(option: list[str], tmp_path: Path):
    with pytest.raises(ConfigError, match=re.escape(option[0])) as caught:
        app(["data", "search", *option, "--out", str(tmp_path / "x")], standalone_mode=False)
    assert "examples/data/cloze.py" in str(caught.value) and not (tmp_path / "x").exists()
