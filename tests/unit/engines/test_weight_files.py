"""New weights as a checkpoint, written once for all servers."""

import json
import signal

import pytest
import torch
from safetensors.torch import load_file

from polyturn.engines.weight_files import WeightFolder
from support.forked import run_program

pytestmark = pytest.mark.timeout(300)  # it starts processes that import torch


def test_a_tied_tensor_is_written_once_and_newer_weights_take_the_place_of_older_ones(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({}))
    own = torch.ones(3)
    with WeightFolder(tmp_path, root=tmp_path) as files:
        first = files.write({"w": own, "tied": own})
        assert load_file(first.folder / "model.safetensors").keys() == {"w"}
        second = files.write({"w": own})
        assert not first.folder.exists() and second.folder.exists()
    assert not second.folder.exists()


OWNER = """
import os, pathlib, signal, sys
from polyturn.engines.weight_files import WeightFolder
WeightFolder(pathlib.Path(sys.argv[1]), root=pathlib.Path(sys.argv[1]))
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_who_starts_next_removes_the_weights_of_a_process_that_was_killed_and_of_no_other(tmp_path):
    (tmp_path / "polyturn-weights-of-an-older-version").mkdir()
    with WeightFolder(tmp_path, root=tmp_path):
        living = set(tmp_path.iterdir())
        assert run_program(OWNER, tmp_path).returncode == -signal.SIGKILL
        assert len(set(tmp_path.iterdir()) - living) == 1, "a killed process removes nothing"
        with WeightFolder(tmp_path, root=tmp_path) as third:
            assert set(tmp_path.iterdir()) - living == {third._root}
    assert [p.name for p in tmp_path.iterdir()] == ["polyturn-weights-of-an-older-version"]
