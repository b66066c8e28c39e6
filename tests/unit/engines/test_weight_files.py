"""New weights as a checkpoint: written once, and while they are pushed still the trainer's own tensors."""

import json

import pytest
import torch
from safetensors.torch import load_file

from polyturn.core.errors import EngineError
from polyturn.engines.weight_files import WeightFolder


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
