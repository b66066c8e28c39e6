"""Datasets as verl's users subclass them: rows, batches, and the tasks that a run makes of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from omegaconf import OmegaConf

from polyturn import compat
from polyturn.build.tasks import build_run_tasks
from polyturn.compat.verl.rl_dataset import RLHFDataset, collate_fn, custom_tasks, get_dataset_class
from polyturn.compat.verl_config.compose import compose_name
from polyturn.compat.verl_config.translate import translate
from polyturn.config.config_source import ConfigSource
from polyturn.config.load import load_values
from polyturn.config.models import RunConfig
from polyturn.core.errors import ConfigError, DataError
from polyturn.testing.episodes import tiny_tokenizer
from support.refusals import refuses

pytestmark = pytest.mark.timeout(300)  # the first test imports datasets

CONFIG = {"max_prompt_length": 64, "filter_overlong_prompts": False, "return_raw_chat": True}

CUSTOM = """
from torch.utils.data import Dataset
from verl.utils.dataset import RLHFDataset


class Listed(RLHFDataset):
    def _read_files_and_tokenize(self):
        self.dataframe = [
            {
                "prompt": [{"role": "user", "content": f"{file} {self.config.max_prompt_length}?"}],
                "data_source": "own",
                "reward_model": {"ground_truth": str(i)},
                "extra_info": {"index": i, "interaction_kwargs": {"name": "mine", "level": i}},
            }
            for i, file in enumerate(self.data_files)
        ]

    def __getitem__(self, item):
        row = super().__getitem__(item)
        return {**row, "agent_name": "tool_agent", "interaction_kwargs": {"name": "mine", "level": 7}}


class Plain(Dataset):
    def __init__(self, data_files, tokenizer, config, processor=None):
        self.rows = [{"raw_prompt": [{"role": "user", "content": "q"}]}] * len(data_files)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, item):
        return self.rows[item]


class WithoutMessages(Plain):
    def __getitem__(self, item):
        return {"input_ids": [1]}


class Nothing(Plain):
    def __getitem__(self, item):
        self.rows[item]


class Rows(Plain):
    def __getitem__(self, item):
        return self.rows[item]["prompt"]


class Failing(Plain):
    def __init__(self, **kwargs):
        raise KeyError("train")


def not_a_class():
    pass
"""


def rows() -> list[dict[str, Any]]:
    return [
        {
            "prompt": [{"role": "user", "content": "word " * (1 + 40 * i)}],
            "data_source": "s",
            "reward_model": {"style": "rule", "ground_truth": str(i)},
            "extra_info": {"index": i, "tools_kwargs": {"calc": {"create_kwargs": {"ground_truth": str(i)}}}},
        }
        for i in range(3)
    ]


@pytest.fixture
def parquet(tmp_path: Path) -> str:
    pytest.importorskip("datasets")
    pq.write_table(pa.Table.from_pylist(rows()), tmp_path / "train.parquet")
    return str(tmp_path / "train.parquet")


@pytest.fixture
def custom(tmp_path: Path) -> Path:
    compat.install("verl")
    (tmp_path / "own.py").write_text(CUSTOM)
    return tmp_path / "own.py"


def test_rows_hold_what_a_rollout_reads(parquet: str) -> None:
    """Users' classes rely on these names, and on a new row each time."""
    dataset = RLHFDataset(parquet, tiny_tokenizer(), OmegaConf.create(CONFIG), max_samples=2)
    assert len(dataset) == 2
    dataset[1]["raw_prompt"][0]["content"] = "changed"
    row = dataset[1]
    assert row["raw_prompt"] == rows()[1]["prompt"] and "prompt" not in row and "input_ids" not in row
    assert (row["index"], row["data_source"], row["interaction_kwargs"]) == (1, "s", {})
    assert row["tools_kwargs"] == {"calc": {"create_kwargs": {"ground_truth": "1"}}}


def test_row_has_padded_ids_without_raw_chat(parquet: str) -> None:
    tokenizer = tiny_tokenizer()
    config = OmegaConf.create({"max_prompt_length": 400, "filter_overlong_prompts": False})
    dataset = RLHFDataset([parquet], tokenizer, config)
    batch = collate_fn([dataset[0], dataset[1]])
    assert batch["input_ids"].shape == batch["attention_mask"].shape == batch["position_ids"].shape == (2, 400)
    shown = tokenizer.apply_chat_template(rows()[0]["prompt"], add_generation_prompt=True, return_dict=False)
    assert batch["raw_prompt_ids"][0] == shown == batch["input_ids"][0][-len(shown) :].tolist()
    assert batch["position_ids"][0][-len(shown) :].tolist() == list(range(len(shown)))
    assert batch["data_source"].dtype == object and batch["data_source"].tolist() == ["s", "s"]
    with pytest.raises(NotImplementedError, match="larger than max_length=8"):
        RLHFDataset([parquet], tokenizer, OmegaConf.create({**config, "max_prompt_length": 8}))[2]


def test_messages_are_built_from_any_column(parquet: str) -> None:
    class Mine(RLHFDataset):
        def _build_messages(self, example: dict[str, Any], key: str) -> list[dict[str, Any]]:  # type: ignore[override]
            return [{**m, "content": m["content"].upper()} for m in super()._build_messages(example, key=key)]

    class Older(RLHFDataset):
        def _build_messages(self, example: dict[str, Any]) -> list[dict[str, Any]]:  # type: ignore[override]
            return [{**m, "content": m["content"].upper()} for m in super()._build_messages(example)]

    for cls in (Mine, Older):
        row = cls(parquet, tiny_tokenizer(), OmegaConf.create(CONFIG))[0]
        assert row["raw_prompt"] == [{"role": "user", "content": "WORD "}] and "prompt" not in row
    chosen = {"chosen": rows()[0]["prompt"]}
    dataset = RLHFDataset(parquet, tiny_tokenizer(), OmegaConf.create(CONFIG))
    assert dataset._build_messages(chosen, key="chosen") == chosen["chosen"]


def test_dataset_is_split_into_equal_parts(parquet: str, caplog: pytest.LogCaptureFixture) -> None:
    dataset = RLHFDataset(parquet, tiny_tokenizer(), OmegaConf.create(CONFIG))
    assert [[row["index"] for row in map(part.__getitem__, range(len(part)))] for part in dataset.split(3)] == [
        [0],
        [1],
        [2],
    ]
    assert (
        not caplog.text and [len(part) for part in dataset.split(2)] == [1, 1] and "1 of 3 rows are dropped" in caplog.text
    )
    assert len(dataset) == 3
    refuses(lambda: dataset.split(0), ValueError, "num_splits is 0", "from 1 to 3")


def test_long_rows_are_dropped_on_request(parquet: str, caplog: pytest.LogCaptureFixture) -> None:
    config = OmegaConf.create({"max_prompt_length": 150, "filter_overlong_prompts": True, "return_raw_chat": True})
    lengths = [
        len(tiny_tokenizer().apply_chat_template(r["prompt"], add_generation_prompt=True, return_dict=False)) for r in rows()
    ]
    num_fits = sum(length <= 150 for length in lengths)
    assert len(RLHFDataset(parquet, tiny_tokenizer(), config)) == num_fits < 3
    assert f"{3 - num_fits} of 3 rows are dropped" in caplog.text


def test_columns_of_a_batch_are_tensors_or_objects() -> None:
    batch = collate_fn([{"a": torch.tensor([i]), "b": [1, 2], "c": {"d": i}} for i in range(2)])
    assert batch["a"].tolist() == [[0], [1]]
    assert batch["b"].shape == (2,) and batch["c"].dtype == np.dtype(object)


def test_own_class_gives_the_tasks_of_a_run(custom: Path) -> None:
    tasks = custom_tasks(cls=f"{custom}:Listed", files=["a", "b"], split="train", config=CONFIG)
    assert [t.id for t in tasks] == ["train-0", "train-1"]
    task = tasks[1]
    assert (task.prompt[0].text, task.data_source, task.ground_truth) == ("b 64?", "own", "1")
    assert task.tools is None and task.extra["agent_name"] == "tool_agent" and task.extra["index"] == 1
    assert task.interaction is not None and dict(task.interaction.kwargs) == {"name": "mine", "level": 7}
    assert custom_tasks(cls=f"{custom}:Plain", files=["a"], split="x", config={})[0].prompt[0].text == "q"


@pytest.mark.parametrize(
    ("name", "error", "words"),
    [
        ("Failing", ConfigError, r"data\.custom_cls .*Failing.*KeyError"),
        ("not_a_class", ConfigError, r"torch\.utils\.data\.Dataset"),
        ("Listd", ConfigError, "'Listed'"),
        ("WithoutMessages", DataError, r"row 0.*raw_prompt.*\['input_ids'\]"),
        ("Nothing", DataError, "row 0.*None"),
        ("Rows", DataError, "row 0.*KeyError: 'prompt'"),
    ],
)
def test_mistakes_of_a_dataset_are_named(custom: Path, name: str, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        _ = custom_tasks(cls=f"{custom}:{name}", files=["a"], split="train", config=CONFIG)[0]


def test_config_that_names_a_class_opens_its_tasks(custom: Path, tmp_path: Path) -> None:
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    own = [f"data.custom_cls.path={custom}", "data.custom_cls.name=Plain", "data.train_files=[a,b]", "data.val_files=c"]
    tree = compose_name("ppo_trainer", folder=None, overrides=[f"actor_rollout_ref.model.path={tmp_path}/model", *own])
    translation = translate(tree)
    config = load_values(RunConfig, translation.native, origin=translation.origin).config
    tasks = build_run_tasks(ConfigSource(config=config, base=tmp_path))
    assert [task.id for task in tasks.train] == ["train-0", "train-1"]
    assert [task.id for task in tasks.eval_sets[0].tasks] == ["validation-0"]


def test_section_names_the_class(custom: Path) -> None:
    assert get_dataset_class(OmegaConf.create({"custom_cls": {"path": None}})) is RLHFDataset
    found = get_dataset_class(OmegaConf.create({"custom_cls": {"path": str(custom), "name": "Plain"}}))
    assert found.__name__ == "Plain"
