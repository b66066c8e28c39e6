"""GSM8K's files as the rows of a multi-turn run, with the real problems where they are at hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from polyturn.core.errors import DataError
from polyturn.data.dataset import TaskDataset, check_tasks
from polyturn.data.prepare import final_answer, prepare_gsm8k
from support.refusals import refuses

REAL = Path(__file__).resolve().parents[4] / "shared" / "data" / "gsm8k"


def source(folder: Path, answer: str = "It is 1,250.\n#### 1,250") -> Path:
    folder.mkdir()
    for split in ("train", "test"):
        lines = [json.dumps({"question": f"{split} {i}?", "answer": answer}) for i in range(2)]
        (folder / f"{split}.jsonl").write_text("\n".join(lines))
    return folder


def test_interaction_variant_has_the_documented_columns(tmp_path: Path) -> None:
    """Users rely on these names: other programs read the same files."""
    written = prepare_gsm8k(source(tmp_path / "in"), variant="interaction", out=tmp_path / "out")
    assert written == [tmp_path / "out" / "train.parquet", tmp_path / "out" / "test.parquet"]
    row = pq.read_table(written[1]).to_pylist()[1]
    assert row["data_source"] == "openai/gsm8k"
    assert [m["role"] for m in row["prompt"]] == ["system", "user"]
    assert row["prompt"][1]["content"].startswith("test 1? Let's think step by step")
    assert row["ability"] == "math"
    assert row["reward_model"] == {"style": "rule", "ground_truth": "1250"}
    assert row["extra_info"] == {
        "split": "test",
        "index": 1,
        "answer": "It is 1,250.\n#### 1,250",
        "question": "test 1?",
        "interaction_kwargs": {"name": "gsm8k", "query": row["prompt"][1]["content"], "ground_truth": "1250"},
    }


def test_tool_variant_gives_the_tool_the_ground_truth(tmp_path: Path) -> None:
    written = prepare_gsm8k(source(tmp_path / "in"), variant="tool", out=tmp_path / "out")
    row = pq.read_table(written[0]).to_pylist()[0]
    assert "calc_gsm8k_reward" in row["prompt"][0]["content"]
    assert row["extra_info"]["need_tools_kwargs"] is True
    assert row["extra_info"]["tools_kwargs"] == {"calc_gsm8k_reward": {"create_kwargs": {"ground_truth": "1250"}}}
    assert row["extra_info"]["interaction_kwargs"] == {"query": row["prompt"][1]["content"], "ground_truth": "1250"}


def test_own_wording_stands_in_every_row(tmp_path: Path) -> None:
    """Rows then equal those of another project that were written with the same sentences."""
    said = {"system": "Solve it.", "instruction": "End with ####."}
    for path in prepare_gsm8k(source(tmp_path / "in"), variant="interaction", out=tmp_path / "out", **said):
        for row in pq.read_table(path).to_pylist():
            asked = f"{row['extra_info']['question']} End with ####."
            assert row["prompt"] == [{"role": "system", "content": "Solve it."}, {"role": "user", "content": asked}]
            assert row["extra_info"]["interaction_kwargs"]["query"] == asked


def test_final_answer_loses_its_commas_and_is_required() -> None:
    assert final_answer("so\n#### -1,234,567 ") == "-1234567"
    refuses(lambda: final_answer("no mark"), DataError, "'#### <number>'", "'no mark'")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda f: (f / "test.jsonl").unlink(), r"there is no .*test\.jsonl; .* contains train\.jsonl"),
        (lambda f: (f / "train.jsonl").write_text("{"), r"train\.jsonl, line 1: this is not JSON"),
        (lambda f: (f / "train.jsonl").write_text('\n{"question": "q"}'), r"train\.jsonl, line 2: a problem needs"),
        (
            lambda f: (f / "train.jsonl").write_text('{"question": "q", "answer": "4"}'),
            r"gsm8k train, problem 0: the answer must end in",
        ),
    ],
)
def test_unusable_source_is_refused(tmp_path: Path, change: Any, says: str) -> None:
    folder = source(tmp_path / "in")
    change(folder)
    with pytest.raises(DataError, match=says):
        prepare_gsm8k(folder, variant="tool", out=tmp_path / "out")


def test_unreachable_hub_leads_to_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polyturn.data.prepare.unreachable", lambda: "no route to the hub")
    with pytest.raises(DataError, match=r"cannot be fetched .*no route to the hub.*name their folder with --from"):
        prepare_gsm8k(None, variant="tool", out=tmp_path)


def test_files_of_the_hub_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fetch(repo: str, name: str, *, repo_type: str, **options: Any) -> str:
        assert (repo, repo_type) == ("openai/gsm8k", "dataset")
        path = tmp_path / name.replace("/", "_")
        pq.write_table(pa.Table.from_pylist([{"question": name, "answer": "#### 7"}]), path)
        return str(path)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", fetch)
    train, test = prepare_gsm8k(None, variant="interaction", out=tmp_path / "out")
    assert TaskDataset.open(train, split="train")[0].extra["question"] == "main/train-00000-of-00001.parquet"
    assert TaskDataset.open(test, split="test")[0].ground_truth == "7"


@pytest.mark.skipif(not REAL.is_dir(), reason="the real problems are not beside this checkout")
@pytest.mark.parametrize("variant", ["tool", "interaction"])
def test_real_problems_become_tasks(tmp_path: Path, variant: Any) -> None:
    train, test = prepare_gsm8k(REAL, variant=variant, out=tmp_path)
    for path, size in ((train, 7473), (test, 1319)):
        dataset = TaskDataset.open(path, split=path.stem)
        assert len(dataset) == size
    found = check_tasks(dataset, tools=["calc_gsm8k_reward"], interactions=["gsm8k"])
    assert found.data_sources == {"openai/gsm8k": 1319}
    assert found.interactions == {"gsm8k": 1319}
    first = TaskDataset.open(train, split="train")[0]
    assert first.ground_truth == "72"
    assert first.prompt[1].text.startswith("Natalia sold clips")
    assert first.tools == (("calc_gsm8k_reward",) if variant == "tool" else None)
    assert all("," not in task.ground_truth for task in dataset)
