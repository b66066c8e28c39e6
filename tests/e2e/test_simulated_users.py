"""Simulated users take part in real runs: the same policy, or a model that `polyturn serve --openai` serves.

The judge is a small server here, since a model of random numbers gives no scores.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from polyturn.cli.main import main
from polyturn.core.trajectory import SpanSource, Trajectory
from polyturn.store.stored_run import open_store
from polyturn.testing.tiny_models import tiny_tokenizer
from polyturn.viewer.run_view import RunView
from support.forked import served
from support.models import tiny_model
from support.runs import SEVERAL_TURNS, call_command, trained_steps, write_tiny_run
from support.scripted_server import scripted_server

EXAMPLE = Path(__file__).parents[1] / "data/projects/simulated_user"
SHORT = {"instructions": "{goal}", "stop_marker": None, "max_tokens": 6, "max_user_turns": 3}
"""What fits into the context of a model of a few thousand numbers."""


def write_run(folder: Path, **user: Any) -> Path:
    """Write the tiny run with a simulated user in place of its coach."""
    config = write_tiny_run(folder, num_tasks=4)
    data = yaml.safe_load(config.read_text())
    entry = {"name": "coach", "class_name": "polyturn.interactions.simulated_user.SimulatedUser"}
    data["rollout"]["interactions"] = [{**entry, "config": {"goal": "Hear it.", **SHORT, **user}}]
    data["engine"]["deterministic"] = True
    config.write_text(yaml.safe_dump(data))
    return config


def trained(folder: Path) -> list[Trajectory]:
    """Check the metrics of a run, and return its trajectories."""
    steps = trained_steps(folder)
    assert len(steps) == 2
    for step in steps:
        assert np.isfinite(step["loss/total"]) and step["loss/grad_norm"] > 0
        assert step["policy/rollout_difference"] < 1e-4, "the trainer computes what the engine sampled"
        assert step["tokens/asides"] > 0
    found = list(open_store(folder).trajectories(split="train"))
    assert found and all(t.error is None for t in found), [t.error for t in found]
    return found


def test_policy_trains_with_itself_as_the_user(tmp_path: Path) -> None:
    config = write_run(tmp_path, model="policy")
    called = call_command(main, "train", config, *SEVERAL_TURNS, "train.steps=2", "evaluation.data=null")
    assert called.code == 0, called.err
    for trajectory in trained(tmp_path / "runs/tiny"):
        agents = {"assistant": 0, "user": 0}
        for segment in trajectory.segments:
            sampled = sum(len(s) for s in segment.spans if s.source is SpanSource.SAMPLED)
            agents[segment.agent] += sampled
            assert np.count_nonzero(segment.loss_weights) == (sampled if segment.agent == "assistant" else 0)
        assert agents["assistant"] > 0 and agents["user"] == trajectory.metrics["aside_tokens"] > 0
        assert len(trajectory.turns) == 4 and trajectory.turns[-1].info["user_stop"] == "max_user_turns"
    shown = RunView(tmp_path / "runs/tiny").trajectory(trajectory.id, step=2, split="train")
    asides = [span for s in shown["segments"] if s["agent"] == "user" for span in s["spans"]]
    whys = {span["why"] for span in asides if span["source"] == "sampled"}
    assert whys == {"sampled, not trained: an aside of 'user', which is not a turn of the conversation"}


def test_simulated_user_example_trains(tmp_path: Path) -> None:
    small = ["model.init.hidden_size=16", "model.init.num_hidden_layers=1", "model.init.intermediate_size=32"]
    short = ["rollout.limits.max_tokens_per_turn=6", "rollout.interactions.0.config.max_tokens=6", "engine.num_slots=8"]
    sizes = ["train.steps=1", "train.groups_per_step=2", "train.group_size=2", "data.train.kwargs.num_tasks=4"]
    called = call_command(main, "train", EXAMPLE / "config.yaml", f"out={tmp_path}", "num_threads=1", *small, *short, *sizes)
    assert called.code == 0, called.err
    found = list(open_store(tmp_path / "simulated-user").trajectories(split="train"))
    assert len(found) == 4 and all(t.error is None for t in found)


@pytest.fixture
def judge() -> Iterator[str]:
    """Serve a judge that scores the number of different letters."""

    def answer(path: str, asked: dict[str, Any]) -> Any:
        if not asked:  # it is asked for its models first
            return 404, {}
        talk = json.loads(asked["messages"][1]["content"])["conversation"]
        said = "".join(m["content"] for m in talk if m["role"] == "assistant")
        usage = {"prompt_tokens": 10, "completion_tokens": 1}
        return {"choices": [{"message": {"content": str(min(1.0, len(set(said)) / 60))}}], "usage": usage}

    with scripted_server(answer) as url:
        yield f"{url}/v1"


def test_lookahead_scores_train_the_turns(tmp_path: Path, judge: str) -> None:
    config = write_run(tmp_path, model="policy")
    scheduler = [
        "rollout.scheduler=plugins.py:LooksAhead",
        f"rollout.scheduler_kwargs={{judge: {{base_url: {judge!r}, model: judge}}, num_repeat_rollouts: 2, window: 1}}",
        "algorithm={advantage: {name: mt_grpo, outcome_weight: 0}}",
    ]
    with (tmp_path / "plugins.py").open("a") as plugins:
        plugins.write("\n\nfrom support.example_schedulers import Lookahead\n\n\n")
        plugins.write("class LooksAhead(Lookahead):\n    check_finished = GoesOn.check_finished\n")
    settings = [*SEVERAL_TURNS, *scheduler, "train.steps=2", "evaluation.data=null", "rollout.limits.max_turns=3"]
    called = call_command(main, "train", config, *settings)
    assert called.code == 0, called.err
    run = tmp_path / "runs/tiny"
    for trajectory in trained(run):
        assert {s.agent for s in trajectory.segments} == {"assistant", "user", "lookahead"}
        assert all(not s.loss_weights.any() for s in trajectory.segments if s.agent != "assistant")
        scores = [t.scores["lookahead"] for t in trajectory.turns]
        assert len(scores) == 3 and trajectory.reward is not None
        assert trajectory.reward.total == pytest.approx(sum(scores) / 3)
        assert [t.info["judge_tokens"] for t in trajectory.turns] == [22, 22, 22]
    assert all(step["reward/judge_tokens"] % 66 == 0 < step["reward/judge_tokens"] for step in trained_steps(run))


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Serve a tiny model with `polyturn serve --openai`."""
    folder, tokenizer = tmp_path_factory.mktemp("served") / "model", tiny_tokenizer()
    tokenizer.save_pretrained(folder)
    tiny_model(tokenizer).save_pretrained(folder)
    arguments = ("serve", "--openai", "--model", folder, "--port", 0, "num_threads=1", "rollout.limits.max_context=512")
    with served(*arguments) as (_, origin):
        yield f"{origin}/v1"


@pytest.mark.slow
def test_served_model_is_the_user_and_answers_are_cached(endpoint: str, tmp_path: Path) -> None:
    config = write_run(tmp_path, base_url=endpoint, model="model", cache="answers.sqlite", temperature=1.0)
    found = []
    for name in ("first", "second"):
        called = call_command(main, "rollout", config, "-n", "2", *SEVERAL_TURNS, f"name={name}")
        assert called.code == 0, called.err
        stored = open_store(tmp_path / f"runs/{name}-rollout").trajectories()
        found.append(sorted(stored, key=lambda t: t.id))  # groups end in any order
    first, second = found
    said = [t.turns[i].observation[0].text for t in first for i in range(3)]
    assert len(first) == 6 and all(said) and len(set(said)) > 6
    assert [t.messages for t in first] == [t.messages for t in second]
    assert all(turn.info["user_cached"] is (run is second) for run in found for t in run for turn in t.turns[:3])
    assert {s.agent for t in first for s in t.segments} == {"assistant"}


def test_unreachable_user_stops_the_run_before_it_starts(tmp_path: Path) -> None:
    config = write_run(tmp_path, base_url="http://127.0.0.1:9/v1", model="model")
    called = call_command(main, "rollout", config)
    assert called.code == 2 and "the simulated user 'coach': the endpoint http://127.0.0.1:9/v1" in called.err
    data = yaml.safe_load(config.read_text())
    del data["rollout"]["interactions"][0]["config"]["goal"]
    config.write_text(yaml.safe_dump(data))
    called = call_command(main, "rollout", config)
    assert called.code == 2 and "task 'mouse-0': the simulated user 'coach' has no goal" in called.err
