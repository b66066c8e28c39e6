"""Continued messages, edited histories and branches: the trainer sees the tokens that the engine saw, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from polyturn.cli.main import main
from polyturn.store.stored_run import open_store
from support.example_schedulers import FOLDER
from support.runs import call_command, trained_steps, write_tiny_run

PATIENT = """
from polyturn.rollout.schedulers import Compaction
from support.example_schedulers import MathTips, ThinkingTips

class Patient:
    async def check_finished(self, episode, turn):
        return None  # a random model never ends its turns

class Tips(Patient, MathTips): ...
class Thinks(Patient, ThinkingTips): ...
class Compacts(Patient, Compaction): ...
"""


@pytest.mark.parametrize(
    ("scheduler", "kwargs", "has_segments"),
    [
        ("patient.py:Tips", {"judge": "exact_match"}, False),
        ("patient.py:Thinks", {"judge": "exact_match"}, None),  # where a random model happens to write </think>
        ("patient.py:Compacts", {"budget": 40, "policies": ["window"]}, True),
        (f"{FOLDER}/tree.py:Tree", {"judge": "exact_match", "width": 3}, True),
    ],
)
def test_engine_and_trainer_agree(tmp_path: Path, scheduler: str, kwargs: dict[str, Any], has_segments: bool | None) -> None:
    config = write_tiny_run(tmp_path)
    (tmp_path / "patient.py").write_text(PATIENT)
    tasks = tmp_path / "tasks.jsonl"
    rows = [{**json.loads(line), "ground_truth": "quiet"} for line in tasks.read_text().splitlines()]
    tasks.write_text("".join(json.dumps(row) + "\n" for row in rows))
    called = call_command(
        main,
        *("train", config, "train.steps=1", "train.minibatches=1", "evaluation.data=null"),
        *(f"rollout.scheduler={scheduler}", f"rollout.scheduler_kwargs={json.dumps(kwargs)}", "rollout.limits.max_turns=3"),
        *("rollout.tokenization_sanity_check_mode=ignore_strippable", "algorithm.drop_zero_variance=false"),
    )
    assert called.code == 0, called.err
    run = tmp_path / "runs" / "tiny"
    (step,) = trained_steps(run)
    assert step["policy/rollout_difference_max"] < 1e-4
    trajectories = list(open_store(run).trajectories(split="train"))
    assert len(trajectories) == 6 and all(len(t.turns) > 1 and not t.is_failed for t in trajectories)
    assert has_segments in (None, any(len(t.segments) > 1 for t in trajectories))
