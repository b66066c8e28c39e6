"""One line of a config names an environment: it is checked, rolled out, trained on and evaluated. Mistakes are sentences."""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from polyturn.cli.main import main
from polyturn.environments.scripted import play
from polyturn.infra.plugins import import_attr
from polyturn.store.stored_run import open_store
from support.cases import needs
from support.runs import call_command, trained_steps

pytestmark = needs("gymnasium", "textarena", "reasoning_gym", extra="environments")

call = functools.partial(call_command, main)

CONFIG = """\
name: tiny
env: {env}
num_threads: 1
model:
  init: {{model_type: qwen3, hidden_size: 16, num_hidden_layers: 1, num_attention_heads: 2, num_key_value_heads: 1,
         head_dim: 8, intermediate_size: 32, max_position_embeddings: 2048, tie_word_embeddings: true}}
  tokenizer: {{corpus: "plugins.py:corpus", vocab_size: 300}}
rollout: {{limits: {{max_turns: 3, max_tokens_per_turn: 6, max_context: 2048}}}}
engine: {{num_slots: 16}}
train: {{steps: 2, groups_per_step: 2, group_size: 2, optim: {{lr: 1.0e-3}}}}
algorithm: {{drop_zero_variance: false}}
"""
PLUGINS = """\
def corpus():
    return ["You are Player 0 in Nim. Remove objects from exactly one pile. '[0 3]' Current Pile: pile 0: 3"] * 20


def moves():
    from polyturn.core.messages import Message
    from polyturn.data.conversations import Conversation

    said = (Message(role="user", content="Current Pile: pile 0: 3"), Message(role="assistant", content="[0 1]"))
    return [Conversation(messages=said)] * 8


class Longer:
    \"\"\"Pays for every letter.\"\"\"

    def __init__(self, num_turns=2):
        self.num_turns = num_turns

    def reset(self, *, seed):
        self.left = self.num_turns
        return f"Write something, number {seed}."

    def step(self, action):
        self.left -= 1
        return "More.", len(action) / 10, self.left == 0, {}

    def close(self):
        with open("closed.txt", "a") as file:
            file.write("1")
"""


def write(folder: Path, env: str) -> Path:
    (folder / "plugins.py").write_text(PLUGINS)
    (folder / "config.yaml").write_text(CONFIG.format(env=env))
    return folder / "config.yaml"


@pytest.fixture(autouse=True)
def _inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.learns
def test_each_seat_of_a_game_trains_on_its_own_reward(tmp_path: Path) -> None:
    config = write(tmp_path, "{name: 'textarena:Nim-v0', tasks: 8, eval_tasks: 2, eval_seats: [policy, random]}")
    learnt = ["warm_start.conversations=plugins.py:moves", "warm_start.steps=60", "warm_start.optim.lr=0.02"]
    called = call("train", config, *learnt)
    assert called.code == 0, called.err
    run = tmp_path / "runs" / "tiny"
    steps = trained_steps(run)
    assert len(steps) == 2 and all(np.isfinite(step["loss/total"]) for step in steps)
    assert all("reward/agent/seat 0" in step for step in steps)
    games = [t for t in open_store(run).trajectories(split="train") if t.reward is not None]
    assert {s.agent for t in games for s in t.segments} == {"seat 0", "seat 1"}
    assert {t.task.extra["env"]["seed"] for t in games} <= set(range(8))
    shown = call("show", run, games[0].id)
    assert "seat 0  turn 0" in shown.out and "agent/seat 0" in shown.out, shown.err
    evaluated = list(open_store(run).trajectories(split="eval/greedy"))
    assert {t.task.extra["env"]["seed"] for t in evaluated} == {8, 9}
    assert all(len({s.agent for s in t.segments}) == 1 for t in evaluated)


def test_own_environment_is_closed_once_per_episode(tmp_path: Path) -> None:
    config = write(tmp_path, "plugins.py:Longer")
    dry = call("train", config, "--dry-run")
    assert dry.code == 0 and "Write something, number 0." in dry.out, dry.err
    (tmp_path / "closed.txt").unlink()
    called = call("rollout", config, "-n", "2")
    assert called.code == 0, called.err
    found = list(open_store(tmp_path / "runs" / "tiny-rollout").trajectories())
    assert len(found) == 4 and len((tmp_path / "closed.txt").read_text()) == 4
    for t in found:
        assert t.reward.total == pytest.approx(sum(x.scores["env"] for x in t.turns))
        assert t.task.prompt[0].text.startswith("Write something, number ")


def test_several_environments_make_one_run(tmp_path: Path) -> None:
    config = write(
        tmp_path,
        "[{name: 'plugins.py:Longer', tasks: 2}, {name: 'gymnasium:FrozenLake-v1', tasks: 2}, {name: 'reasoning_gym:gcd'}]",
    )
    called = call("rollout", config, "-n", "3")  # one of each
    assert called.code == 0, called.err
    names = {t.task.data_source for t in open_store(tmp_path / "runs" / "tiny-rollout").trajectories()}
    assert names == {"env/plugins.py:Longer", "env/gymnasium:FrozenLake-v1", "env/reasoning_gym:gcd"}


@pytest.mark.parametrize(
    ("env", "arguments", "says"),
    [
        ("texarena:Nim-v0", (), "there is no prefix 'texarena'. Did you mean 'textarena'?"),
        ("textarena:Nimm-v0", (), "there is no 'Nimm-v0'. Did you mean 'Nim-v0'"),
        ("Nim", (), "'Nim' is not the name of an environment; write 'prefix:id'"),
        ("'plugins.py:Lonely'", (), "has no attribute 'Lonely'. Did you mean 'Longer'?"),
        ("{name: 'plugins.py:Longer', kwargs: {turns: 3}}", (), "does not take env.kwargs {'turns': 3}"),
        ("{name: 'textarena:Nim-v0', kwargs: {num_players: 5}}", (), "does not start with 5 players"),
        ("{name: 'textarena:Nim-v0', seats: [policy]}", (), "has 2 seats, but env.seats names 1"),
        ("textarena:Nim-v0", ("data.train.files=tasks.jsonl",), "has its own tasks, and data.train is set as well"),
        ("[textarena:Nim-v0, 'plugins.py:Longer']", ("data.train.files=tasks.jsonl",), "can go to only one environment"),
        ("{name: 'plugins.py:Longer', eval_seats: [policy]}", (), "has one player and env.eval_seats is"),
        ("textarena:Nim-v0", ("rollout.scheduler=gym",), "env has its own scheduler and rollout.scheduler is 'gym'"),
        ("['textarena:Nim-v0', 'textarena:Nim-v0']", (), "env names 'textarena:Nim-v0' twice"),
    ],
)
def test_impossible_environment_is_refused_before_the_run(
    tmp_path: Path, env: str, arguments: Sequence[str], says: str
) -> None:
    (tmp_path / "tasks.jsonl").write_text('{"prompt": "Play."}\n')
    called = call("train", write(tmp_path, env), *arguments)
    assert called.code == 2 and says in called.err, called.err
    assert "Traceback" not in called.err and not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("example", "shows"), [("guess", "the number between 1 and 7 within 2 turns"), ("nim", "pile 1: 4")]
)
def test_examples_dry_run(tmp_path: Path, example: str, shows: str) -> None:
    config = Path(__file__).parents[2] / "examples" / "textarena" / f"{example}.yaml"
    called = call("train", config, "--dry-run", f"out={tmp_path}", "env.tasks=8", "env.eval_tasks=2", "num_threads=1")
    assert called.code == 0 and shows in called.out, called.err


async def test_guessing_example_pays_for_the_number() -> None:
    base = Path(__file__).parents[2] / "examples" / "textarena"
    game, is_found = import_attr("guess.py:adapter", base=base)(), import_attr("guess.py:is_found", base=base)
    played = [await play(game, seed=3, actions=[f"[{a}]" for a in order]) for order in ((4, 2, 6), (7, 5, 3), (1, 3, 5))]
    assert all(0 < p.reward <= 1 for p in played) and any(p.reward < 1 for p in played)
    assert [is_found(p.trajectory) for p in played] == [float(p.reward == 1) for p in played]


def test_function_that_makes_no_environment_is_refused(tmp_path: Path) -> None:
    called = call("rollout", write(tmp_path, "plugins.py:corpus"))
    assert called.code == 2 and "it must make objects with reset, step and close" in called.err, called.err


def test_missing_package_names_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "textarena", None)
    called = call("train", write(tmp_path, "textarena:Nim-v0"))
    assert called.code == 2 and "pip install 'polyturn[environments]'" in called.err, called.err
