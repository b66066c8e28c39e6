"""Modules of verl that users' files import beside the classes that they inherit: batches, files, managers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import polyturn.compat.verl
from polyturn import compat
from polyturn.compat.verl import hdfs_io, reward_manager
from polyturn.compat.verl.protocol import DataProto, collate_fn
from polyturn.compat.verl.tokenizer import normalize_token_ids
from polyturn.core.errors import ConfigError, UnknownNameError


def batch() -> DataProto:
    return DataProto.from_dict({"ids": torch.arange(6).reshape(3, 2)}, {"uid": ["a", "b", "c"], "said": [[1], [2], [3]]})


def test_users_files_find_their_names() -> None:
    compat.install("verl")
    names: dict[str, object] = {}
    exec(
        "from verl import DataProto\n"
        "from verl.protocol import DataProtoItem\n"
        "from verl.utils import hf_tokenizer, hf_processor\n"
        "from verl.utils.hdfs_io import copy, makedirs\n"
        "from verl.workers.reward_manager import register\n"
        "from verl.workers.reward_manager.abstract import AbstractRewardManager\n"
        "from verl.tools.function_tool import FUNCTION_TOOL_REGISTRY\n"
        "from verl.experimental.agent_loop.tool_agent_loop import AgentState\n"
        "from verl.experimental.agent_loop.utils import resolve_config_path\n"
        "from verl.experimental.agent_loop.tool_parser import HermesToolParser, Qwen3XMLToolParser\n",
        names,
    )
    assert names["DataProto"] is DataProto


def test_a_process_that_runs_as_verl_finds_the_batch() -> None:
    shims = Path(polyturn.compat.__file__).parent / "shims"
    code = "from verl import DataProto; import verl.protocol; assert DataProto is verl.protocol.DataProto"
    subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(shims)}, check=True)


def test_a_batch_gives_rows_and_parts() -> None:
    data = batch()
    assert len(data) == 3 and data[1].batch["ids"].tolist() == [2, 3] and data[1].non_tensor_batch["said"] == [2]
    assert data[[2, 0]].non_tensor_batch["uid"].tolist() == ["c", "a"]
    assert data[torch.tensor([True, False, True])].batch["ids"][:, 0].tolist() == [0, 4]
    assert [len(part) for part in data.split(2)] == [2, 1] and len(data[1:]) == 2
    assert data.repeat(2).non_tensor_batch["uid"].tolist() == [*"aabbcc"]
    assert DataProto.concat([data[:1], data[2:]]).batch["ids"].tolist() == [[0, 1], [4, 5]]
    assert collate_fn([data[0], data[2]]).non_tensor_batch["uid"].tolist() == ["a", "c"]
    with pytest.raises(ValueError, match="3 rows cannot be parted into 2"):
        data.chunk(2)
    with pytest.raises(TypeError, match="not supported"):
        data["ids"]


def test_columns_are_taken_out_and_in() -> None:
    data = batch()
    taken = data.pop(batch_keys=["ids"], non_tensor_batch_keys=["said"])
    assert list(data.non_tensor_batch) == ["uid"] and taken.batch["ids"].shape == (3, 2)
    assert data.union(taken).batch["ids"].shape == (3, 2)
    with pytest.raises(ValueError, match="'ids' is in both batches"):
        data.union(DataProto.from_dict({"ids": torch.zeros(3, 2)}))
    with pytest.raises(ValueError, match="'uid' has 2 rows where the batch has 3"):
        DataProto(data.batch, {"uid": np.array(["a", "b"])})
    with pytest.raises(ValueError, match="as many rows"):
        DataProto.from_dict({"a": torch.zeros(3), "b": torch.zeros(2)})


def test_files_of_this_machine_are_copied_and_those_of_hdfs_refused(tmp_path: Path) -> None:
    hdfs_io.makedirs(str(tmp_path / "a" / "b"))
    (tmp_path / "a" / "b" / "f").write_text("x")
    hdfs_io.copy(str(tmp_path / "a"), str(tmp_path / "c"))
    assert hdfs_io.exists(str(tmp_path / "c" / "b" / "f")) and not hdfs_io.exists(str(tmp_path / "d"))
    with pytest.raises(ConfigError, match="HDFS"):
        hdfs_io.makedirs("hdfs://host/a")


def test_managers_are_registered_once() -> None:
    class One: ...

    assert reward_manager.register("in_test")(One) is One and reward_manager.get_reward_manager_cls("in_test") is One
    with pytest.raises(ValueError, match="already been registered"):
        reward_manager.register("in_test")(int)
    with pytest.raises(UnknownNameError, match="Unknown reward manager: in_tst"):
        reward_manager.get_reward_manager_cls("in_tst")


def test_ids_are_read_from_whatever_a_tokenizer_returns() -> None:
    for given in ([1, 2], (1, 2), [[1, 2]], {"input_ids": [1, 2]}, torch.tensor([[1, 2]])):
        assert normalize_token_ids(given) == [1, 2]
    with pytest.raises(TypeError, match="list-like"):
        normalize_token_ids("ab")
