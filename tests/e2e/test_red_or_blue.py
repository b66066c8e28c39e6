"""A model that sees, trained through the command line: a picture is red or blue, and the partner shows another one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file

from polyturn.cli.main import main
from polyturn.store.stored_run import open_store
from polyturn.testing.runs import call_command
from polyturn.testing.vision import tiny_vision_model, vision_tokenizer

CONFIG = """\
name: seeing
out: runs
num_threads: 1
model: {path: model, processor: "plugins.py:processor"}
data:
  train: {files: tasks.jsonl}
rollout:
  limits: {max_turns: 2, max_tokens_per_turn: 6, max_context: 448}
  scheduler: "plugins.py:GoesOn"
  interactions: [{name: painter, class_name: "plugins.py:Painter", config: {}}]
  tokenization_sanity_check_mode: ignore_strippable
engine: {num_slots: 16}
reward: {routes: {colors: "plugins.py:score"}}
train: {steps: 2, groups_per_step: 2, group_size: 3, optim: {lr: 1.0e-2}}
"""

PLUGINS = """\
from PIL import Image

from polyturn.interactions.base import BaseInteraction
from polyturn.rollout.scheduler import MultiTurnScheduler
from polyturn.testing.vision import tiny_processor


def processor(tokenizer):
    return tiny_processor(tokenizer)


class GoesOn(MultiTurnScheduler):
    def check_finished(self, episode, turn):
        return None


class Painter(BaseInteraction):
    async def generate_response(self, instance_id, messages, **kwargs):
        image = Image.new("RGB", (56, 28), kwargs["then"])
        return False, [{"type": "image", "image": image}, {"type": "text", "text": "And this?"}], 0.0, {}


def score(trajectory):
    said = trajectory.turns[0].message.text
    return len(set(said)) / 8
"""


def write_run(folder: Path) -> Path:
    tokenizer = vision_tokenizer()
    tokenizer.save_pretrained(folder / "model")
    tiny_vision_model(tokenizer).save_pretrained(folder / "model")
    (folder / "images").mkdir()
    rows = []
    for index in range(4):
        color, then = ("red", "blue") if index % 2 else ("blue", "red")
        Image.new("RGB", (28, 28), color).save(folder / "images" / f"{color}.png")
        rows.append(
            {
                "id": f"task-{index}",
                "data_source": "colors",
                "prompt": [{"role": "user", "content": f"<image>Which color has picture {index}?"}],
                "images": [{"path": f"images/{color}.png"}],
                "reward_model": {"ground_truth": color},
                "extra_info": {"interaction_kwargs": {"name": "painter", "then": then}},
            }
        )
    (folder / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "plugins.py").write_text(PLUGINS)
    (folder / "config.yaml").write_text(CONFIG)
    return folder / "config.yaml"


def test_two_steps_of_grpo_train_a_model_that_sees(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    config = write_run(tmp_path)
    called = call_command(main, "train", config)
    assert called.code == 0, called.err
    run = tmp_path / "runs" / "seeing"
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [step for step in steps if "loss/total" in step]
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
    assert (exported.parent / "processor_config.json").is_file()


def test_a_row_with_images_and_a_model_without_a_processor_is_refused_before_the_run(tmp_path: Path) -> None:
    config = write_run(tmp_path)
    called = call_command(main, "train", config, "model.processor=none")
    assert called.code == 2
    assert "task 'task-0'" in called.err and "shows image and the run has no processor" in called.err


def test_an_image_that_is_missing_is_named_before_the_run(tmp_path: Path) -> None:
    config = write_run(tmp_path)
    (tmp_path / "images" / "red.png").unlink()
    called = call_command(main, "train", config)
    assert called.code == 2
    assert "task 'task-1'" in called.err and "red.png" in called.err
