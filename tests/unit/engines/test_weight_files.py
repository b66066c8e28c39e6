"""New weights as a checkpoint: written once, and while they are pushed still the trainer's own tensors."""

import json
import signal

import pytest
import torch
from safetensors.torch import load_file

from polyturn.core.errors import EngineError
from polyturn.engines.weight_files import WeightFolder
from support.forked import run_program


def test_what_is_pushed_is_the_trainers_own_and_what_is_given_later_was_written(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({}))
    own = torch.ones(3)
    with WeightFolder(tmp_path, root=tmp_path) as files:
        written = files.write({"w": own, "tied": own})
        assert written["w"].data_ptr() == own.data_ptr()
        assert list(written) == ["w"]
        written.settle()
        own.add_(1)  # the next optimizer step
        assert written["w"].tolist() == [1, 1, 1]
        assert load_file(written.folder / "model.safetensors").keys() == {"w"}
    assert not written.folder.exists()


def test_what_newer_weights_replaced_before_anybody_read_it_is_said_in_a_sentence(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({}))
    with WeightFolder(tmp_path, root=tmp_path) as files:
        written = files.write({"w": torch.ones(3)})
        written.settle()
        files.write({"w": torch.zeros(3)})
        with pytest.raises(EngineError, match="have been replaced by newer ones"):
            dict(written)


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
