"""Runs with more than one policy: an opponent that stays, the policy's own past, a user that another model plays.

The game has two seats. Its policy learns in a second to write a few letters; more different letters win.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from polyturn.cli.main import main
from polyturn.core.trajectory import SpanSource, Trajectory
from polyturn.store.stored_run import open_store
from polyturn.testing.tiny_models import tiny_tokenizer
from polyturn.training.checkpoint import Checkpoints
from support.models import tiny_model
from support.runs import SEVERAL_TURNS, call_command, trained_steps, write_tiny_run
from support.states import tensors_in

LETTERS = """
from polyturn.environments.base import Adapter
from polyturn.rollout.env import Seated


class Game:
    def reset(self, *, seed):
        self.counts, self.first = [], seed % 2
        return Seated(seat=self.first, observation="Write letters.")

    def step(self, action):
        self.counts.append(len(set(action)))
        done, seat = len(self.counts) == 4, (self.first + len(self.counts)) % 2
        won = float(sum(self.counts[self.first :: 2]) - sum(self.counts[1 - self.first :: 2])) / 8
        return Seated(seat=seat, observation=f"{self.counts[-1]} letters.", rewards={0: won, 1: -won} if done else {},
                      terminated=done)

    def close(self):
        pass


class Letters(Adapter):
    num_seats = 2
    instructions = "Whoever writes more letters wins."

    def make(self):
        return Game()
"""


def corpus_model(folder: Path) -> None:
    """Save a model whose tokenizer differs from the run's."""
    tokenizer = tiny_tokenizer(vocab_size=320)
    tiny_model(tokenizer, hidden=16, layers=1, max_positions=512).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def write_game(folder: Path, **changes: Any) -> Path:
    """Write a run of the game."""
    config = write_tiny_run(folder)
    (folder / "letters.py").write_text(LETTERS)
    corpus_model(folder / "opponent")
    data = yaml.safe_load(config.read_text())
    for section in ("data", "evaluation", "reward", "rollout"):
        del data[section]
    data["env"] = {"name": "letters.py:Letters", "tasks": 32, "eval_tasks": 0, "seats": ["policy", "opponent"]}
    data["rollout"] = {
        "limits": {"max_turns": 4, "max_tokens_per_turn": 6, "max_context": 448},
        "tokenization_sanity_check_mode": "disable",
    }
    data["engine"] = {"num_slots": 16, "deterministic": True}
    said = [f"{'abcdef'[i % 6]}{'uvwxyz'[i // 6] * (i % 3)}" for i in range(36)]
    prompt = {"role": "user", "content": "Whoever writes more letters wins.\nWrite letters."}
    rows = [{"messages": [prompt, {"role": "assistant", "content": text}]} for text in said]
    (folder / "conversations.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data["warm_start"] = {"conversations": "conversations.jsonl", "steps": 40, "batch_size": 8, "optim": {"lr": 0.02}}
    data["policies"] = {"opponent": {"model": "opponent"}}
    config.write_text(yaml.safe_dump({**data, **changes}))
    return config


def played(folder: Path) -> list[Trajectory]:
    found = list(open_store(folder).trajectories(split="train"))
    assert found and all(t.error is None and t.reward is not None for t in found), [t.error for t in found]
    return found


def final_weights(folder: Path) -> dict[str, torch.Tensor]:
    checkpoints = Checkpoints(folder / "checkpoints")
    latest = checkpoints.latest()
    assert latest is not None
    return dict(tensors_in(latest / "policy", "model/"))


@pytest.mark.learns
def test_game_against_another_model_trains_one_seat(tmp_path: Path) -> None:
    called = call_command(main, "train", write_game(tmp_path), "train.steps=2")
    assert called.code == 0, called.err
    found = played(tmp_path / "runs/tiny")
    for t in found:
        (agent,) = {s.agent for s in t.segments}
        seat = agent.removeprefix("seat ")
        assert t.turns[-1].info["opponents"] == {str(1 - int(seat)): {"policy": "opponent", "version": 0}}
        sampled = sum(len(s) for segment in t.segments for s in segment.spans if s.source is SpanSource.SAMPLED)
        assert sampled == sum(np.count_nonzero(segment.loss_weights) for segment in t.segments) > 0
        assert len(t.turns) == 2, "of four moves"
    assert {s.agent for t in found for s in t.segments} == {"seat 0", "seat 1"}, "the players change seats from task to task"
    for step in trained_steps(tmp_path / "runs/tiny"):
        assert step["policy/rollout_difference"] < 1e-4 and step["loss/grad_norm"] > 0
        assert step["policies/opponent/tokens"] > 0


def past(every: int) -> dict[str, Any]:
    return {
        "policies": {"past": {"model": "self", "refresh_every": every}},
        "env": {"name": "letters.py:Letters", "tasks": 32, "eval_tasks": 0, "seats": ["policy", "past"]},
    }


def versions_by_step(folder: Path) -> list[int]:
    return [int(step["policies/past/version"]) for step in trained_steps(folder)]


@pytest.mark.learns
def test_past_policy_is_refreshed_every_n_steps(tmp_path: Path) -> None:
    config = write_game(tmp_path, **past(2))
    called = call_command(main, "train", config, "train.steps=4")
    assert called.code == 0, called.err
    folder = tmp_path / "runs/tiny"
    assert versions_by_step(folder) == [0, 2, 2, 4], "as it is once the step is taken"
    by_step: dict[int, set[int]] = {}
    for number in range(1, 5):
        for t in open_store(folder).trajectories(split="train", step=number):
            (opponent,) = t.turns[-1].info["opponents"].values()
            by_step.setdefault(number, set()).add(opponent["version"])
            by_step[number].discard(None)  # its game ended before it moved
    assert by_step == {1: {0}, 2: {0}, 3: {2}, 4: {2}}


@pytest.mark.slow
def test_resumed_run_plays_the_same_past(tmp_path: Path) -> None:
    """Interrupted at a refresh (2) and between two (3): in deterministic mode, the bits are equal."""
    config = write_game(tmp_path, **past(2))
    called = call_command(main, "train", config, "train.steps=4", "train.checkpoint_every=1", "train.keep_checkpoints=9")
    assert called.code == 0, called.err
    whole = tmp_path / "runs/tiny"
    for at in (2, 3):
        left = tmp_path / f"left-at-{at}/tiny"
        shutil.copytree(whole, left)
        for later in range(at + 1, 5):
            shutil.rmtree(left / f"checkpoints/step-{later:06d}")
        held = Checkpoints(left / "checkpoints").load(left / f"checkpoints/step-{at:06d}")
        assert ("followers" in held) == (at == 3), "at a refresh, the copy is the policy itself"
        called = call_command(main, "train", config, "train.steps=4", f"out={left.parent}", "--resume")
        assert called.code == 0, called.err
        weights = final_weights(left)
        assert all(torch.equal(value, weights[name]) for name, value in final_weights(whole).items())
        assert versions_by_step(left) == [0, 2, 2, 4]


def test_policies_play_beside_training(tmp_path: Path) -> None:
    stale = ["engine.deterministic=false", "train.max_staleness=1", "train.steps=3"]
    called = call_command(main, "train", write_game(tmp_path, **past(1)), *stale)
    assert called.code == 0, called.err
    assert versions_by_step(tmp_path / "runs/tiny") == [1, 2, 3]
    played(tmp_path / "runs/tiny")


def test_another_model_plays_the_user(tmp_path: Path) -> None:
    config = write_tiny_run(tmp_path, num_tasks=4)
    corpus_model(tmp_path / "guest")
    data = yaml.safe_load(config.read_text())
    user = {"policy": "guest", "goal": "Hear it.", "instructions": "{goal}", "stop_marker": None, "max_tokens": 6}
    data["rollout"]["interactions"] = [
        {"name": "coach", "class_name": "polyturn.interactions.simulated_user.SimulatedUser", "config": user}
    ]
    data["policies"] = {"guest": {"model": "guest"}}
    config.write_text(yaml.safe_dump(data))
    called = call_command(main, "train", config, *SEVERAL_TURNS, "train.steps=1", "evaluation.data=null")
    assert called.code == 0, called.err
    for t in played(tmp_path / "runs/tiny"):
        assert {s.agent for s in t.segments} == {"assistant"} and len(t.turns) > 1
        assert t.turns[0].info["user_policy"] == "guest" and t.turns[0].info["user_policy_version"] == 0
    assert trained_steps(tmp_path / "runs/tiny")[0]["policies/guest/tokens"] > 0


def test_evaluation_has_the_policies_too(tmp_path: Path) -> None:
    changes = past(1)
    changes["env"] |= {"eval_tasks": 2, "seats": ["policy", "policy"], "eval_seats": ["policy", "past"]}
    called = call_command(main, "eval", write_game(tmp_path, **changes))
    assert called.code == 0, called.err
    found = list(open_store(tmp_path / "runs/tiny-eval").trajectories())
    assert found and all("opponents" in t.turns[-1].info for t in found)


def test_dry_run_shows_policies_and_unused_ones(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    changes = past(7)
    changes["policies"]["opponent"] = {"model": "opponent", "max_context": 99}
    called = call_command(main, "train", write_game(tmp_path, **changes), "--dry-run")
    assert called.code == 0, called.err
    assert "past: a copy of the trained policy, made every 7 steps; context of 448 tokens" in called.out
    assert "opponent: opponent; context of 99 tokens" in called.out
    assert "policies.opponent is loaded but not used: no seat" in caplog.text and "policies.past is" not in caplog.text


def test_cluster_run_refuses_further_policies(tmp_path: Path) -> None:
    called = call_command(main, "train", write_game(tmp_path), "cluster.address=local")
    assert called.code != 0 and "policies names 'opponent' and the run has rollout workers" in called.err
