"""verl's batches, tensordicts, metrics and small helpers, as projects use them."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from polyturn.compat.verl import tensordict_utils as tu
from polyturn.compat.verl.import_utils import load_extern_object
from polyturn.compat.verl.metric import Metric, reduce_metrics
from polyturn.compat.verl.metric_utils import compute_data_metrics, process_validation_metrics
from polyturn.compat.verl.protocol import DataProto, collate_fn, pad_dataproto_to_divisor, union_numpy_dict, unpad_dataproto
from polyturn.compat.verl.py_functional import append_to_dict, temp_env_var, timeout_limit

pytestmark = pytest.mark.timeout(300)  # the first test imports torch's compiler


def batch() -> DataProto:
    return DataProto.from_dict({"ids": torch.arange(6).reshape(3, 2)}, {"uid": ["a", "b", "c"], "said": [[1], [2], [3]]})


def test_batch_survives_a_tensordict_and_a_file(tmp_path: Path) -> None:
    data = DataProto.from_dict({"ids": torch.arange(4).reshape(2, 2)}, {"scores": [[], [0.5]]}, {"step": 3})
    data.save_to_disk(tmp_path / "batch")
    for same in (DataProto.from_tensordict(data.to_tensordict()), DataProto.load_from_disk(tmp_path / "batch")):
        assert same.batch["ids"].tolist() == [[0, 1], [2, 3]] and same.meta_info == {"step": 3}
        assert same.non_tensor_batch["scores"].tolist() == [[], [0.5]]
    with pytest.raises(AssertionError, match="one axis of rows"):
        DataProto.from_dict({"ids": torch.zeros(2, 2)}, num_batch_dims=2)


def test_rows_are_taken_padded_repeated_and_drawn() -> None:
    data = batch()
    assert len(data) == 3
    assert data[1].batch["ids"].tolist() == [2, 3]
    assert data[1].non_tensor_batch["said"] == [2]
    assert data[[2, 0]].non_tensor_batch["uid"].tolist() == ["c", "a"]
    assert data[torch.tensor([True, False, True])].batch["ids"][:, 0].tolist() == [0, 4]
    assert [len(part) for part in (*data.split(2), data[1:])] == [2, 1, 2]
    assert data.repeat(2).non_tensor_batch["uid"].tolist() == [*"aabbcc"]
    assert DataProto.concat([data[:1], data[2:]]).batch["ids"].tolist() == [[0, 1], [4, 5]]
    assert collate_fn([data[0], data[2]]).non_tensor_batch["uid"].tolist() == ["a", "c"]
    with pytest.raises(ValueError, match="DataProto 3 and chunk 2"):
        data.chunk(2)
    with pytest.raises(TypeError):
        data["ids"]
    padded, missing = pad_dataproto_to_divisor(data, 2)
    assert missing == 1 and padded.non_tensor_batch["uid"].tolist() == [*"abca"]
    assert unpad_dataproto(padded, missing).non_tensor_batch["uid"].tolist() == [*"abc"]
    assert data.sample_level_repeat([2, 0, 1]).non_tensor_batch["uid"].tolist() == [*"aac"]
    drawn = [
        [*part.non_tensor_batch["uid"]] for part in data.make_iterator(1, 2, seed=1, dataloader_kwargs={"shuffle": True})
    ]
    assert sorted(uid for uids in drawn for uid in uids) == [*"aabbcc"]
    data.reorder([2, 1, 0])
    assert data.batch["ids"][:, 0].tolist() == [4, 2, 0]
    with pytest.raises(AssertionError, match="not the same"):
        union_numpy_dict({"a": np.array([1.0, np.nan])}, {"a": np.array([1.0, 2.0])})
    assert union_numpy_dict({"a": np.array([np.nan])}, {"a": np.array([np.nan])}).keys() == {"a"}


def test_columns_are_taken_out_and_in() -> None:
    data = batch()
    taken = data.pop(batch_keys=["ids"], non_tensor_batch_keys=["said"])
    assert list(data.non_tensor_batch) == ["uid"]
    assert taken.batch["ids"].shape == data.union(taken).batch["ids"].shape == (3, 2)
    with pytest.raises(ValueError, match="`ids`"):
        data.union(DataProto.from_dict({"ids": torch.zeros(3, 2)}))
    with pytest.raises(ValueError, match="'uid' has 2 rows where the batch has 3"):
        DataProto(data.batch, {"uid": np.array(["a", "b"])})
    with pytest.raises(ValueError, match="rows"):
        DataProto.from_dict({"a": torch.zeros(3), "b": torch.zeros(2)})


def test_metrics_become_lists_and_facts_must_agree() -> None:
    one, two = batch(), batch()
    one.meta_info, two.meta_info = {"metrics": {"loss": 1.0}, "t": 1}, {"metrics": [{"loss": 2.0}], "t": 1}
    assert DataProto.concat([one, two]).meta_info == {"metrics": {"loss": [1.0, 2.0]}, "t": 1}
    two.meta_info = {"t": 2}
    with pytest.raises(ValueError, match="Conflicting values for meta_info key 't'"):
        DataProto.concat([one, two])


def test_tensordict_holds_ragged_tensors_lists_and_facts() -> None:
    """The ragged axis is kept where rows of one length are drawn, so that their shapes do not tell which axis it is."""
    rows = [torch.randn(shape) for shape in [(4, 5), (4, 5), (4, 3)]]
    ragged = tu.nested_tensor_from_tensor_list(rows)
    td = tu.get_tensordict({"x": ragged, "said": [[], [1], [2]]}, {"step": 4})
    parts = tu.chunk_tensordict(td, 3)
    assert [tu.get(part, "said") for part in parts] == [[[]], [[1]], [[2]]]
    tu.assert_tensordict_eq(tu.concat_tensordict(parts), td)
    drawn = tu.index_select_tensor_dict(td, [0, 1])
    whole = tu.concat_tensordict([drawn, tu.index_select_tensor_dict(td, [2])])
    assert all(torch.equal(a, b) for a, b in zip(whole["x"].unbind(), rows, strict=True))
    assert tu.get(whole, "step") == tu.pop(td, "step") == 4
    assert tu.get(td, "step", 0) == 0
    assert tu.get(tu.pop(tu.assign_non_tensor_dict(td, {"c": [1]}), keys=["said", "c"]), "c") == [1]
    with pytest.raises(AssertionError, match="not consistent"):
        tu.get_tensordict({"a": torch.zeros(2), "b": [1]})
    with pytest.raises(AssertionError, match="ragged_idx is 3"):
        tu.nested_tensor_from_tensor_list(rows, ragged_idx=3)
    data = DataProto()
    data.__setstate__(batch().__getstate__())
    assert data.batch["ids"].tolist() == batch().batch["ids"].tolist()


def test_metrics_are_collected_and_reduced() -> None:
    found: dict[str, object] = {}
    for value in (1.0, 3.0):
        append_to_dict(found, {"loss": Metric("sum", torch.tensor(value)), "time_max": value, "mean": value})
    assert reduce_metrics(found) == {"loss": 4.0, "time_max": 3.0, "mean": 2.0}
    assert Metric.aggregate_dp([Metric("sum", 1.0), Metric("sum", 3.0)]) == 2.0
    with pytest.raises(ValueError, match="as many numbers"):
        Metric.aggregate_dp([])


def test_metrics_of_a_batch_and_of_a_validation() -> None:
    ones = torch.ones(2, 2)
    tensors = dict.fromkeys(("token_level_scores", "token_level_rewards", "advantages", "returns", "responses"), ones)
    attention = torch.tensor([[0, 1, 1, 1], [1, 1, 0, 0]])
    data = DataProto.from_dict({**tensors, "attention_mask": attention}, {"__num_turns__": np.array([2, 4])})
    found = compute_data_metrics(data, use_critic=False)
    assert found["critic/score/mean"] == 2 and found["response/aborted_ratio"] == 0.5 and found["num_turns/mean"] == 3
    assert found["response_length/mean"] == 1 and found["response_length_non_aborted/mean"] == 2
    table = process_validation_metrics(["s", "s", "s"], ["a", "a", "b"], {"acc": [1.0, 0.0, 1.0], "pred": ["1", "2", "1"]})
    assert table["s"]["acc"]["mean@2"] == 0.5 and table["s"]["acc"]["mean@1"] == 1.0 and "pred" not in table["s"]
    counted = process_validation_metrics(["s"], ["a"], {"acc": [1.0]}, expected_acc_counts={("s", "a"): 4})
    assert counted["s"]["acc"]["mean@4"] == 0.25 and counted["s"]["acc_success_only"]["mean@1"] == 1.0


@pytest.mark.parametrize("use_signals", [False, True])
def test_timeout_ends_a_hanging_call_alone(use_signals: bool) -> None:
    with pytest.raises(TimeoutError, match=r"wait timed out after 0.2 seconds"):
        timeout_limit(0.2, use_signals)(threading.Event().wait)()
    assert timeout_limit(60, use_signals)(len)("abc") == 3
    with pytest.raises(ValueError, match="no number"):
        timeout_limit(60, use_signals)(_fail)()


def _fail() -> None:
    raise ValueError("no number")


def test_objects_are_loaded_from_files(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("VALUE = 3\n")
    assert load_extern_object(str(tmp_path / "mine.py"), "VALUE") == 3
    with pytest.raises(AttributeError):
        load_extern_object(str(tmp_path / "mine.py"), "NONE")
    (tmp_path / "bad.py").write_text("1 / 0\n")
    with pytest.raises(RuntimeError, match="division by zero"):
        load_extern_object(str(tmp_path / "bad.py"), "VALUE")
    with temp_env_var("POLYTURN_TEST", "1"):
        assert os.environ["POLYTURN_TEST"] == "1"
    assert "POLYTURN_TEST" not in os.environ
