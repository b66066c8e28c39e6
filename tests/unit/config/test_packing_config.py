"""How samples lie in a micro-batch, from the configuration to the policy."""

import pytest
from pydantic import TypeAdapter, ValidationError

from polyturn.config.models import ModelConfig
from polyturn.training.options import TrainOptions


def test_prefixes_are_shared_and_the_layout_chosen_by_default():
    train = TrainOptions()
    assert (train.layout.name, train.layout.shared_prefix) == ("auto", "auto")
    model = ModelConfig(path="somewhere")
    assert not model.gradient_checkpointing


def test_unknown_layouts_are_refused():
    with pytest.raises(ValidationError, match="'auto', 'rows' or 'packed'"):
        TypeAdapter(TrainOptions).validate_python({"layout": "dense"})
    with pytest.raises(ValidationError, match="'auto' or 'off'"):
        TypeAdapter(TrainOptions).validate_python({"layout": {"shared_prefix": "on"}})
