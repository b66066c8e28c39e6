"""Names that lead nowhere are refused before a model is made: here the model cannot be made at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from polyturn.cli.main import main
from support.runs import call_command, write_tiny_run


@pytest.mark.parametrize(
    ("setting", "key"),
    [
        ("rollout.parser=hermess", "rollout.parser"),
        ("algorithm.loss_scale=last_rund", "algorithm.loss_scale"),
        ("model.chat_template=hermess", "model.chat_template"),
    ],
)
def test_wrong_name_is_refused_before_the_model_is_made(tmp_path: Path, setting: str, key: str) -> None:
    called = call_command(main, "train", write_tiny_run(tmp_path), "model.init.num_attention_heads=0", setting)
    assert called.code == 2
    assert key in called.err and setting.partition("=")[2] in called.err
