"""verl's batches and small helpers, as projects use them."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from polyturn import compat
from polyturn.compat.verl.dataproto import DataProto, collate_fn, pad_dataproto_to_divisor, unpad_dataproto
from polyturn.compat.verl.import_utils import load_extern_object
from support.refusals import refuses

pytestmark = pytest.mark.timeout(300)  # the first test imports torch's compiler


def batch() -> DataProto:
    return DataProto.from_dict({"ids": torch.arange(6).reshape(3, 2)}, {"uid": ["a", "b", "c"], "said": [[1], [2], [3]]})


def test_batch_survives_a_tensordict_and_pickle() -> None:
    data = DataProto.from_dict({"ids": torch.arange(4).reshape(2, 2)}, {"scores": [[], [0.5]]}, {"step": 3})
    same = pickle.loads(pickle.dumps(data))
    assert same.batch["ids"].tolist() == [[0, 1], [2, 3]] and same.meta_info == {"step": 3}
    assert same.non_tensor_batch["scores"].tolist() == [[], [0.5]]
    assert DataProto.from_tensordict(data.batch, {"step": 3}).batch["ids"].tolist() == [[0, 1], [2, 3]]
    refuses(lambda: DataProto.from_dict({"ids": torch.zeros(2, 2)}, num_batch_dims=2), AssertionError, "one axis of rows")


def test_rows_are_taken_padded_repeated_and_drawn() -> None:
    data = batch()
    assert len(data) == 3
    assert data[1].batch["ids"].tolist() == [2, 3]
    assert data[1].non_tensor_batch["said"] == [2]
    assert data[[2, 0]].non_tensor_batch["uid"].tolist() == ["c", "a"]
    assert data[torch.tensor([True, False, True])].batch["ids"][:, 0].tolist() == [0, 4]
    assert len(data[1:]) == 2 and len(data[[]]) == len(data.select_idxs(torch.tensor([]))) == 0
    assert data.repeat(2).non_tensor_batch["uid"].tolist() == [*"aabbcc"]
    assert DataProto.concat([data[:1], data[2:]]).batch["ids"].tolist() == [[0, 1], [4, 5]]
    assert collate_fn([data[0], data[2]]).non_tensor_batch["uid"].tolist() == ["a", "c"]
    with pytest.raises(TypeError):
        data["ids"]
    padded, missing = pad_dataproto_to_divisor(data, 2)
    assert missing == 1 and padded.non_tensor_batch["uid"].tolist() == [*"abca"]
    assert unpad_dataproto(padded, missing).non_tensor_batch["uid"].tolist() == [*"abc"]


def test_columns_are_taken_out_and_in() -> None:
    data = batch()
    taken = data.pop(batch_keys=["ids"], non_tensor_batch_keys=["said"])
    assert list(data.non_tensor_batch) == ["uid"]
    assert taken.batch["ids"].shape == data.union(taken).batch["ids"].shape == (3, 2)
    refuses(lambda: data.union(DataProto.from_dict({"ids": torch.zeros(3, 2)})), ValueError, "`ids`")
    refuses(
        lambda: DataProto(data.batch, {"uid": np.array(["a", "b"])}), ValueError, "'uid' has 2 rows, but the batch has 3"
    )
    refuses(lambda: DataProto.from_dict({"a": torch.zeros(3), "b": torch.zeros(2)}), ValueError, "rows")
    refuses(lambda: batch().union(DataProto.from_dict(non_tensors={"k": [1, 2]})), ValueError, "'k' has 2 rows")
    refuses(lambda: DataProto.concat([data.select(None, ["uid"]), data]), ValueError, "different columns", "'said'")


def test_facts_of_joined_batches_agree() -> None:
    one, two = batch(), batch()
    one.meta_info, two.meta_info = {"t": np.array([1.0, np.nan])}, {"t": np.array([1.0, np.nan]), "u": [1, {"a": 2}]}
    assert DataProto.concat([one, two]).meta_info.keys() == {"t", "u"}
    two.meta_info = {"t": 2}
    refuses(lambda: DataProto.concat([one, two]), ValueError, "Conflicting values for meta_info key 't'")


def test_metrics_of_joined_batches_become_lists() -> None:
    one, two, three = batch(), batch(), batch()
    one.meta_info, two.meta_info = {"metrics": {"loss": 1.0, "lr": 0.1}}, {"metrics": [{"loss": 2.0}, {"loss": 3.0}]}
    three.meta_info = {"metrics": None}
    assert DataProto.concat([one, two, three]).meta_info == {"metrics": {"loss": [1.0, 2.0, 3.0], "lr": [0.1]}}
    assert DataProto.concat([three]).meta_info == {}
    two.meta_info["metrics"].append({"grad": 1.0})
    refuses(lambda: DataProto.concat([one, two]), ValueError, "'grad'")


def test_values_of_a_mixed_dict_are_tensors_or_arrays() -> None:
    data = DataProto.from_single_dict({"ids": torch.zeros(2, 1), "uid": np.array(["a", "b"], dtype=object)})
    assert data.batch["ids"].shape == (2, 1) and data.non_tensor_batch["uid"].tolist() == ["a", "b"]
    refuses(lambda: DataProto.from_single_dict({"uid": ["a", "b"]}), ValueError, "'uid' is a list", "NumPy array")


@pytest.mark.parametrize("name", ["chunk", "make_iterator", "save_to_disk", "to_tensordict"])
def test_method_for_workers_is_refused_by_name(name: str) -> None:
    with pytest.raises(AttributeError, match=f"'{name}' here: it sends"):
        getattr(batch(), name)


@pytest.mark.parametrize(
    "line",
    [
        "from verl.protocol import DataProtoFuture",
        "from verl import DataProtoFuture",
        "from verl.utils import tensordict_utils",
        "import verl.utils.py_functional",
        "from verl.utils.metric import reduce_metrics",
        "from verl.trainer.ppo.metric_utils import compute_data_metrics",
        "from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_add_to_batch",
        "from verl.trainer.config.algorithm import RolloutCorrectionConfig",
        "from verl.workers.rollout.schemas import AsyncRolloutRequest",
        "from verl.trainer.main_ppo import TaskRunner",
        "from verl.workers.config import HFModelConfig",
    ],
)
def test_import_of_a_trainers_part_says_why(line: str) -> None:
    compat.install("verl")
    with pytest.raises(ImportError, match="stands in for verl, does not offer it") as told:
        exec(line)
    module, name = line.split()[1], line.split()[-1]
    assert name in str(told.value) or module in str(told.value)


def test_objects_are_loaded_from_files(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("VALUE = 3\n")
    assert load_extern_object(str(tmp_path / "mine.py"), "VALUE") == 3
    with pytest.raises(AttributeError):
        load_extern_object(str(tmp_path / "mine.py"), "NONE")
    (tmp_path / "bad.py").write_text("1 / 0\n")
    refuses(lambda: load_extern_object(str(tmp_path / "bad.py"), "VALUE"), RuntimeError, "division by zero")
