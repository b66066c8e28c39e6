"""What cannot work is refused before a model is made: here the model cannot be made at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

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


def test_resume_with_other_groups_is_refused_before_the_model_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = write_tiny_run(tmp_path)
    assert call_command(main, "train", config, "train.steps=1", "evaluation.data=null").code == 0

    def build_model(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("the model is made")

    monkeypatch.setattr("polyturn.build.parts.build_model", build_model)
    called = call_command(main, "train", config, "train.steps=2", "train.groups_per_step=1", "--resume")
    assert called.code == 2 and "train.groups_per_step 2 and this run has 1" in called.err
    assert "resumed with another setting" not in called.err
