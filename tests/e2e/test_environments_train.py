"""A config that names another package's environment in one line trains: two steps of a tiny model with random weights."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml

from polyturn.cli.main import main
from polyturn.store.stored_run import open_store
from support.runs import call_command

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENTS = ROOT / "tests/data/environments"


def train(tmp_path: Path, env: object, *, max_turns: int = 2, **data: object) -> list[dict[str, float]]:
    (tmp_path / "corpus.py").write_text(
        "def corpus():\n    return ['Guess a number. Count to three. A word of letters.'] * 40\n"
    )
    config = {
        "name": "t",
        "out": str(tmp_path / "runs"),
        "num_threads": 1,
        "model": {
            "init": {
                **{"model_type": "qwen3", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2},
                **{"num_key_value_heads": 1, "head_dim": 16, "intermediate_size": 64, "max_position_embeddings": 2048},
            },
            "tokenizer": {"corpus": "corpus.py:corpus", "vocab_size": 300},
        },
        "env": env,
        "rollout": {
            "limits": {"max_turns": max_turns, "max_tokens_per_turn": 10, "max_context": 2048, "timeout_s": 120},
            "tokenization_sanity_check_mode": "disable",  # random weights do not write text
        },
        "engine": {"num_slots": 16},
        "train": {"steps": 2, "groups_per_step": 2, "group_size": 3, "optim": {"lr": 1.0e-3}},
        **data,
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    called = call_command(main, "train", tmp_path / "config.yaml")
    assert called.code == 0, called.err
    lines = [json.loads(line) for line in (tmp_path / "runs/t/metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "reward/mean" in line]
    assert len(steps) == 2
    trajectories = list(open_store(tmp_path / "runs/t").trajectories(split="train"))
    assert len(trajectories) == 12 and all(t.error is None and t.reward is not None for t in trajectories)
    return steps


def test_gem_game(tmp_path: Path):
    pytest.importorskip("gem", reason="pip install 'polyturn[environments]'")
    (tmp_path / "also.py").write_text(
        "def by_length(trajectory):\n"
        "    return sum(t.scores['env'] for t in trajectory.turns) + len(trajectory.turns[0].message.text) % 5\n"
    )
    env = {"name": "gem:game:GuessTheNumber-v0-easy", "tasks": 8, "eval_tasks": 0}
    steps = train(tmp_path, env, reward={"function": "also.py:by_length"})
    assert all(np.isfinite(step["loss/total"]) and step["loss/grad_norm"] > 0 for step in steps)


def test_class_whose_methods_are_tools(tmp_path: Path):
    train(tmp_path, {"name": f"trl:{ENVIRONMENTS / 'counter.py'}:Counter", "tasks": 8, "eval_tasks": 0})


@pytest.mark.slow
def test_verifiers_environment_with_its_own_loop(tmp_path: Path):
    command = [sys.executable, str(ROOT / "scripts/environments/build.py"), "--where"]
    python = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    if not (Path(python).parents[1] / ".complete").exists():
        pytest.skip("python scripts/environments/build.py builds what it runs in")
    kwargs = {"python": python, "path": str(ENVIRONMENTS), "by_length": True}
    env = {"name": "verifiers:vf_talk", "tasks": 8, "eval_tasks": 0, "kwargs": kwargs}
    steps = train(tmp_path, env, max_turns=4)
    assert any(step["loss/grad_norm"] > 0 for step in steps)
    assert all(step["policy/rollout_difference"] < 1e-4 for step in steps), "the trainer computes what was sampled"
