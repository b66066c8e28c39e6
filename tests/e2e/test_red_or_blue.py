"""A vision model trains through the command line: a picture is red or blue, and the partner shows another one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from polyturn.cli.main import main
from polyturn.store.stored_run import open_store
from support.runs import call_command, trained_steps
from support.vision_run import write_vision_run


def test_vision_model_trains(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    config = write_vision_run(tmp_path)
    called = call_command(main, "train", config)
    assert called.code == 0, called.err
    run = tmp_path / "runs" / "seeing"
    steps = trained_steps(run)
    assert len(steps) == 2
    for step in steps:
        assert np.isfinite(step["loss/total"]) and step["loss/grad_norm"] > 0
        assert step["policy/rollout_difference"] < 1e-4  # the engine saw what the trainer saw
    trajectories = list(open_store(run).trajectories(split="train"))
    assert len(trajectories) == 12
    for trajectory in trajectories:
        (segment,) = trajectory.segments
        assert [medium.kind for medium in segment.media] == ["image", "image"]
    exported = run / "checkpoints" / "step-000002" / "model" / "model.safetensors"
    first, last = load_file(tmp_path / "model" / "model.safetensors"), load_file(exported)
    changed = {name for name in first if not torch.equal(first[name], last[name])}
    assert any("visual" in name for name in changed) and any("language_model" in name or "embed" in name for name in changed)
    assert (exported.parent / "preprocessor_config.json").is_file()


def test_images_without_a_processor_are_refused(tmp_path: Path) -> None:
    config = write_vision_run(tmp_path)
    called = call_command(main, "train", config, "model.processor=none")
    assert called.code == 2
    assert "task 'task-0'" in called.err and "shows image and the run has no processor" in called.err


def test_missing_image_is_named_before_the_run(tmp_path: Path) -> None:
    config = write_vision_run(tmp_path)
    (tmp_path / "images" / "red.png").unlink()
    called = call_command(main, "train", config)
    assert called.code == 2
    assert "task 'task-1'" in called.err and "red.png" in called.err
