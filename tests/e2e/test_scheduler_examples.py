"""The examples of schedulers train, in short: thinking tips over one sample a turn, and the walk over the frozen lake."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polyturn.cli.main import main
from polyturn.infra.plugins import import_attr
from polyturn.store.stored_run import open_store
from support.runs import call_command, trained_steps

EXAMPLES = Path(__file__).parents[2] / "examples"
PROJECTS = Path(__file__).parents[1] / "data" / "projects"
SMALL = (
    *("num_threads=1", "model.init.hidden_size=32", "model.init.num_hidden_layers=1", "model.init.num_attention_heads=2"),
    *(
        "model.init.num_key_value_heads=1",
        "model.init.head_dim=16",
        "model.init.intermediate_size=64",
        "engine.num_slots=32",
    ),
)


def train(folder: Path, out: Path, *arguments: str) -> Path:
    called = call_command(main, "train", folder / "config.yaml", f"out={out}", *SMALL, *arguments)
    assert called.code == 0, called.err
    return out / folder.name


@pytest.mark.learns
def test_thinking_tips_trains_each_turn_on_its_prompt(tmp_path: Path) -> None:
    run = train(
        PROJECTS / "thinking_tips",
        tmp_path,
        *("warm_start.steps=60", "warm_start.batch_size=8", "warm_start.optim.lr=1e-2"),
        *("train.steps=2", "train.groups_per_step=4", "train.group_size=4", "algorithm.drop_zero_variance=false"),
        *("train.minibatches=2", "algorithm.old_logprobs=engine"),
    )
    steps = trained_steps(run)
    assert len(steps) == 2 and all(np.isfinite(step["loss/total"]) for step in steps)
    assert all(step["policy/rollout_difference"] < 1e-4 for step in steps)
    split = [t for t in open_store(run).trajectories(split="train") if len(t.segments) == 2]
    assert split, "no turn had reasoning that was left out behind it"
    for t in split:
        assert [m.role for m in t.messages] == ["user", "assistant", "user", "assistant"]
        assert [sorted(set(s.turn_ids[s.loss_weights > 0].tolist())) for s in t.segments] == [[0], [1]]


@pytest.mark.slow
def test_frozen_lake_trains_on_walks(tmp_path: Path) -> None:
    run = train(
        EXAMPLES / "frozen_lake",
        tmp_path,
        *("warm_start.steps=40", "warm_start.batch_size=8", "warm_start.kwargs.num_conversations=200"),
        *("train.steps=2", "train.groups_per_step=3", "train.group_size=4", "algorithm.drop_zero_variance=false"),
        *(
            "algorithm.loss_scale=last_round",
            "data.train.kwargs.num_tasks=16",
            "evaluation.data.kwargs.num_tasks=4",
            "rollout.limits.max_turns=4",
        ),
    )
    steps = trained_steps(run)
    assert len(steps) == 2 and all(step["tokens/dropped_loss_scale"] > 0 for step in steps)
    walks = list(open_store(run).trajectories(split="train"))
    assert len(walks) == 24 and all("G is" in t.task.prompt[-1].text for t in walks)
    for t in walks:
        assert t.reward.total == sum(turn.scores["env"] for turn in t.turns)
    groups: dict[str, set[str]] = {}
    for t in walks:
        groups.setdefault(t.id.partition("/")[0], set()).add(t.task.prompt[-1].text)
    assert all(len(maps) == 1 for maps in groups.values())  # the walks of a group are on one lake


# The lake itself.


@pytest.fixture
def lake() -> Any:
    return import_attr(f"{EXAMPLES / 'frozen_lake' / 'lake.py'}:FrozenLake")()


def test_lake_follows_from_its_seed(lake: Any) -> None:
    distances = import_attr(f"{EXAMPLES / 'frozen_lake' / 'lake.py'}:distances")
    for seed in range(30):
        assert lake.reset(seed=seed) == lake.reset(seed=seed)
        assert lake.player in distances(lake.goal, lake.is_hole, lake.size)
    assert len({lake.reset(seed=s) for s in range(30)}) > 25


def test_lake_moves_and_rewards(lake: Any) -> None:
    lake.reset(seed=0)
    lake.player, lake.goal, lake.is_hole = (0, 0), (0, 2), {(1, 0)}
    shown, reward, is_done, info = lake.step("<action>up</action>")
    assert shown.splitlines() == ["P . G .", "H . . .", ". . . .", ". . . .", "G is 2 right."]
    assert (reward, is_done, info) == (0.0, False, {"is_valid": True})
    said, _, is_done, info = lake.step("I walk north")
    assert said.startswith("That is no move.\nP") and not is_done and info == {"is_valid": False}
    assert lake.step("<action>right</action>")[1:3] == (0.0, False)
    assert lake.step("<action>right</action>") == ("You made it.", 1.0, True, {"is_valid": True})
    lake.player = (0, 0)
    assert lake.step("<action>down</action>") == ("You fell.", 0.0, True, {"is_valid": True})
