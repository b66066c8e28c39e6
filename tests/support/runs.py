"""A whole run on disk that takes seconds: a config, a model of a few thousand numbers, tasks, a tool and an interaction.

    config = write_tiny_run(tmp_path)                      tmp_path/config.yaml, tasks.jsonl, plugins.py
    called = call_command(main, "train", config)           what the command printed, and its exit code

For tests of the commands and of what a run leaves behind. The reward differs between the members of a group even with
random weights, so every step has something to learn from.
"""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from polyturn.config.config_source import ConfigSource
from polyturn.config.load import load_config
from polyturn.config.models import RunConfig
from polyturn.tokens.codec import Codec
from polyturn.tokens.probe import TemplateProbe, probe_template
from polyturn.tracking.jsonl import read_metrics

CONFIG = """\
name: tiny
out: {out}
num_threads: 1
model:
  init: {{model_type: qwen3, hidden_size: 16, num_hidden_layers: 1, num_attention_heads: 2, num_key_value_heads: 1,
         head_dim: 8, intermediate_size: 32, max_position_embeddings: 512, tie_word_embeddings: true}}
  tokenizer: {{corpus: "plugins.py:corpus", vocab_size: 300}}
data:
  train: {{files: tasks.jsonl}}
rollout:
  limits: {{max_turns: 2, max_tokens_per_turn: 6, max_context: 448}}
  tools: {{functions: ["plugins.py:shout"]}}
  interactions: [{{name: coach, class_name: "plugins.py:Coach", config: {{}}}}]
engine: {{num_slots: 16}}
reward:
  routes: {{tiny: "plugins.py:score"}}
warm_start:
  conversations: conversations.jsonl
train:
  steps: 3
  groups_per_step: 2
  group_size: 3
  optim: {{lr: 1.0e-3}}
evaluation:
  data: {{files: tasks.jsonl, limit: 2}}
"""

PLUGINS = '''\
import polyturn
from polyturn.interactions.base import BaseInteraction
from polyturn.rollout.scheduler import MultiTurnScheduler


def corpus():
    return ["How loud is a mouse? Say it again, please.", "It is quiet. #### 4"] * 20


@polyturn.tool
def shout(text: str) -> str:
    """Say something loudly.

    Args:
        text: What to say.
    """
    return text.upper()


class Coach(BaseInteraction):
    stateless = True

    async def generate_response(self, instance_id, messages, **kwargs):
        return False, "Say it again.", 0.5, {}


class GoesOn(MultiTurnScheduler):
    """Goes on behind a completion that was cut, as those of a model of random numbers are."""

    stateless = True

    def check_finished(self, episode, turn):
        return None


def score(trajectory):
    return len(set(trajectory.turns[0].message.text)) / 8
'''

SEVERAL_TURNS = (
    "rollout.scheduler=plugins.py:GoesOn",
    "rollout.limits={max_turns: 4, max_tokens_per_turn: 6, max_context: 1900}",
    "model.init.max_position_embeddings=2048",
)
"""Settings with which every conversation of the run has four turns; as it is, one."""


def write_tiny_run(folder: Path, *, num_tasks: int = 6) -> Path:
    """Write the run into `folder` and return its config file; what it leaves goes to `folder/runs`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "plugins.py").write_text(PLUGINS)
    rows = [
        {
            "id": f"mouse-{i}",
            "data_source": "tiny",
            "prompt": [{"role": "user", "content": f"How loud is mouse {i}?"}],
            "extra_info": {"interaction_kwargs": {"name": "coach"}},
        }
        for i in range(num_tasks)
    ]
    (folder / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    said = [{"role": "user", "content": "How loud?"}, {"role": "assistant", "content": "quiet"}]
    (folder / "conversations.jsonl").write_text(json.dumps({"messages": said}) + "\n")
    config = folder / "config.yaml"
    config.write_text(CONFIG.format(out=folder / "runs"))
    return config


def tiny_source(folder: Path, *overrides: str) -> ConfigSource:
    """Write the run, and return its configuration with these settings."""
    return ConfigSource(config=load_config(RunConfig, write_tiny_run(folder), overrides).config, base=folder)


def trained_steps(run: Path) -> list[dict[str, Any]]:
    """Return the metrics of each step that a run trained on."""
    return [line for line in read_metrics(run / "metrics.jsonl") if "loss/total" in line]


class Called(NamedTuple):
    """What a command left."""

    code: int
    """Its exit code."""
    out: str
    err: str


_PROBED: dict[tuple[str, ...], TemplateProbe] = {}


def probe_once(codec: Codec, *, tools: Sequence[Mapping[str, Any]] = ()) -> TemplateProbe:
    """Probe a template as `probe_template` does, once in a process: most runs of tests have the same template."""
    tokenizer = codec.tokenizer
    special = repr((type(tokenizer), tokenizer.special_tokens_map, codec.template_kwargs))
    key = (tokenizer.backend_tokenizer.to_str(), special, str(codec.chat_template), json.dumps(tools))
    if key not in _PROBED:
        _PROBED[key] = probe_template(codec, tools=tools)
    return _PROBED[key]


def call_command(main: Callable[[Sequence[str]], None], *arguments: object) -> Called:
    """Call a command of polyturn in this process, where no template is probed twice.

    Args:
        main: `polyturn.cli.main.main`.
        arguments: What follows `polyturn` on the command line, for instance "train", config, "train.steps=2".
    """
    out, err = io.StringIO(), io.StringIO()
    code = 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.MonkeyPatch.context() as patch:
        patch.setattr("polyturn.build.parts.probe_template", probe_once)
        try:
            main([str(a) for a in arguments])
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else 0 if ended.code is None else 1
    return Called(code, out.getvalue(), err.getvalue())
