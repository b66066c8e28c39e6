"""A checkpoint's shards are data: nothing in them runs."""

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from polyturn.core.errors import CheckpointError
from polyturn.training import shard_reader
from polyturn.training.shards import read_shards, stored_kinds
from support.refusals import refuses


class MakesFolder:
    """Unpickling it makes a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.folder),)


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    folder = tmp_path / "policy"
    state = {"weight": torch.arange(6.0).reshape(2, 3), "half": torch.ones(2, dtype=torch.bfloat16), "step": 3}
    dcp.save(state, checkpoint_id=folder, no_dist=True)
    return folder


def test_tensors_and_numbers_come_back(shards: Path) -> None:
    state = {"weight": torch.zeros(2, 3), "half": torch.zeros(2, dtype=torch.bfloat16), "step": 0}
    read_shards(state, shards)
    assert torch.equal(state["weight"], torch.arange(6.0).reshape(2, 3))
    assert state["step"] == 3
    assert stored_kinds(shards)["half"].dtype == torch.bfloat16


@pytest.mark.parametrize("read", [stored_kinds, lambda folder: read_shards({"weight": torch.zeros(2, 3)}, folder)])
def test_metadata_with_code_is_refused_and_does_not_run(shards: Path, tmp_path: Path, read: Any) -> None:
    (shards / shard_reader.METADATA).write_bytes(pickle.dumps(MakesFolder(tmp_path / "ran")))
    refuses(lambda: read(shards), CheckpointError, "mkdir")
    assert not (tmp_path / "ran").exists()


def test_value_with_code_is_refused_and_does_not_run(tmp_path: Path) -> None:
    folder = tmp_path / "policy"
    dcp.save({"step": MakesFolder(tmp_path / "ran")}, checkpoint_id=folder, no_dist=True)
    with pytest.raises(CheckpointError):
        read_shards({"step": 0}, folder)
    assert not (tmp_path / "ran").exists()


def test_metadata_of_another_type_is_refused(shards: Path) -> None:
    (shards / shard_reader.METADATA).write_bytes(pickle.dumps({"state_dict_metadata": {}}))
    refuses(lambda: stored_kinds(shards), CheckpointError, "dict")
