"""A run that is killed by kill -9 at random moments goes on: every task trained on once, and what it left agrees.

The interaction takes a random time, so that groups finish in any order and a kill meets every kind of moment.
"""

from __future__ import annotations

import random
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch

from polyturn.cli.main import main
from polyturn.training.checkpoint import Checkpoints
from polyturn.training.journal_file import JournalFile
from support.cases import each
from support.crash_injection import kill_until_done, ledger_problems
from support.runs import SEVERAL_TURNS, call_command, write_tiny_run
from support.states import tensors_in

call = partial(call_command, main)
BARE = ["evaluation.data=null", "warm_start.conversations=null"]


def write_slow_run(folder: Path, *, max_s: float, sources: int = 1) -> Path:
    """Write the tiny run with an interaction that answers after a random time, of several data sources."""
    config = write_tiny_run(folder)
    plugins = (folder / "plugins.py").read_text()
    slow = (
        f"        import asyncio, os\n        await asyncio.sleep({max_s} * os.urandom(1)[0] / 255)\n        return False,"
    )
    (folder / "plugins.py").write_text(plugins.replace("        return False,", slow))
    if sources > 1:
        lines = (folder / "tasks.jsonl").read_text().splitlines()
        renamed = [
            line.replace('"data_source": "tiny"', f'"data_source": "tiny{i % sources}"') for i, line in enumerate(lines)
        ]
        (folder / "tasks.jsonl").write_text("\n".join(renamed) + "\n")
        text = config.read_text()
        config.write_text(text.replace('routes: {tiny: "plugins.py:score"}', 'function: "plugins.py:score"'))
    return config


@pytest.mark.parametrize(("kills", "steps"), [(1, 8), pytest.param(5, 16, marks=pytest.mark.slow)])
def test_kills_at_random_moments_skip_and_repeat_no_task(tmp_path: Path, kills: int, steps: int):
    config, run = write_slow_run(tmp_path, max_s=0.02), tmp_path / "runs" / "tiny"
    settings = [*BARE, *SEVERAL_TURNS, f"train.steps={steps}", "train.checkpoint_every=2", "train.max_staleness=1"]
    seed = random.SystemRandom().randrange(10**6)
    killed = kill_until_done(config, settings, run=run, steps=steps, kills=kills, seed=seed, max_wait_s=0.8)
    assert killed.problems == [], f"seed {seed}"
    assert killed.kills, killed
    latest = Checkpoints(run / "checkpoints").latest()
    assert latest is not None and latest.name == f"step-{steps:06d}"


def as_killed_after(run: Path, step: int) -> None:
    """Leave the run as a kill leaves it whose last checkpoint is that of `step`: what came later is half there."""
    for path in (run / "checkpoints").glob("step-*"):
        if int(path.name.removeprefix("step-")) > step:
            shutil.rmtree(path)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 99, "rollo')


KINDS = {
    "mix": ["train.minibatches=2", "data.sampler={name: mix, weights: {tiny0: 1, tiny1: 2}, by_success: 1.0}"],
    "critic": ["algorithm.advantage=gae", "algorithm.critic.optim.lr=1e-3", "train.minibatches=2",
               "algorithm.kl={place: reward, coef: 0.05, target: 1.0, horizon: 12}"],
    "lora": ["model.lora={rank: 2}", "train.optim.lr=1e-2", "algorithm.kl={coef: 0.05, target: 0.1}"],
}  # fmt: skip


@pytest.mark.parametrize("kind", each(2, KINDS))
def test_a_deterministic_run_that_goes_on_equals_one_that_never_stopped(tmp_path: Path, kind: str):
    settings = [*BARE, *KINDS[kind], "train.steps=3", "train.checkpoint_every=1", "train.keep_checkpoints=9"]
    settings += ["engine.deterministic=true"]
    config, run = write_slow_run(tmp_path, max_s=0.02, sources=2 if kind == "mix" else 1), tmp_path / "runs" / "tiny"
    called = call("train", config, *settings)
    assert called.code == 0, called.err
    whole = everything_in(run / "checkpoints" / "step-000003")
    as_killed_after(run, 2)
    called = call("train", config, *settings, "--resume")
    assert called.code == 0, called.err
    again = everything_in(run / "checkpoints" / "step-000003")
    for part in ("policy", "update", "sampler", "loop", "shards"):
        assert_same(whole[part], again[part], part)
    assert ledger_problems(run, steps=3) == []


def everything_in(folder: Path) -> dict[str, object]:
    """Return the state in a checkpoint, with what lies in its shards."""
    shards = {path.parent.name: dict(tensors_in(path.parent)) for path in folder.glob("*/.metadata")}
    assert shards.keys() >= {"policy"}
    return {**Checkpoints(folder.parent).load(folder), "shards": shards}


def assert_same(one: object, other: object, where: str) -> None:
    if isinstance(one, torch.Tensor):
        assert isinstance(other, torch.Tensor) and torch.equal(one, other), f"{where} is the same to the bit"
    elif isinstance(one, dict):
        assert isinstance(other, dict) and one.keys() == other.keys(), where
        for key, value in one.items():
            assert_same(value, other[key], f"{where}/{key}")
    else:
        assert one == other or one != one, where


def test_conversations_in_flight_go_on_from_their_last_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Groups that the checkpoint's weights sampled are not sampled again; the tokens are the same ones."""
    monkeypatch.setattr(JournalFile, "settle", lambda self: None)  # a run that ends well leaves no journal
    config, run = write_slow_run(tmp_path, max_s=0.01), tmp_path / "runs" / "tiny"
    settings = [*BARE, *SEVERAL_TURNS, "train.steps=3", "train.checkpoint_every=2", "train.keep_checkpoints=9"]
    assert call("train", config, *settings).code == 0
    monkeypatch.undo()
    journal = (run / "journal" / "step-000002.jsonl").read_text()
    as_killed_after(run, 2)
    (run / "journal" / "step-000002.jsonl").write_text(journal)
    (run / "journal" / "step-000003.jsonl").unlink(missing_ok=True)
    called = call("train", config, *settings, "--resume")
    assert called.code == 0, called.err
    lines = (run / "metrics.jsonl").read_text().splitlines()
    assert '"rollout/resumed_episodes": 6.0' in lines[-1] and '"rollout/restarted_episodes": 0.0' in lines[-1]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (["train.group_size=2"], "train.group_size 3 and this run has 2"),
        (["train.groups_per_step=1"], "train.groups_per_step 2 and this run has 1"),
        (["seed=5"], "seed 0 and this run has 5"),
        (["model.init.hidden_size=32"], "is of another model"),
        (["data.train.limit=3"], "size 6 and this run has 3"),
    ],
)
def test_a_resume_that_would_train_something_else_is_refused(trained: Path, change: list[str], says: str):
    called = call("train", trained, *BARE, "train.steps=2", *change, "--resume")
    assert called.code != 0 and says in called.err and "Traceback" not in called.err, called.err


def test_a_changed_learning_rate_is_taken_with_a_note(trained: Path):
    called = call("train", trained, *BARE, "train.steps=2", "train.optim.lr=1e-4", "--resume")
    assert called.code == 0 and "resumed with another setting: train.optim.lr: 0.001 -> 0.0001" in called.err, called.err


def test_a_resume_without_its_metrics_goes_on(trained: Path):
    (trained.parent / "runs" / "tiny" / "metrics.jsonl").unlink()
    called = call("train", trained, *BARE, "train.steps=3", "--resume")
    assert called.code == 0, called.err


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the config of a run that took a step."""
    config = write_tiny_run(tmp_path_factory.mktemp("trained"))
    called = call("train", config, *BARE, "train.steps=1")
    assert called.code == 0, called.err
    return config
