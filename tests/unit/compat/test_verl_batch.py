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
from polyturn.compat.verl.protocol import DataProto, pad_dataproto_to_divisor, union_numpy_dict, unpad_dataproto
from polyturn.compat.verl.py_functional import append_to_dict, temp_env_var, timeout_limit


def batch() -> DataProto:
    return DataProto.from_dict({"ids": torch.arange(6).reshape(3, 2)}, {"uid": ["a", "b", "c"], "said": [[1], [2], [3]]})


def test_a_batch_goes_to_a_tensordict_and_a_file_and_back(tmp_path: Path) -> None:
    data = DataProto.from_dict({"ids": torch.arange(4).reshape(2, 2)}, {"scores": [[], [0.5]]}, {"step": 3})
    data.save_to_disk(tmp_path / "batch")
    for same in (DataProto.from_tensordict(data.to_tensordict()), DataProto.load_from_disk(tmp_path / "batch")):
        assert same.batch["ids"].tolist() == [[0, 1], [2, 3]] and same.meta_info == {"step": 3}
        assert same.non_tensor_batch["scores"].tolist() == [[], [0.5]]
    with pytest.raises(AssertionError, match="one axis of rows"):
        DataProto.from_dict({"ids": torch.zeros(2, 2)}, num_batch_dims=2)


def test_rows_are_padded_repeated_and_drawn() -> None:
    data = batch()
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


def test_metrics_of_several_batches_become_lists_and_facts_must_agree() -> None:
    one, two = batch(), batch()
    one.meta_info, two.meta_info = {"metrics": {"loss": 1.0}, "t": 1}, {"metrics": [{"loss": 2.0}], "t": 1}
    assert DataProto.concat([one, two]).meta_info == {"metrics": {"loss": [1.0, 2.0]}, "t": 1}
    two.meta_info = {"t": 2}
    with pytest.raises(ValueError, match="Conflicting values for meta_info key 't'"):
        DataProto.concat([one, two])


def test_a_tensordict_holds_ragged_tensors_lists_and_facts() -> None:
    ragged = torch.nested.as_nested_tensor([torch.arange(n) for n in (1, 2, 3)], layout=torch.jagged)
    td = tu.get_tensordict({"ids": ragged, "said": [[], [1], [2]]}, {"step": 4})
    parts = tu.chunk_tensordict(td, 3)
    assert [tu.get(part, "said") for part in parts] == [[[]], [[1]], [[2]]]
    whole = tu.concat_tensordict(parts)
    assert [row.tolist() for row in whole["ids"].unbind()] == [[0], [0, 1], [0, 1, 2]] and tu.get(whole, "step") == 4
    tu.assert_tensordict_eq(whole, td)
    assert tu.pop(td, "step") == 4 and tu.get(td, "step", 0) == 0
    with pytest.raises(AssertionError, match="not consistent"):
        tu.get_tensordict({"a": torch.zeros(2), "b": [1]})


def test_the_ragged_axis_of_rows_is_kept_where_rows_are_drawn_and_joined() -> None:
    """Also where the rows that are drawn have one length, so that their shapes do not tell which axis it is."""
    for axis, shapes in ((1, [(5, 4), (5, 4), (3, 4)]), (2, [(4, 5), (4, 5), (4, 3)])):
        rows = [torch.randn(shape) for shape in shapes]
        td = tu.get_tensordict({"x": tu.nested_tensor_from_tensor_list(rows)})
        drawn = tu.index_select_tensor_dict(td, [0, 1])
        assert drawn["x"]._ragged_idx == axis
        whole = tu.concat_tensordict([drawn, tu.index_select_tensor_dict(td, [2])])
        assert all(torch.equal(a, b) for a, b in zip(whole["x"].unbind(), rows, strict=True))
    with pytest.raises(AssertionError, match="ragged_idx is 3"):
        tu.nested_tensor_from_tensor_list(rows, ragged_idx=3)


def test_names_of_other_releases_do_the_same() -> None:
    td = tu.assign_non_tensor_dict(tu.get_tensordict({"a": torch.zeros(2), "b": ["x", "y"]}), {"c": [1]})
    assert tu.get(td, "c") == [1]
    taken = tu.pop(td, keys=["b", "c"])
    assert tu.get(taken, "b") == ["x", "y"] and list(td.keys()) == ["a"]
    data = DataProto()
    data.__setstate__(batch().__getstate__())
    assert data.batch["ids"].tolist() == batch().batch["ids"].tolist()


def test_numbers_are_collected_and_reduced() -> None:
    found: dict[str, object] = {}
    for value in (1.0, 3.0):
        append_to_dict(found, {"loss": Metric("sum", torch.tensor(value)), "time_max": value, "mean": value})
    assert reduce_metrics(found) == {"loss": 4.0, "time_max": 3.0, "mean": 2.0}
    assert Metric.aggregate_dp([Metric("sum", 1.0), Metric("sum", 3.0)]) == 2.0
    with pytest.raises(ValueError, match="as many numbers"):
        Metric.aggregate_dp([])


def test_the_numbers_of_a_batch_and_of_a_validation() -> None:
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
def test_a_call_that_never_ends_is_ended(use_signals: bool) -> None:
    with pytest.raises(TimeoutError, match=r"wait timed out after 0.2 seconds"):
        timeout_limit(0.2, use_signals)(threading.Event().wait)()
    assert timeout_limit(60, use_signals)(len)("abc") == 3
    with pytest.raises(ValueError, match="no number"):
        timeout_limit(60, use_signals)(_fail)()


def _fail() -> None:
    raise ValueError("no number")


def test_objects_are_loaded_from_files_and_variables_set_for_a_while(tmp_path: Path) -> None:
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
