"""A run of a model that sees, written to a folder: a picture is red or blue, and the partner shows another one.

    config = write_vision_run(folder)      the model with its processor, images, tasks, plug-ins and the config

Nothing can be learned from it; it goes all the way of a medium, from a row's file and a partner's image to the gradient.
"""

from __future__ import annotations

import json
from pathlib import Path

from PIL import Image

from support.vision import tiny_processor, tiny_vision_model, vision_tokenizer

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
from support.vision import tiny_processor


def processor(tokenizer):
    return tiny_processor(tokenizer)


class GoesOn(MultiTurnScheduler):
    def check_finished(self, episode, turn):
        return None


class Painter(BaseInteraction):
    async def generate_response(self, instance_id, messages, **kwargs):
        image = Image.new("RGB", (84, 56), kwargs["then"])
        return False, [{"type": "image", "image": image}, {"type": "text", "text": "And this?"}], 0.0, {}


def score(trajectory):
    said = trajectory.turns[0].message.text
    return len(set(said)) / 8
"""


def write_vision_run(folder: Path, *, hidden: int = 32) -> Path:
    """Write the run into `folder` and return its config; `hidden` is the width of the model."""
    tokenizer = vision_tokenizer()
    tiny_processor(tokenizer).save_pretrained(folder / "model")
    tiny_vision_model(tokenizer, hidden=hidden).save_pretrained(folder / "model")
    (folder / "images").mkdir()
    rows = []
    for index in range(4):
        color, then = ("red", "blue") if index % 2 else ("blue", "red")
        Image.new("RGB", (56, 56), color).save(folder / "images" / f"{color}.png")
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
