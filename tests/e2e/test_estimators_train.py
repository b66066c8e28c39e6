"""Whole runs of a tiny model with a critic, a KL penalty and a greedy member, and on from a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from polyturn.cli.main import main
from support.runs import call_command, write_tiny_run

RUN = ["evaluation.data=null", "warm_start.conversations=null"]
CRITIC = ["algorithm.kl={place: reward, coef: 0.05, target: 1.0, horizon: 12}", "algorithm.critic.optim.lr=1e-3"]


def train(folder: Path, *arguments: str) -> list[dict[str, float]]:
    """Train, and return the metrics of each step so far."""
    called = call_command(main, "train", write_tiny_run(folder), *RUN, *arguments)
    assert called.code == 0, called.err
    found = [json.loads(line) for line in (folder / "runs/tiny/metrics.jsonl").read_text().splitlines()]
    return [one for one in found if "buffer/groups" in one]


@pytest.mark.parametrize("name", ["gae", pytest.param("bilevel_gae", marks=pytest.mark.slow)])
def test_critic_and_kl_penalty_survive_a_resume(tmp_path: Path, name: str) -> None:
    own = [*CRITIC, f"algorithm.advantage={name}"]
    first = train(tmp_path, "train.steps=1", *own)
    assert len(first) == 1 and first[0]["critic/value_loss"] > 0 and first[0]["critic/value"] == 0
    second = train(tmp_path, "--resume", "train.steps=2", *own)[-1]
    assert second["critic/value"] != 0, "its critic did not start anew"
    assert second["policy/kl_in_reward_coef"] < first[0]["policy/kl_in_reward_coef"] == 0.05


def test_critic_warms_up_alone(tmp_path: Path) -> None:
    one, two = train(tmp_path, "train.steps=2", "algorithm.advantage=turn_gae", "algorithm.critic.warmup=1")
    assert "loss/total" not in one and "loss/total" in two and one["critic/value_loss"] > 0


def test_remax_rolls_out_a_greedy_member(tmp_path: Path) -> None:
    (step,) = train(tmp_path, "train.steps=1", "algorithm.advantage=remax")
    assert step["loss/total"] and step["tokens/greedy"] > 0 and step["buffer/greedy_failed"] == 0


def test_running_mean_goes_on_across_a_resume(tmp_path: Path) -> None:
    own = ["algorithm.advantage={name: rae, decay: 0.5}", "train.group_size=1", "train.groups_per_step=6"]
    whole = train(tmp_path / "whole", "train.steps=2", *own)
    train(tmp_path / "again", "train.steps=1", *own)
    resumed = train(tmp_path / "again", "--resume", "train.steps=2", *own)
    assert [s["policy/advantage"] for s in resumed] == [s["policy/advantage"] for s in whole]
    assert whole[0]["policy/advantage"] != whole[1]["policy/advantage"]
