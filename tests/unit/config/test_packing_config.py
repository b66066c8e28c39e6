"""How samples lie in a micro-batch, from the configuration to the policy."""

import pytest
from pydantic import ValidationError

from polyturn.config.models import ModelConfig, TrainConfig


def test_prefixes_are_shared_and_the_layout_chosen_by_default():
    train = TrainConfig()
    assert (train.layout.name, train.layout.shared_prefix) == ("auto", "auto")
    model = ModelConfig(path="somewhere")
    assert not model.gradient_checkpointing


def test_unknown_layouts_are_refused():
    with pytest.raises(ValidationError, match="'auto', 'rows' or 'packed'"):
        TrainConfig(layout="dense")  # type: ignore[arg-type]
    with pytest.raises(ValidationError, match="'auto' or 'off'"):
        TrainConfig(layout={"shared_prefix": "on"})  # type: ignore[arg-type]
