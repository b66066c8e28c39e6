"""New weights as a checkpoint, written once for all servers."""

import json
import signal

import pytest
import torch
from safetensors.torch import load_file

from polyturn.engines.weight_files import WeightFolder
from support.forked import run_program

pytestmark = pytest.mark.timeout(300)  # it starts processes that import torch


def test_newer_weights_replace_older_ones_and_tied_are_one(tmp_path):
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


def test_weights_of_a_killed_process_alone_are_removed(tmp_path):
    (tmp_path / "polyturn-weights-of-an-older-version").mkdir()
    with WeightFolder(tmp_path, root=tmp_path):
        living = set(tmp_path.iterdir())
        assert run_program(OWNER, tmp_path).returncode == -signal.SIGKILL
        (killed,) = set(tmp_path.iterdir()) - living
        with WeightFolder(tmp_path, root=tmp_path):
            (own,) = set(tmp_path.iterdir()) - living
        assert own != killed
    assert [p.name for p in tmp_path.iterdir()] == ["polyturn-weights-of-an-older-version"]
